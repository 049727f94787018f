// The episode that is played, as a stage shows it: pictures of its steps, simulated again where they are gone.

const KEPT_PICTURES = 96; // more than trails are long

class LiveEpisode {
  constructor(history, labels) {
    const { simulation } = history;
    const { agents } = simulation.layout;
    Object.assign(this, { history, simulation, agents, pictures: new Map(), lastPlaces: new Map(), labels });
    this.agentIndex = new Map(agents.map((name, agent) => [name, agent]));
    const drawing = this.picture(0);
    this.roles = simulation.roles.map(({ name, agents }) => ({ name, first: agents[0], end: agents.at(-1) + 1 }));
    const colours = roleColours(drawing, this.roles);
    this.roles.forEach((role, k) => (role.colour = colours[k]));
    this.hasPlaces = agents.length > 1 && discsOf(drawing).size > 0;
  }

  // After a reset.
  begin() {
    this.pictures.clear();
    this.lastPlaces.clear();
    this.rewards = new Float32Array(this.agents.length); // of the step before
  }

  // Steps that are known.
  get numSteps() {
    return this.history.length;
  }

  // The drawing at a step; the simulation is where it was.
  picture(step) {
    if (!this.pictures.has(step)) {
      const { steps } = this.simulation;
      this.history.seek(step);
      this.keep();
      this.history.seek(steps);
    }
    return this.pictures.get(step);
  }

  // Keeps the picture of the present step.
  keep() {
    const drawing = this.simulation.draw();
    for (const [agent, { x, y }] of discsOf(drawing)) this.lastPlaces.set(agent, [x, y]);
    this.pictures.set(this.simulation.steps, drawing);
    if (this.pictures.size > KEPT_PICTURES) this.pictures.delete(this.pictures.keys().next().value);
  }

  // Goes to a step, so that the pictures of those from `first` on are kept.
  prepare(first, step) {
    for (let each = Math.max(first, this.history.first); each <= step; each++) {
      if (this.pictures.has(each)) continue;
      this.history.seek(each);
      this.keep();
    }
    this.history.seek(step);
  }

  // Forgets the pictures after a step, or from it on.
  cut(step) {
    for (const each of this.pictures.keys()) {
      if (each > step) this.pictures.delete(each);
    }
  }

  // Where an agent is drawn at a step whose picture is kept, in the game's units; null for nowhere.
  place(agent, step) {
    const disc = this.pictures.has(step) && discsOf(this.pictures.get(step)).get(agent);
    return disc ? [disc.x, disc.y] : null;
  }

  // Where an agent was last drawn.
  lastPlace(agent) {
    return this.lastPlaces.get(agent) ?? null;
  }

  // At the present step.
  isActive(agent) {
    return this.simulation.env.outputs.active[agent] !== 0;
  }

  // A new step at the end of what is known; its events.
  advance() {
    const { history, simulation } = this;
    const { outputs } = simulation.env;
    const was = outputs.active.slice();
    const before = this.rewards;
    history.advance();
    this.rewards = outputs.rewards.slice();
    return stepEvents(simulation.steps, this.agents, {
      was: (agent) => was[agent] !== 0,
      is: (agent) => outputs.active[agent] !== 0,
      terminated: (agent) => outputs.terminations[agent] !== 0,
      truncated: (agent) => outputs.truncations[agent] !== 0,
      reward: (agent) => outputs.rewards[agent],
      before: (agent) => before[agent],
    });
  }
}
