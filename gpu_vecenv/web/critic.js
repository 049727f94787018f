// The values of a policy, in units of returns.

class Critic {
  // `policy`: whose values it gives; `content`: of that policy; `own`: of the critic, see critics.py.
  constructor(policy, content, own) {
    const { kind, reason = null, shared, layers, return_mean, return_std } = own;
    Object.assign(this, { policy, kind, reason, return_mean, return_std, network: null });
    if (layers) this.network = new Network({ ...content, ...own, layers: [...content.layers.slice(0, shared), ...layers] });
  }

  // The value of an agent at the present step; null where there is none. `parameters`: what the policy gives for it;
  // `states`: of the critic, which are written.
  value(simulation, agent, parameters, states) {
    if (this.kind === "none") return null;
    if (this.kind === "q") return greedyValue(parameters, this.policy.head_sizes, simulation.mask(agent));
    return this.outputs(simulation, agent, states)[0] * this.return_std + this.return_mean;
  }

  // What its network gives at the present step.
  outputs(simulation, agent, states) {
    return this.network.outputs(agent, this.kind === "central" ? simulation.criticState(agent) : simulation.observation(agent), states);
  }

  // As of a network.
  states() {
    return this.network?.states() ?? null;
  }
}

// The largest Q value of the allowed choices, summed over the heads; of a head without any it is 0.
function greedyValue(values, sizes, mask) {
  let [sum, start] = [0, 0];
  for (const size of sizes) {
    const allowed = values.subarray(start, start + size).filter((_, k) => !mask || mask[start + k]);
    if (allowed.length) sum += Math.max(...allowed);
    start += size;
  }
  return sum;
}
