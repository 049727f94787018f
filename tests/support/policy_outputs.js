// Prints what a policy gives for observations in turn: parameters, greedy actions, many draws for the last one, and, with
// `begins`, what it gives for all of them at once, two times.
import { readFileSync } from "node:fs";

const { policy: content, agent, observations, bytes, mask, draws, begins } = JSON.parse(readFileSync(process.argv[2]));
const rows = observations.map((row) => (bytes ? Uint8Array.from(row) : Float32Array.from(row)));
const policy = new TrainedPolicy(content);
const random = randomNumbers(7n);
const states = policy.states();
const parameters = rows.map((row) => [...policy.parameters(agent, row, states)]);
const greedy = parameters.map((row) => policy.draw(row, mask, random, true));
const sampled = Array.from({ length: draws }, () => policy.draw(parameters.at(-1), mask, random));
const ofAll = policy.states(rows.length);
const [once, twice] = [null, begins].map((own) => {
  if (begins === null) return [];
  const found = [...policy.parameters(agent, Float32Array.from(observations.flat()), ofAll, rows.length, own)];
  return rows.map((_, row) => found.slice((row * found.length) / rows.length, ((row + 1) * found.length) / rows.length));
});
console.log(JSON.stringify({ parameters, greedy, sampled, once, twice }));
