// Steps a game with random actions, as tests/ledger.py does, and prints its digests.
import { readFileSync } from "node:fs";

const job = JSON.parse(readFileSync(process.argv[2]));
const module = new WebAssembly.Module(bytesOfBase64(job.wasm));
const env = new VecEnv(module, job.layout, job.shared, { numEnvs: job.num_envs, autoresetMode: job.autoreset_mode });
const agents = job.layout.num_agents;
const found = {};
env.reset({ seed: BigInt(job.seed) });
env.digest.addReset();
for (let step = 1; step <= Math.max(...job.marks); step++) {
  env.sampleActions();
  env.step();
  env.digest.addStep();
  if (job.autoreset_mode === "disabled" && step % job.reset_every === 0) {
    const ended = Array.from({ length: job.num_envs }, (_, e) => {
      return Number(!env.state.engine_active.subarray(e * agents, (e + 1) * agents).includes(1));
    });
    env.reset({ mask: ended });
  }
  if (step % job.state_every === 0) env.digest.addState();
  if (job.marks.includes(step)) found[step] = env.digest.hex();
}
console.log(JSON.stringify(found));
