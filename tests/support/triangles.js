// Prints the corners of the triangles of polygons.
import { readFileSync } from "node:fs";

const polygons = JSON.parse(readFileSync(process.argv[2]));
console.log(JSON.stringify(polygons.map(triangles)));
