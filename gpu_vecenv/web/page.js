// The page: playback, actors, parameters, score, a person's controls, replays.

const $ = (id) => document.getElementById(id);
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16];
const FRAME_MS = 12; // of a frame of the screen, for steps
const END_MS = 900; // that the last picture of an episode stays
const MAX_LISTED = 40; // agents in the list of those that can be steered

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const formatted = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 2 }).replace("-", "−"));

class Page {
  constructor(simulation, content) {
    Object.assign(this, { simulation, content, playing: false, speed: 1, replay: null, mosaic: null, rest: 0 });
    this.canvas = $("picture");
    this.steering = new Steering(simulation);
    this.controls = new Controls(this.canvas, (event) => this.#units(event));
    $("title").textContent = content.title;
    document.title = content.title;
    $("summary").textContent = content.summary;
    this.#actors();
    this.#steered();
    this.#parameters();
    this.#facts();
    for (const speed of SPEEDS) $("speed").append(new Option(`${speed}×`, speed, speed === 1, speed === 1));
    this.#listen();
    this.#shape(simulation.draw());
    new ResizeObserver(() => this.#fit()).observe(this.canvas);
    this.seed(0n);
    requestAnimationFrame((now) => this.#frame(now));
  }

  // One step, if no person's turn is waited for and no episode has ended.
  step() {
    const { simulation } = this;
    if (simulation.ended) return false;
    if (this.replay) {
      const row = this.replay.actions.length / this.replay.numSteps;
      const { steps } = simulation;
      simulation.env.actions.set(this.replay.actions.subarray(steps * row, (steps + 1) * row));
      simulation.advance();
      return true;
    }
    const agent = simulation.steered;
    const turns = this.content.takes_turns;
    const wish = agent === null || (turns && !simulation.acts(agent)) ? null : this.controls.wish(turns);
    if (agent !== null && turns && simulation.acts(agent) && wish === null) return false; // the person's turn
    simulation.step((steered) => this.steering.action(steered, wish));
    return true;
  }

  seed(seed) {
    this.replay = null;
    $("seed").value = String(seed);
    this.simulation.reset(seed);
    this.#written();
    this.#badge(null);
    this.show();
  }

  next() {
    if (this.replay) this.#rewind();
    else this.simulation.reset();
    this.#written();
    this.show();
  }

  play(playing = true) {
    this.playing = playing;
    this.last = null;
    document.body.classList.toggle("playing", playing);
    $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  }

  // Steers an agent, or none; a person who begins to steer starts the game.
  steer(agent) {
    this.simulation.steered = agent;
    this.controls.enable(agent !== null);
    this.canvas.classList.toggle("steered", agent !== null);
    $("steer").value = agent === null ? "" : String(agent);
    $("hint").hidden = agent === null;
    if (agent !== null) this.canvas.focus({ preventScroll: true });
    this.show();
  }

  // Plays a replay file: checks all of it, then shows it from the start.
  async open(bytes, name) {
    try {
      const replay = await readReplay(bytes);
      const { game, config, version, end_on_nonfinite } = replay.header;
      if (game !== this.content.game || version !== this.content.version) {
        throw new Error(`it is of ${game}, version ${version}; this page plays ${this.content.game}, version ${this.content.version}`);
      }
      const others = Object.keys({ ...config, ...this.content.config }).filter(
        (key) => JSON.stringify(config[key]) !== JSON.stringify(this.content.config[key]),
      );
      if (others.length) throw new Error(`its configuration has another ${others.join(", ")} than this page`);
      if (end_on_nonfinite) throw new Error("it was recorded with end_on_nonfinite, which this page does not have");
      this.steer(null);
      this.replay = replay;
      const differs = simulateReplay(this.simulation, replay);
      this.#badge(differs === null, differs === null ? `${name}: bit-identical to the recorded run` : `${name}: differs from the recorded run from step ${differs} on`);
      this.#rewind();
      $("seed").value = String(replay.header.seed);
      this.show();
      this.play(true);
    } catch (error) {
      this.#badge(false, `${name} cannot be played: ${error.message}`);
    }
  }

  // Shows many environments at once, those that a zoom left or new ones, or one again.
  tiles(many) {
    this.steer(null);
    if (many) this.mosaic = this.left ?? new Mosaic(this.simulation, this.canvas.parentElement, $("rate"), (index) => this.zoom(index));
    else {
      this.mosaic.close();
      this.mosaic = null;
    }
    this.mosaic?.visible(true);
    this.canvas.classList.remove("zoomed");
    if (many && !this.left) this.before = this.playing;
    this.#many(many, many ? !this.left || this.playing : this.before);
    this.left = null;
  }

  // Shows one of many environments alone, from where it is; the others wait.
  zoom(index) {
    this.left = this.mosaic;
    this.left.visible(false);
    this.mosaic = null;
    this.#badge(null);
    this.replay = null;
    this.simulation.take(this.left.env, index);
    this.#many(false, this.playing);
    this.canvas.focus({ preventScroll: true });
    this.canvas.classList.add("zoomed");
  }

  #many(many, playing) {
    $("tiles").setAttribute("aria-pressed", String(many));
    $("rate").hidden = !many;
    for (const card of $("side").children) card.inert = many && !card.contains($("actors")) && card.id !== "training";
    for (const id of ["restart", "forward", "seed", "speed"]) $(id).disabled = many;
    $("end").hidden ||= many;
    $("step").parentElement.hidden = many;
    this.play(playing);
    this.show();
  }

  show() {
    const { simulation, canvas } = this;
    if (!this.ratio || this.mosaic) return;
    const context = canvas.getContext("2d");
    this.drawing = simulation.draw();
    const whole = [0, 0, canvas.width, canvas.height];
    this.#shape(this.drawing);
    context.fillStyle = cssColour(this.drawing.background);
    context.fillRect(...whole);
    paint(context, this.drawing, whole, this.ratio);
    if (simulation.steered !== null) ring(context, this.drawing, whole, simulation.steered, this.ratio);
    $("step").textContent = String(simulation.steps);
    $("digest").textContent = simulation.digest;
    $("end").hidden = !simulation.ended;
    if (simulation.ended) $("end").textContent = this.#ending();
    this.#score();
  }

  // The canvas has the shape of the drawing.
  #shape({ width, height }) {
    const aspect = `${width} / ${height}`;
    if (this.canvas.style.aspectRatio === aspect) return;
    this.canvas.style.aspectRatio = aspect;
    this.canvas.parentElement.style.setProperty("--aspect", width / height);
  }

  #ending() {
    const { terminations } = this.simulation.env.outputs;
    const reason = terminations.includes(1) ? this.content.termination_label : "the episode was truncated";
    return `${reason}, after ${this.simulation.steps} steps`;
  }

  #rewind() {
    const { header, shared } = this.replay;
    for (const [name, values] of Object.entries(shared)) this.simulation.env.state[name].set(values);
    this.simulation.reset(BigInt(header.seed), BigInt(header.env_index));
  }

  #frame(now) {
    requestAnimationFrame((next) => this.#frame(next));
    if (this.mosaic) this.mosaic.frame(now, this.playing);
    if (this.mosaic || !this.playing) return;
    if (this.simulation.ended) {
      this.endedAt ??= now;
      if (now - this.endedAt < END_MS) return;
      this.endedAt = null;
      this.next();
      return;
    }
    this.endedAt = null;
    this.rest += this.last === null ? 1 : ((now - this.last) / 1000) * this.content.fps * this.speed;
    this.last = now;
    const start = performance.now();
    let stepped = false;
    while (this.rest >= 1) {
      this.rest -= 1;
      if (!this.step() || performance.now() - start > FRAME_MS) this.rest = Math.min(this.rest, 0);
      stepped = true;
    }
    if (stepped) this.show();
  }

  #fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.max(1, Math.round(width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(height * this.ratio));
    this.show();
  }

  #units(event) {
    const [x, y] = [event.offsetX * this.ratio, event.offsetY * this.ratio];
    return placed(this.drawing, [0, 0, this.canvas.width, this.canvas.height]).units(x, y);
  }

  #badge(good, text = "") {
    $("badge").hidden = good === null;
    $("badge").textContent = text;
    $("badge").className = good ? "good" : "bad";
  }

  #actors() {
    for (const { name, agents } of this.simulation.roles) {
      const kinds = this.simulation.kinds(name);
      const select = element("select", { id: `actor-${name}` }, ...kinds.map((kind) => new Option(kind, kind)));
      select.value = this.simulation.actors[name];
      select.addEventListener("change", () => (this.simulation.actors[name] = select.value));
      const label = agents.length > 1 ? `${name} (${agents.length})` : name;
      $("actors").append(element("label", { htmlFor: select.id, textContent: label }), select);
    }
    $("greedy-line").hidden = this.simulation.policies.length === 0;
  }

  #steered() {
    const { agents } = this.simulation.layout;
    $("steer").append(new Option("nobody", ""));
    const shown = agents.map((name, agent) => [name, agent]).filter(([, agent]) => agents.length <= MAX_LISTED || this.simulation.roleOf[agent].agents.indexOf(agent) < MAX_LISTED / 4);
    for (const [name, agent] of shown) $("steer").append(new Option(agents.length === 1 ? "the agent" : name.replace("_", " "), agent));
  }

  #parameters() {
    const { parameters, scalars } = this.content;
    $("parameters-card").hidden = parameters.length + scalars.length === 0;
    this.chosen = {};
    for (const { name, low, high, value } of parameters) {
      const input = element("input", { type: "range", id: `parameter-${name}`, min: low, max: high, step: (high - low) / 200, value });
      const output = element("output");
      const change = () => {
        this.chosen[name] = Number(input.value);
        output.textContent = formatted(this.chosen[name]);
        this.#written();
        this.show();
      };
      input.addEventListener("input", change);
      $("parameters").append(element("label", { htmlFor: input.id, textContent: name.replaceAll("_", " ") }), input, output);
      output.textContent = "drawn";
    }
    for (const { name, value } of scalars) {
      const input = element("input", { type: "number", id: `parameter-${name}`, step: "any", value });
      const field = this.simulation.env.state[name];
      input.addEventListener("change", () => {
        field[0] = field instanceof BigInt64Array ? BigInt(Math.round(Number(input.value))) : Number(input.value);
        this.show();
      });
      $("parameters").append(element("label", { htmlFor: input.id, textContent: name.replaceAll("_", " ") }), input, element("output"));
    }
  }

  // Parameters that were chosen hold after each reset, which draws them.
  #written() {
    for (const [name, value] of Object.entries(this.chosen)) this.simulation.env.state[name][0] = value;
    if (Object.keys(this.chosen).length) this.simulation.env.observe();
  }

  #facts() {
    for (const [name, text] of this.content.facts) $("facts").append(element("dt", { textContent: name }), element("dd", { textContent: text }));
  }

  #score() {
    const { simulation } = this;
    const rows = simulation.roles.map(({ name }) => {
      const { now, mean } = simulation.score(name);
      return [name, now, mean];
    });
    if (simulation.steered !== null) {
      const own = simulation.episodes.map(({ returns }) => returns[simulation.steered]);
      const mean = own.length ? own.reduce((a, b) => a + b) / own.length : null;
      rows.unshift(["you", simulation.returns[simulation.steered], mean]);
    }
    const cells = (row) => row.map((value, k) => element(k ? "td" : "th", { textContent: k ? formatted(value) : value }));
    $("score").replaceChildren(...rows.map((row) => element("tr", {}, ...cells(row))));
    $("episodes").textContent = String(simulation.episodes.length);
  }

  #listen() {
    const click = (id, act) => $(id).addEventListener("click", act);
    click("play", () => this.play(!this.playing));
    click("tiles", () => this.tiles(!this.mosaic));
    click("picture", () => this.left && this.simulation.steered === null && this.tiles(true));
    click("forward", () => {
      this.play(false);
      if (this.simulation.ended) this.next();
      else this.step();
      this.show();
    });
    click("restart", () => {
      this.play(false);
      if (this.replay) this.next();
      else this.#reseed();
    });
    $("seed").addEventListener("change", () => this.#reseed());
    $("speed").addEventListener("change", () => (this.speed = Number($("speed").value)));
    $("greedy").addEventListener("change", () => (this.simulation.greedy = $("greedy").checked));
    $("steer").addEventListener("change", () => {
      const { value } = $("steer");
      if (this.replay) this.#reseed();
      this.steer(value === "" ? null : Number(value));
      if (value !== "") this.play(true);
    });
    const load = async (file) => file && this.open(new Uint8Array(await file.arrayBuffer()), file.name);
    $("file").addEventListener("change", () => load($("file").files[0]));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      load(event.dataTransfer.files[0]);
    });
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input, select, button, summary")) return;
      if (event.key === " ") {
        event.preventDefault();
        this.play(!this.playing);
      } else if (event.key === "Escape" && this.left) this.tiles(true);
      else if (event.key === "." || event.key === "r") $(event.key === "." ? "forward" : "restart").click();
    });
  }

  #reseed() {
    const text = $("seed").value.trim();
    const seed = /^\d{1,20}$/.test(text) ? BigInt.asUintN(64, BigInt(text)) : 0n;
    this.seed(seed);
  }
}

async function start() {
  const content = JSON.parse($("data").textContent);
  const module = await WebAssembly.compile(bytesOfBase64(content.wasm));
  const simulation = new Simulation(module, content);
  $("main").hidden = false;
  const page = new Page(simulation, content);
  window.page = page;
  page.show();
  // In a frame of another page: the many environments alone, as fast as they can, with random actions.
  const embedded = location.hash === "#1024";
  document.body.classList.toggle("embedded", embedded);
  document.body.classList.toggle("framed", location.hash === "#play");
  if (embedded) {
    for (const role of Object.keys(simulation.actors)) simulation.actors[role] = "random";
    page.tiles(true);
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (embedded && still) page.play(false);
  if (embedded) return;
  if (content.training) watchTraining(page);
  if (content.replay) await page.open(bytesOfBase64(content.replay.content), content.replay.name);
  else if (!still) page.play();
}

start().catch((error) => {
  $("error").textContent = `The game cannot be played: ${error.message}`;
  console.error(error);
});
