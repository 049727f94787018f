// Simulates replays and prints, for each, the first step whose digest differs, or null.
import { readFileSync } from "node:fs";

const { content, replays } = JSON.parse(readFileSync(process.argv[2]));
const module = new WebAssembly.Module(bytesOfBase64(content.wasm));
const found = [];
for (const text of replays) {
  const check = checkReplay(new History(new Simulation(module, content)), await readReplay(bytesOfBase64(text)));
  let result;
  do result = check.next();
  while (!result.done);
  found.push(result.value);
}
console.log(JSON.stringify(found));
