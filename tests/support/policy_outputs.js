// Prints what a policy gives for observations in turn: parameters, greedy actions, many draws for the last one, and, with
// `begins`, what it gives for all of them at once, two times.
import { readFileSync } from "node:fs";

const { policy, agent, observations, bytes, mask, draws, begins } = JSON.parse(readFileSync(process.argv[2]));
const rows = observations.map((row) => (bytes ? Uint8Array.from(row) : Float32Array.from(row)));
const [one, other] = [new TrainedPolicy(policy), new TrainedPolicy(policy)];
const random = randomNumbers(7n);
const parameters = rows.map((row) => [...one.parameters(agent, row)]);
const greedy = rows.map((row) => other.act(agent, row, mask, random, true));
const sampled = Array.from({ length: draws }, () => other.act(agent, rows.at(-1), mask, random));
const many = new TrainedPolicy(policy);
const [once, twice] = [null, begins].map((own) => {
  if (begins === null) return [];
  const found = [...many.parameters(agent, Float32Array.from(observations.flat()), rows.length, own)];
  return rows.map((_, row) => found.slice((row * found.length) / rows.length, ((row + 1) * found.length) / rows.length));
});
console.log(JSON.stringify({ parameters, greedy, sampled, once, twice }));
