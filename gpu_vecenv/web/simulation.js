// One environment with an actor for each role: random, still, trained, or a person who steers one agent.

class Simulation {
  constructor(module, content) {
    const { layout, shared } = content;
    this.env = new VecEnv(module, layout, shared, { autoresetMode: "disabled" });
    Object.assign(this, { module, content, layout });
    this.roles = [];
    let first = 0;
    for (const [name, count] of Object.entries(layout.roles)) {
      if (count > 0) this.roles.push({ name, agents: Array.from({ length: count }, (_, k) => first + k) });
      first += count;
    }
    this.roleOf = this.roles.flatMap((role) => role.agents.map(() => role));
    this.policies = content.policies.map((policy) => new TrainedPolicy(policy));
    this.memory = new PolicyMemory(this.policies);
    this.actors = Object.fromEntries(this.roles.map((role) => [role.name, this.kinds(role.name)[0]]));
    this.greedy = false;
    this.placesOf = new Map();
    this.choicesOf = new Map();
    this.steered = null; // the agent that a person steers
    this.episodes = [];
    this.returns = new Float64Array(layout.num_agents); // of the present episode, up to this step
    this.reset(0n);
  }

  // All that changes from step to step, and what a reader may change: typed arrays.
  arrays() {
    const { env, layout } = this;
    const fields = layout.fields.filter(({ shape, shared }) => !shared || shape.length === 0);
    const outputs = layout.outputs.filter(({ name }) => !name.startsWith("final_")); // those are written by resets in a step
    return [
      ...fields.map(({ name }) => env.state[name.replace(/^state_/, "")]),
      ...outputs.map(({ name }) => env.outputs[name]),
      env.digest.words,
      this.returns,
      ...this.memory.arrays(),
    ];
  }

  // The actors that a role may have; the first one is the default.
  kinds(role) {
    const { agents } = this.roles.find(({ name }) => name === role);
    const trained = agents.every((agent) => this.policies.some((policy) => policy.agents.includes(agent)));
    return [...(trained ? ["trained"] : []), "random", ...(this.content.noop[role] ? ["still"] : [])];
  }

  // Starts an episode: with a seed the first one of it, else the next of the same streams.
  reset(seed = null, firstEnvIndex = 0n) {
    if (seed !== null) {
      this.seed = seed;
      this.random = randomNumbers(seed);
      this.episodes = [];
    }
    this.env.reset({ seed, firstEnvIndex });
    this.begin();
  }

  // Goes on with an environment of others of this game, whose episode has begun before.
  take(env, index) {
    const row = (array, own) => array.subarray(index * own.length, (index + 1) * own.length);
    for (const { name, shared } of this.layout.fields) {
      const key = name.replace(/^state_/, "");
      const own = this.env.state[key];
      own.set(shared ? env.state[key] : row(env.state[key], own));
    }
    for (const { name } of this.layout.outputs) this.env.outputs[name].set(row(env.outputs[name], this.env.outputs[name]));
    this.begin();
    this.steps = this.env.state.engine_elapsed_steps[0];
    this.memory.clear(this.steps);
    this.returns.set(this.env.state.engine_returns);
  }

  // After a reset of the environment.
  begin() {
    const { env } = this;
    this.steps = 0;
    this.returns.fill(0);
    this.memory.clear();
    env.digest.clear();
    env.digest.addReset();
    env.digest.addState();
  }

  get ended() {
    return !this.env.outputs.active.includes(1);
  }

  // Whether an agent's next action counts.
  acts(agent) {
    const { active, acting } = this.env.outputs;
    return active[agent] !== 0 && (acting === undefined || acting[agent] !== 0);
  }

  // Where a row of the observations has an agent's own numbers, between padding.
  places(agent) {
    const { observation } = this.layout;
    const { name } = this.roleOf[agent];
    if (!this.placesOf.has(name)) {
      const own = observation.roles[name];
      const all = Array.from({ length: product(observation.shape) }, (_, k) => k);
      this.placesOf.set(name, all.filter((k) => {
        let rest = k;
        for (let axis = own.length - 1; axis >= 0; axis--) {
          if (rest % observation.shape[axis] >= own[axis]) return false;
          rest = Math.floor(rest / observation.shape[axis]);
        }
        return true;
      }));
    }
    return this.placesOf.get(name);
  }

  // A row of the observations without padding, and of the masks; null for none.
  observation(agent) {
    const size = product(this.layout.observation.shape);
    const row = this.env.outputs.obs.subarray(agent * size, (agent + 1) * size);
    const places = this.places(agent);
    return places.length === size ? row : row.constructor.from(places, (k) => row[k]);
  }

  // What a central critic sees for an agent: the fields that the game declares, or the observations of all agents.
  criticState(agent) {
    const { env, layout, content } = this;
    if (!content.critic_state.length) return env.outputs.obs;
    const numbers = content.critic_state.flatMap(({ name, of_agent }) => {
      const all = env.state[name];
      const size = all.length / layout.num_agents;
      return [...(of_agent ? all.subarray(agent * size, (agent + 1) * size) : all)];
    });
    return Float32Array.from(numbers, Number);
  }

  mask(agent, env = this.env, index = 0) {
    const { action_mask: all } = env.outputs;
    const { num_agents, action } = this.layout;
    const start = (index * num_agents + agent) * action.num_logits;
    return all ? Uint8Array.from(this.choices(agent), (column) => all[start + column]) : null;
  }

  // Columns of the masks that an agent's own choices have, between padding: each head has those of the widest role.
  choices(agent) {
    const { name } = this.roleOf[agent];
    if (!this.choicesOf.has(name)) {
      const { sizes } = this.layout.action;
      const widest = (head) => Math.max(...Object.values(sizes).map((own) => own[head] ?? 0));
      const columns = [];
      sizes[name].reduce((start, size, head) => {
        for (let k = 0; k < size; k++) columns.push(start + k);
        return start + widest(head);
      }, 0);
      this.choicesOf.set(name, columns);
    }
    return this.choicesOf.get(name);
  }

  // Writes the actions of the coming step; `steer(agent)` gives that of the agent that a person steers.
  act(steer = null) {
    const { env, layout } = this;
    const { heads } = layout.action;
    env.sampleActions();
    for (let agent = 0; agent < layout.num_agents; agent++) {
      const own = env.actions.subarray(agent * heads, (agent + 1) * heads);
      if (!this.acts(agent)) own.fill(0);
      else own.set(this.#action(agent, steer) ?? own);
    }
  }

  // Steps with the actions that are there.
  advance() {
    const { env } = this;
    this.memory.advance(this);
    env.step();
    this.steps += 1;
    env.outputs.rewards.forEach((reward, agent) => (this.returns[agent] += reward));
    env.digest.addStep();
    env.digest.addState();
  }

  #action(agent, steer) {
    const role = this.roleOf[agent].name;
    if (agent === this.steered && steer) return steer(agent);
    if (this.actors[role] === "still") return this.content.noop[role];
    if (this.actors[role] !== "trained") return null; // the environment's own random action
    const { policy, parameters } = this.outputs(agent);
    return policy.draw(parameters, this.mask(agent), this.random, this.greedy);
  }

  // What an agent's policy gives for the present step: parameters of the distribution, and the value or null.
  outputs(agent, { withValue = false } = {}) {
    const { policy } = this.memory.rows.get(agent);
    const { actor, critic } = this.memory.copy(agent);
    const parameters = policy.parameters(agent, this.observation(agent), actor);
    return { policy, parameters, value: withValue ? policy.critic.value(this, agent, parameters, critic) : null };
  }

  get digest() {
    return this.env.digest.words[0].toString(16).padStart(16, "0");
  }

  // Mean return of a role's agents: in this episode, and over those that have ended.
  score(role) {
    const { agents } = this.roles.find(({ name }) => name === role);
    const mean = (returns) => agents.reduce((sum, agent) => sum + returns[agent], 0) / agents.length;
    const ended = this.episodes.map(({ returns }) => mean(returns));
    return { now: mean(this.returns), mean: ended.length ? ended.reduce((a, b) => a + b) / ended.length : null };
  }

  draw() {
    return draw(drawnState(this.env));
  }
}
