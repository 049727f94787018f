// Prints the drawings of states, given as [{field: {data, shape, kind}}].
import { readFileSync } from "node:fs";

const { states } = JSON.parse(readFileSync(process.argv[2]));
const restored = (fields) => Object.fromEntries(Object.entries(fields).map(([name, { data, shape, kind }]) => [name, new NDArray(data, shape, kind)]));
console.log(JSON.stringify(states.map((state) => draw(restored(state)))));
