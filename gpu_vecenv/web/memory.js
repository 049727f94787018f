// What recurrent policies and critics remember of an episode: states of the agents before the present step. They see all
// that active agents observe, also where another actor acts for them.

class PolicyMemory {
  constructor(policies) {
    this.since = 0; // step of the episode from which on it remembers
    this.rows = new Map(); // agent -> its policy, and the states of that and of its critic, null without memory
    for (const policy of policies) {
      for (const agent of policy.agents) this.rows.set(agent, { policy, actor: policy.states(), critic: policy.critic.states() });
    }
  }

  arrays() {
    return [...this.rows.values()].flatMap(({ actor, critic }) => [actor, critic]).flatMap((states) => (states ? Object.values(states) : []));
  }

  // Before the first observation of an episode, or before the first one that is known.
  clear(since = 0) {
    this.since = since;
    for (const array of this.arrays()) array.fill(0);
  }

  // The states of an agent's policy and critic, which may be written.
  copy(agent) {
    const { actor, critic } = this.rows.get(agent);
    return { actor: copied(actor), critic: copied(critic) };
  }

  // A sentence where an agent's policy or critic does not know the beginning of the episode; else null.
  gap(agent) {
    const { actor, critic } = this.rows.get(agent);
    return this.since > 0 && (actor || critic) ? `Its memory begins at step ${this.since}, from which on this environment is shown alone.` : null;
  }

  // Before a step: what is observed now becomes a part of it; of agents that are not active nothing is left.
  advance(simulation) {
    for (const [agent, { policy, actor, critic }] of this.rows) {
      if (!actor && !critic) continue;
      if (simulation.env.outputs.active[agent]) {
        if (actor) policy.outputs(agent, simulation.observation(agent), actor);
        if (critic) policy.critic.outputs(simulation, agent, critic);
      } else for (const states of [actor, critic]) if (states) cleared(states);
    }
  }
}
