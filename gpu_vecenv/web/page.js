// The page: playback, a person's controls, replays, many environments.

const FRAME_MS = 12; // of a frame of the screen, for steps
const CHECK_MS = 30; // of a replay's check, between two signs of how far it is
const END_MS = 900; // that the last picture of an episode stays

class Page extends Player {
  constructor(simulation, content) {
    super(content.title, content.fps);
    this.history = new History(simulation);
    Object.assign(this, { simulation, content, replay: null, mosaic: null, left: null, checking: null, endedAt: null, chosen: {} });
    this.episode = new LiveEpisode(this.history);
    this.stage = new Stage(this.episode, this.viewState, (name) => (this.left ? this.tiles(true) : this.follow(name)));
    this.stages = [this.stage];
    this.canvas = this.stage.canvas;
    Object.assign(this.canvas, { id: "picture", tabIndex: 0 });
    this.canvas.setAttribute("aria-label", `Picture of ${content.title}`);
    this.ending = element("p", { id: "end", hidden: true });
    this.stage.box.append(this.ending);
    $("stage").prepend(this.stage.box);
    this.steering = new Steering(simulation);
    this.inspector = new Inspector(simulation, content);
    this.controls = new Controls(this.canvas, (event) => this.#units(event));
    $("summary").textContent = content.summary;
    $("more-keys").textContent = "r restarts with the seed. Arrow keys, WASD and numbers steer while an agent is steered; esc ends that. Ctrl + wheel, or two fingers, zoom.";
    this.cards = new Cards(this);
    this.begin();
    this.#listen();
    this.seed(0n);
  }

  get drawing() {
    return this.stage.drawing;
  }

  // ------------------------------------------------------------------ steps

  // One step on: of the past again, or a new one. False if a person's turn is waited for, or the episode has ended.
  step() {
    const { simulation, history, episode } = this;
    if (simulation.ended) return false;
    const past = simulation.steps < history.length;
    const agent = simulation.steered;
    const turns = this.content.takes_turns;
    const wish = agent === null || (turns && !simulation.acts(agent)) ? null : this.controls.wish(turns);
    if (past && wish === null) history.seek(simulation.steps + 1);
    else {
      if (agent !== null && turns && simulation.acts(agent) && wish === null) return false; // the person's turn
      this.branch();
      simulation.act((steered) => this.steering.action(steered, wish));
      this.addEvents(this.#described(episode.advance()));
      if (simulation.ended) simulation.episodes.push({ steps: simulation.steps, returns: [...simulation.returns] });
    }
    this.viewState.step = simulation.steps;
    return true;
  }

  advance(count) {
    if (this.checking) return 0;
    const { episode, viewState } = this;
    const start = performance.now();
    let made = 0;
    while (made < count && (made === 0 || performance.now() - start < FRAME_MS)) {
      if (viewState.trails || made === count - 1) episode.prepare(viewState.step, viewState.step);
      if (!this.step()) break;
      made += 1;
    }
    return made;
  }

  stepBy(count) {
    if (this.playing) this.pause();
    if (this.checking) return;
    if (count < 0) return this.seek(this.viewState.step + count);
    if (this.simulation.ended && !this.replay) return this.next();
    for (let k = 0; k < count && this.step(); k++);
    this.viewState.change({ share: 1 });
    this.linkAddress();
  }

  get firstStep() {
    return this.history.first;
  }

  move(step) {
    if (this.checking) return;
    this.episode.prepare(this.viewState.trails ? step - TRAIL : step, step);
    this.viewState.step = step;
    this.endedAt = null;
  }

  setTrails(trails) {
    super.setTrails(trails);
    this.seek(this.viewState.step);
  }

  // The steps after the present one are forgotten: play goes on in another way.
  branch() {
    const { simulation, history, episode } = this;
    if (simulation.steps === history.length) return;
    history.cut();
    episode.cut(simulation.steps);
    this.cutEvents(simulation.steps);
  }

  // At the end of an episode, or while a person's turn is waited for.
  end(now) {
    if (!this.simulation.ended) return;
    this.endedAt ??= now;
    if (now - this.endedAt < END_MS) return;
    this.endedAt = null;
    if (this.loop) this.seek(0);
    else if (this.replay) this.pause();
    else this.next();
  }

  play() {
    if (this.checking) return;
    if (!this.playing && this.replay && this.simulation.ended) this.seek(0);
    super.play();
  }

  // The first episode of a seed.
  seed(seed) {
    this.#leave();
    $("seed").value = String(seed);
    this.simulation.reset(seed);
    this.#begun();
    this.#badge(null);
  }

  // The next episode.
  next() {
    this.simulation.reset();
    this.#begun();
  }

  // After a reset. Parameters that were chosen hold in every episode, though a reset draws them.
  #begun() {
    this.history.begin();
    for (const [name, value] of Object.entries(this.chosen)) this.history.edit(name, [value]);
    this.#first();
  }

  #first() {
    this.episode.begin();
    this.cutEvents(-1);
    this.endedAt = null;
    this.viewState.step = this.simulation.steps;
    this.viewState.share = 1;
    this.show();
    this.linkAddress();
  }

  address() {
    const { step } = this.viewState;
    if (this.left) return "#";
    return this.replay ? `#t=${step}` : `#seed=${this.simulation.seed}&t=${step}`;
  }

  // Plays to the step of the seed that the address names.
  open() {
    const [seed, step] = [Player.named("seed"), Player.named("t")];
    if (step === null && seed === null) return false;
    this.pause();
    if (seed !== null && !this.replay) this.seed(BigInt.asUintN(64, BigInt(seed)));
    const wanted = Number(step ?? 0);
    this.seek(this.history.length);
    while (this.history.length < wanted && this.step());
    this.seek(wanted);
    return true;
  }

  // ------------------------------------------------------------------ a person, replays, many environments

  // Steers an agent, or none; a person who begins to steer starts the game.
  steer(agent) {
    this.simulation.steered = agent;
    this.controls.enable(agent !== null);
    this.stage.passive = agent !== null;
    this.viewState.marked = agent === null ? null : this.episode.agents[agent];
    this.canvas.classList.toggle("steered", agent !== null);
    $("steer").value = agent === null ? "" : String(agent);
    $("hint").hidden = agent === null;
    if (agent !== null) {
      this.canvas.focus({ preventScroll: true });
      this.inspector.choose(agent);
    }
    this.show();
  }

  // Checks all of a replay file, then shows its start; whether it can be played.
  async load(bytes, name) {
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
      this.#leave();
      this.replay = replay;
      const differs = await this.#check(replay, name);
      if (differs === undefined) return false;
      this.#badge(differs === null, differs === null ? `${name}: bit-identical to the recorded run` : `${name}: differs from the recorded run from step ${differs} on`);
      this.seek(0);
      return true;
    } catch (error) {
      this.#badge(false, `${name} cannot be played: ${error.message}`);
    }
    return false;
  }

  // The first step of a replay that differs, or null; undefined if another episode was begun meanwhile.
  async #check(replay, name) {
    const { history, simulation, episode } = this;
    const token = (this.checking = {});
    const check = checkReplay(history, replay, () => this.addEvents(this.#described(episode.advance())));
    let result = check.next();
    $("seed").value = String(replay.header.seed);
    for (;;) {
      const start = performance.now();
      while (!result.done && performance.now() - start < CHECK_MS) result = check.next();
      if (result.done) break;
      this.#badge(true, `${name}: ${Math.floor((100 * simulation.steps) / replay.numSteps)} % checked`);
      await new Promise((resolve) => setTimeout(resolve));
      if (this.checking !== token) return undefined;
    }
    this.checking = null;
    return result.value;
  }

  // Ends what was played.
  #leave() {
    this.steer(null);
    this.pause();
    this.replay = this.checking = null;
    this.cutEvents(-1);
    this.episode.begin();
  }

  setDark(dark) {
    super.setDark(dark);
    (this.mosaic ?? this.left)?.fit();
  }

  // Shows many environments at once, those that a zoom left or new ones, or one again.
  tiles(many) {
    this.steer(null);
    if (many) this.mosaic = this.left ?? new Mosaic(this.simulation, this.stage.box, $("rate"), this.viewState, (index) => this.alone(index));
    else {
      this.mosaic.close();
      this.mosaic = null;
    }
    this.mosaic?.visible(true);
    this.canvas.classList.remove("alone");
    if (many && !this.left) this.before = this.playing;
    this.#many(many, many ? !this.left || this.playing : this.before);
    this.left = null;
  }

  // Shows one of many environments alone, from where it is; the others wait.
  alone(index) {
    const { playing } = this;
    this.left = this.mosaic;
    this.left.visible(false);
    this.mosaic = null;
    this.#badge(null);
    this.#leave();
    this.simulation.take(this.left.env, index);
    this.history.begin();
    this.#first();
    this.#many(false, playing);
    this.canvas.focus({ preventScroll: true });
    this.canvas.classList.add("alone");
  }

  #many(many, playing) {
    this.pause();
    $("tiles").setAttribute("aria-pressed", String(many));
    $("rate").hidden = !many;
    for (const card of $("side").children) card.inert = many && !card.contains($("actors")) && card.id !== "training";
    for (const id of ["view", "scrubber"]) $(id).inert = many;
    for (const id of ["restart", "forward", "back", "seed", "speed", "save", "loop", "wide"]) $(id).disabled = many;
    $("clock").style.visibility = many ? "hidden" : ""; // it keeps its place
    this.ending.hidden ||= many;
    if (many) this.#frames(this.mosaic);
    if (playing) this.play();
    this.show();
  }

  frame(now, seconds) {
    if (!this.mosaic) super.frame(now, seconds);
  }

  // Many environments have frames while they wait too, for tiles that are not drawn yet.
  #frames(mosaic) {
    requestAnimationFrame((now) => {
      if (this.mosaic !== mosaic) return;
      mosaic.frame(now, this.playing);
      this.#frames(mosaic);
    });
  }

  // ------------------------------------------------------------------ the page

  show() {
    if (this.mosaic || this.checking) return;
    const { simulation } = this;
    this.stage.shape(this.episode.picture(simulation.steps));
    super.show();
    $("digest").textContent = simulation.digest;
    $("branch").disabled = this.replay !== null || simulation.steps === this.history.length;
    this.ending.hidden = !simulation.ended;
    if (simulation.ended) this.ending.textContent = this.#ending();
    this.cards.score();
    this.inspector.show();
  }

  followedChanged() {
    const agent = this.episode.agentIndex.get(this.viewState.followed);
    if (agent !== undefined) this.inspector.choose(agent);
  }

  about() {
    const { simulation, viewState, episode } = this;
    const agent = episode.agentIndex.get(viewState.followed);
    if (agent === undefined || simulation.ended) return "";
    const inactive = episode.isActive(agent) ? "" : " · not active";
    return `${viewState.followed} · return so far ${formatNumber(simulation.returns[agent])}${inactive}`;
  }

  #ending() {
    const { terminations } = this.simulation.env.outputs;
    const reason = terminations.includes(1) ? this.content.termination_label : "the episode was truncated";
    return `${reason}, after ${this.simulation.steps} steps`;
  }

  #described(events) {
    return events.map((event) => ({ ...event, colour: Player.colourOf(this.episode, event.agents) }));
  }

  #units(event) {
    const { stage } = this;
    return stage.camera(stage.drawing).units(event.offsetX * stage.ratio, event.offsetY * stage.ratio);
  }

  #badge(good, text = "") {
    $("badge").hidden = good === null;
    $("badge").textContent = text;
    $("badge").className = good ? "good" : "bad";
  }

  // Changes an array at the present step: play goes on in another way.
  edit(name, values) {
    const { steps } = this.simulation;
    if (this.replay) this.#reseed();
    else this.branch();
    this.history.edit(name, values);
    this.episode.cut(steps - 1);
    this.show();
  }

  #listen() {
    const click = (id, act) => $(id).addEventListener("click", act);
    click("tiles", () => this.tiles(!this.mosaic));
    click("restart", () => this.restart());
    click("branch", () => {
      this.branch();
      this.play();
    });
    $("seed").addEventListener("change", () => this.#reseed());
    $("greedy").addEventListener("change", () => (this.simulation.greedy = $("greedy").checked));
    $("steer").addEventListener("change", () => {
      const { value } = $("steer");
      if (this.replay) this.#reseed();
      this.steer(value === "" ? null : Number(value));
      if (value !== "") this.play();
    });
    const load = async (file) => {
      if (file && (await this.load(new Uint8Array(await file.arrayBuffer()), file.name))) this.play();
    };
    $("file").addEventListener("change", () => load($("file").files[0]));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      load(event.dataTransfer.files[0]);
    });
  }

  keys() {
    return { ".": () => this.stepBy(1), ",": () => this.stepBy(-1), r: () => this.restart() };
  }

  escape() {
    if (!$("formats").hidden) super.escape();
    else if (this.left) this.tiles(true);
    else if (this.simulation.steered !== null) this.steer(null);
    else super.escape();
  }

  restart() {
    this.pause();
    if (this.replay) this.seek(0);
    else this.#reseed();
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
  const framed = location.hash === "#play";
  document.body.classList.toggle("framed", framed);
  if (embedded) {
    for (const role of Object.keys(simulation.actors)) simulation.actors[role] = "random";
    page.tiles(true);
  }
  if (embedded && isStill.matches) page.pause();
  if (embedded) return;
  if (content.training) watchTraining(page);
  page.linked = !framed; // from now on the address is written
  if (content.replay) await page.load(bytesOfBase64(content.replay.content), content.replay.name);
  if (!page.open() && !isStill.matches) page.play();
}

start().catch((error) => {
  $("error").textContent = `The game cannot be played: ${error.message}`;
  console.error(error);
});
