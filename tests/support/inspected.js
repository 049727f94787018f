// Plays an episode, some roles by their policies, the others at random; prints at each step the actions and the value of
// each agent of the policies, then the values again in another order of steps, and in an episode that is played again.
import { readFileSync } from "node:fs";

const { content, seed, steps, trained, sought } = JSON.parse(readFileSync(process.argv[2]));
const simulation = new Simulation(new WebAssembly.Module(bytesOfBase64(content.wasm)), content);
for (const { name } of simulation.roles) simulation.actors[name] = trained.includes(name) ? "trained" : "random";
simulation.greedy = true;
const history = new History(simulation);
const agents = simulation.policies.flatMap((policy) => policy.agents);
const values = () => agents.map((agent) => simulation.outputs(agent, { withValue: true }).value);

function played() {
  simulation.reset(BigInt(seed));
  history.begin();
  const rows = [values()];
  for (const _ of Array(steps)) {
    if (simulation.ended) break;
    simulation.act();
    history.advance();
    rows.push(values());
  }
  return rows;
}

const first = played();
const { actions: all, length, row } = history;
const actions = Array.from({ length }, (_, step) => [...all.subarray(step * row, (step + 1) * row)]);
history.spacing = 4; // so that steps are simulated again from the ones before
for (const step of history.snapshots.keys()) if (step % 4) history.snapshots.delete(step);
const again = sought.map((step) => {
  history.seek(Math.min(step, length));
  return values();
});
console.log(JSON.stringify({ agents, actions, values: first, sought: again, repeated: played() }));
