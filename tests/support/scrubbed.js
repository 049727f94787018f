// Plays a replay, jumps to steps of it, and prints the digest and the returns at each, how far apart the snapshots are,
// and what an episode that is played on from one of them has.
import { readFileSync } from "node:fs";

const { content, replay: text, steps, snapshots } = JSON.parse(readFileSync(process.argv[2]));
const module = new WebAssembly.Module(bytesOfBase64(content.wasm));
const simulation = new Simulation(module, content);
const bytes = simulation.arrays().reduce((sum, { byteLength }) => sum + byteLength, 0);
const history = new History(simulation, snapshots * (bytes + OBJECT_BYTES));
const replay = await readReplay(bytesOfBase64(text));
beginReplay(history, replay);
const seen = () => [simulation.digest, ...simulation.returns];
const played = [seen()];
while (history.length < replay.numSteps) {
  history.advance();
  played.push(seen());
}
const sought = steps.map((step) => {
  history.seek(step);
  return seen();
});
const { spacing } = history;
const kept = history.snapshots.size;

// The same steps again, recorded: from a step in the past the episode goes on in another way.
beginReplay(history, replay);
history.begin();
while (history.length < 20) {
  simulation.act();
  history.advance();
}
history.seek(7);
const before = seen();
history.cut();
const edited = simulation.env.state.cell.slice();
edited.fill(3);
history.edit("cell", edited);
simulation.act();
history.advance();
const after = seen();
const { length } = history;
history.seek(0);
history.seek(7);
const cells = [...simulation.env.state.cell];
history.seek(8);
console.log(JSON.stringify({ played, sought, spacing, kept, before, after, length, cells, again: seen() }));
