// Simulates replays and prints, for each, the first step whose digest differs, or null.
import { readFileSync } from "node:fs";

const { content, replays } = JSON.parse(readFileSync(process.argv[2]));
const module = new WebAssembly.Module(bytesOfBase64(content.wasm));
const found = [];
for (const text of replays) {
  const replay = await readReplay(bytesOfBase64(text));
  found.push(simulateReplay(new Simulation(module, content), replay));
}
console.log(JSON.stringify(found));
