// Prints what a policy gives for observations in turn: parameters, greedy actions, and many draws for the last one.
import { readFileSync } from "node:fs";

const { policy, agent, observations, bytes, mask, draws } = JSON.parse(readFileSync(process.argv[2]));
const rows = observations.map((row) => (bytes ? Uint8Array.from(row) : Float32Array.from(row)));
const [one, other] = [new TrainedPolicy(policy), new TrainedPolicy(policy)];
const random = randomNumbers(7n);
const parameters = rows.map((row) => [...one.parameters(agent, row)]);
const greedy = rows.map((row) => other.act(agent, row, mask, random, true));
const sampled = Array.from({ length: draws }, () => other.act(agent, rows.at(-1), mask, random));
console.log(JSON.stringify({ parameters, greedy, sampled }));
