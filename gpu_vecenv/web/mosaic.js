// Many environments at once as tiles of one picture, by the actors of their roles, and how many agent-steps a second
// they take. One of them can be chosen, to be shown alone.

const MOSAIC_ENVS = [1024, 4096, 10000];
const MOSAIC_BYTES = 2 ** 29; // of the memory of all environments
const STEP_MS = 9; // of a frame of the screen, for steps of all environments
const DRAW_MS = 5; // for tiles; those that are left follow in the next frames
const FIRST_DRAW_MS = 150; // for the first picture
const RATE_MS = 500; // over which the rate is measured
const ACTING = { random: "random actions", still: "standing still", trained: "trained policies" };
const ROWS = 512; // of observations that a policy gets at once

class Mosaic {
  // `stage`: the element of the page's picture, which the tiles cover; `line`: where the numbers stand;
  // `viewState.dark`: whether pictures are dark; `show(index)`: shows an environment alone.
  constructor(simulation, stage, line, viewState, show, count = MOSAIC_ENVS[0]) {
    Object.assign(this, { simulation, stage, line, viewState, show, selected: 0 });
    this.text = element("span");
    const size = element("select", { ariaLabel: "number of environments" }, ...this.#sizes().map((each) => new Option(each.toLocaleString("en"), each)));
    size.addEventListener("change", () => this.#make(Number(size.value)));
    line.replaceChildren(this.text, size);
    this.mark = element("div", { className: "mark", hidden: true });
    stage.append(this.mark);
    this.#canvas(true);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(stage);
    this.#make(count);
  }

  // The numbers of environments for which there is memory.
  #sizes() {
    const { fields, outputs } = this.simulation.layout;
    const bytes = ({ dtype, shape }) => product(shape) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    const each = [...fields, ...outputs].reduce((sum, array) => sum + bytes(array), 0);
    return MOSAIC_ENVS.filter((count, k) => k === 0 || count * each <= MOSAIC_BYTES);
  }

  #make(count) {
    const { module, layout, content, seed } = this.simulation;
    this.env = new VecEnv(module, layout, content.shared, { numEnvs: count, autoresetMode: "same_step" });
    for (const { name, shared } of layout.fields) {
      const key = name.replace(/^state_/, "");
      if (shared) this.env.state[key].set(this.simulation.env.state[key]); // as chosen in the page
    }
    this.env.reset({ seed });
    Object.assign(this, { count, steps: 0, rate: null, measured: null, actions: null });
    this.states = new Map(); // of recurrent policies: agent and first row -> states
    this.random = randomNumbers(seed);
    this.selected = 0;
    this.mark.hidden = true;
    this.canvas.ariaLabel = `${count.toLocaleString("en")} environments; arrow keys choose one, Enter shows it alone`;
    this.#say();
    this.fit();
  }

  // A canvas over the picture: one has either a WebGL context or another.
  #canvas(webgl) {
    this.canvas?.remove();
    this.canvas = element("canvas", { className: "tiles", tabIndex: 0, role: "application" });
    this.stage.append(this.canvas, this.mark);
    this.painter = (webgl && WebGLTiles.on(this.canvas)) || new CanvasTiles(this.canvas);
    this.canvas.addEventListener("webglcontextlost", () => {
      if (this.canvas.parentElement) this.#canvas(false);
      this.fit();
    });
    this.canvas.addEventListener("click", ({ offsetX, offsetY }) => {
      const index = this.grid.at(offsetX * devicePixelRatio, offsetY * devicePixelRatio);
      if (index < this.count) this.show(index);
    });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const { columns } = this.grid;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (event.key === "Enter") this.show(this.selected);
    else if (by !== undefined) {
      if (!this.mark.hidden) this.selected = Math.min(Math.max(this.selected + by, 0), this.count - 1);
      this.#place();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // The mark around the selected tile.
  #place() {
    this.mark.hidden = false;
    const [left, top, width, height] = this.grid.rectangle(this.selected).map((length) => `${length / devicePixelRatio}px`);
    Object.assign(this.mark.style, { left, top, width, height });
  }

  // Shows or hides it; hidden, it keeps its environments.
  visible(visible) {
    this.canvas.hidden = !visible;
    if (!visible) this.mark.hidden = true;
    this.measured = null;
  }

  close() {
    this.observer.disconnect();
    this.canvas.remove();
    this.mark.remove();
  }

  // The grid of tiles, and the picture anew.
  fit() {
    const { canvas } = this;
    const { width, height } = this.stage.getBoundingClientRect();
    canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
    const { bounds: [left, right, bottom, top] } = draw(drawnState(this.env));
    this.grid = tileGrid(canvas, this.count, (right - left) / (top - bottom));
    this.painter.begin(this.grid, this.count);
    Object.assign(this, { tile: 0, unpainted: this.count });
    this.#paint(FIRST_DRAW_MS);
    if (!this.mark.hidden) this.#place();
  }

  // Paints tiles for so many milliseconds, at most each once.
  #paint(ms) {
    const start = performance.now();
    for (let k = 0; k < this.count && (k % 8 > 0 || performance.now() - start < ms); k++) {
      const picture = draw(drawnState(this.env, this.tile));
      this.painter.paint(this.tile, this.viewState.dark ? dark(picture) : picture);
      this.tile = (this.tile + 1) % this.count;
      this.unpainted -= 1;
    }
    this.painter.flush();
  }

  // Steps for STEP_MS, unless it is paused, then draws for DRAW_MS.
  frame(now, playing) {
    if (playing) this.#step();
    if (playing || this.unpainted > 0) this.#paint(DRAW_MS);
    if (!playing) this.measured = null;
    else this.#measure(now);
    if (playing) this.#say();
  }

  #step() {
    const start = performance.now();
    do {
      this.actions ??= this.#decide();
      if (!this.actions.next().done) continue;
      this.actions = null;
      this.env.step();
      this.steps += 1;
    } while (performance.now() - start < STEP_MS);
  }

  #measure(now) {
    this.measured ??= { now, steps: this.steps };
    const elapsed = now - this.measured.now;
    if (elapsed < RATE_MS) return;
    this.rate = ((this.steps - this.measured.steps) * this.count * this.simulation.layout.num_agents * 1000) / elapsed;
    this.measured = { now, steps: this.steps };
  }

  #say() {
    const { roles, actors, layout } = this.simulation;
    const kinds = [...new Set(roles.map(({ name }) => actors[name]))];
    const acting = kinds.length === 1 ? ACTING[kinds[0]] : roles.map(({ name }) => `${name} ${actors[name]}`).join(", ");
    const rate = this.rate === null ? "…" : `${formatted(this.rate / 1e6)} million agent-steps/s in this browser, on one thread`;
    const total = (this.steps * this.count * layout.num_agents).toLocaleString("en");
    this.text.textContent = `${this.count.toLocaleString("en")} environments, ${acting}: ${rate}; ${total} agent-steps`;
  }

  // Writes the actions of the coming step, in parts: random ones, and over them those of roles with other actors.
  *#decide() {
    const { env, simulation } = this;
    const { content, layout } = simulation;
    const { heads } = layout.action;
    env.sampleActions();
    for (const { name, agents } of simulation.roles) {
      const actor = simulation.actors[name];
      if (actor === "random") continue;
      for (const agent of agents) {
        if (actor === "still") {
          for (let k = 0; k < this.count; k++) env.actions.set(content.noop[name], (k * layout.num_agents + agent) * heads);
          continue;
        }
        const policy = simulation.policies.find((one) => one.agents.includes(agent));
        for (let first = 0; first < this.count; first += ROWS) {
          this.#act(policy, agent, first, Math.min(ROWS, this.count - first));
          yield;
        }
      }
    }
  }

  // One agent's actions in `count` environments from `first` on.
  #act(policy, agent, first, count) {
    const { env, simulation } = this;
    const { num_agents, action } = simulation.layout;
    const places = simulation.places(agent);
    const size = env.outputs.obs.length / (this.count * num_agents);
    const obs = new env.outputs.obs.constructor(count * places.length);
    const begins = new Uint8Array(count);
    for (let k = 0; k < count; k++) {
      const start = ((first + k) * num_agents + agent) * size;
      for (let j = 0; j < places.length; j++) obs[k * places.length + j] = env.outputs.obs[start + places[j]];
      begins[k] = Number(env.state.engine_elapsed_steps[first + k] === 0);
    }
    const key = `${agent} ${first}`;
    if (!this.states.has(key)) this.states.set(key, policy.states(count));
    const rows = policy.parameters(agent, obs, this.states.get(key), count, begins);
    for (let k = 0, each = rows.length / count; k < count; k++) {
      const mask = simulation.mask(agent, env, first + k);
      const chosen = policy.draw(rows.subarray(k * each, (k + 1) * each), mask, this.random, simulation.greedy);
      env.actions.set(chosen, ((first + k) * num_agents + agent) * action.heads);
    }
  }
}
