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
    this.actors = Object.fromEntries(this.roles.map((role) => [role.name, this.kinds(role.name)[0]]));
    this.greedy = false;
    this.placesOf = new Map();
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
    this.returns.set(this.env.state.engine_returns);
  }

  // After a reset of the environment.
  begin() {
    const { env } = this;
    this.steps = 0;
    this.returns.fill(0);
    for (const policy of this.policies) policy.reset();
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

  mask(agent) {
    const { action_mask: all } = this.env.outputs;
    const { num_logits } = this.layout.action;
    return all ? all.subarray(agent * num_logits, (agent + 1) * num_logits) : null;
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

  // Runs the policies that remember through the steps from `first` up to the present one, to which `seek` goes.
  remember(first, seek) {
    const { steps } = this;
    for (const policy of this.policies) policy.reset();
    const remembering = this.policies.filter(({ cell }) => cell);
    if (!remembering.length) return;
    for (let step = first; step < steps; step++) {
      seek(step);
      for (const policy of remembering) {
        for (const agent of policy.agents) if (this.acts(agent)) policy.parameters(agent, this.observation(agent));
      }
    }
    seek(steps);
  }

  // Steps with the actions that are there.
  advance() {
    const { env } = this;
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
    const policy = this.policies.find(({ agents }) => agents.includes(agent));
    return policy.act(agent, this.observation(agent), this.mask(agent), this.random, this.greedy);
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
