// Writes a GIF of pictures, [pixels as numbers blue-green-red, hundredths of a second] each, and prints it in base64.
import { readFileSync } from "node:fs";

const { width, height, pictures } = JSON.parse(readFileSync(process.argv[2]));
const gif = new GifFile(width, height);
for (const [pixels, delay] of pictures) {
  const words = Uint32Array.from(pixels, (colour) => (0xff000000 | colour) >>> 0);
  gif.add(new Uint8ClampedArray(words.buffer), delay);
}
console.log(JSON.stringify(Buffer.from(gif.bytes()).toString("base64")));
