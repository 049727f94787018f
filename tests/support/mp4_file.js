// Writes an MP4 file of frames, [bytes, whether it is a key frame] each, and prints it in base64.
import { readFileSync } from "node:fs";

const { frames, width, height, fps, description } = JSON.parse(readFileSync(process.argv[2]));
const encoded = frames.map(([data, key]) => ({ data: Uint8Array.from(data), key }));
const file = mp4File(encoded, { width, height, fps, description: Uint8Array.from(description) });
console.log(JSON.stringify(Buffer.from(file).toString("base64")));
