// The player: controls, events and plots of the films in the page. Last of the scripts, which form one module.
// Text of the films enters the page as text nodes only.

const LISTED = 200; // events in the list; the timeline marks all
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const FOLLOW_ZOOM = 4;

const $ = (id) => document.getElementById(id);

class Player {
  constructor(title, films) {
    this.films = films;
    this.numSteps = Math.max(...films.map((film) => film.numSteps));
    this.fps = films[0].fps;
    this.playing = false;
    this.speed = 1;
    this.loop = false;
    this.hasPositions = films.some((film) => film.hasPositions);
    this.viewState = {
      step: 0,
      trails: false,
      followed: null,
      zoom: 1,
      x: 0.5,
      y: 0.5,
      change: (changes) => {
        Object.assign(this.viewState, changes);
        this.show();
      },
    };
    document.title = title;
    $("title").textContent = title;
    $("summary").textContent = this.#summary();
    $("main").classList.toggle("single", films.length === 1);
    $("films").style.setProperty("--columns", Math.ceil(films.length / Math.ceil(films.length / 4)));
    for (const made of document.querySelectorAll(".of-agents")) made.hidden = !this.hasPositions;
    this.events = films.flatMap((film, index) => eventsOf(film).map((event) => ({ ...event, film, index })));
    this.events.sort((one, other) => one.step - other.step || one.index - other.index);
    this.#fillFilms();
    this.#fillFollow();
    this.#fillEvents();
    this.#fillFacts();
    this.#listen();
    dark.addEventListener("change", () => this.recolour());
    $("main").hidden = $("view").hidden = false;
    this.recolour();
    this.show();
  }

  #summary() {
    const [film] = this.films;
    const described = ({ roles }) => roles.map((role) => `${role.end - role.first} × ${role.name}`).join(", ");
    const roles = described(film);
    const count = this.films.every((other) => described(other) === roles) ? film.agents.length : 0; // the films have different agents
    const films = this.films.length > 1 ? `${this.films.length} episodes side by side, up to ` : "";
    const agents = count > 1 ? ` · ${count} agents${film.roles.length > 1 ? `: ${roles}` : ""}` : "";
    const alone = this.films.length === 1 && film.title !== document.title ? `${film.title} · ` : "";
    return `${alone}${films}${this.numSteps.toLocaleString("en")} steps at ${this.fps} per second${agents}`;
  }

  #fillFilms() {
    const curves = {
      returns: (film) => this.#curves(film, (first, end) => film.returns(first, end), true),
      counts: (film) => this.#curves(film, (first, end) => film.counts(first, end), false),
    };
    // Films with the same agents share their axes, so that they can be compared.
    const alike = (film) => this.films.filter((other) => other.agents.join() === film.agents.join());
    const plot = (film, kind, options) =>
      new Plot({
        numSteps: this.numSteps,
        curves: () => curves[kind](film),
        range: () => extent(alike(film).flatMap(curves[kind])),
        onSeek: (step) => this.seek(step),
        ...options,
      });
    this.cards = this.films.map((film) => {
      const stage = new Stage(film, this.viewState, (name) => this.follow(name));
      const mean = film.agents.length > 1 ? "mean of each role's agents, " : "";
      const plots = [plot(film, "returns", { title: "Return", note: `${mean}from step 0 on`, whole: false })];
      if (film.agents.length > 1) {
        plots.push(plot(film, "counts", { title: "Active agents", note: "per role", whole: true }));
      }
      const ended = element("span", { className: "note" });
      const heading = element("h2", {}, element("span", { textContent: film.title }), ended);
      heading.hidden = this.films.length === 1;
      stage.canvas.setAttribute("aria-label", `Picture of ${film.title}`);
      const box = element("div", { className: "plots" }, ...plots.map((made) => made.box));
      $("films").append(element("article", { className: "film" }, heading, stage.box, box));
      return { film, stage, plots, ended };
    });
  }

  #curves(film, values, withFollowed) {
    const curves = film.roles.map((role) => ({
      name: role.name,
      colour: legibleColour(role.colour),
      values: values(role.first, role.end),
    }));
    const agent = film.agentIndex.get(this.viewState.followed);
    if (withFollowed && agent !== undefined) {
      const name = film.agents[agent];
      curves.push({ name, colour: "var(--text)", values: values(agent, agent + 1), dashed: true });
    }
    return curves;
  }

  #fillFollow() {
    const groups = new Map();
    const names = new Set();
    for (const film of this.films) {
      for (const role of film.roles) {
        if (!groups.has(role.name)) groups.set(role.name, element("optgroup", { label: role.name }));
        for (const name of film.agents.slice(role.first, role.end)) {
          if (!names.has(name)) groups.get(role.name).append(element("option", { value: name, textContent: name }));
          names.add(name);
        }
      }
    }
    this.names = [...names];
    $("follow").append(element("option", { value: "", textContent: "No agent followed" }), ...groups.values());
    $("speed").append(...SPEEDS.map((speed) => element("option", { value: speed, textContent: `${speed}×` })));
    $("speed").value = 1;
  }

  #fillEvents() {
    const shown = this.events.slice(0, LISTED);
    this.rows = shown.map((event) => {
      const text = this.films.length > 1 ? `${event.film.title}: ${event.text}` : event.text;
      const row = element(
        "button",
        { type: "button" },
        element("i"),
        element("span", { textContent: `step ${event.step}` }),
        element("span", { textContent: text }),
      );
      row.setAttribute("aria-label", `${text} at step ${event.step}`);
      row.addEventListener("click", () => this.seek(event.step));
      $("events-list").append(element("li", {}, row));
      return row;
    });
    this.marks = this.events.map((event) => {
      const mark = element("i");
      mark.style.left = `${(100 * event.step) / this.numSteps}%`;
      return mark;
    });
    $("marks").append(...this.marks);
    $("events").hidden = !this.events.length;
    $("events-count").textContent = this.events.length;
    const more = this.events.length - shown.length;
    $("events-more").textContent = more ? `and ${more.toLocaleString("en")} more, marked on the timeline` : "";
  }

  #fillFacts() {
    const facts = this.films.map((film) => new Map(film.facts));
    const table = $("facts");
    const names = new Set(facts.flatMap((map) => [...map.keys()]));
    const differ = (name) => facts.some((map) => map.get(name) !== facts[0].get(name));
    if ([...names].some(differ)) {
      const heads = this.films.map((film) => element("th", { textContent: film.title, scope: "col" }));
      table.append(element("thead", {}, element("tr", {}, element("td"), ...heads)));
    }
    for (const name of names) {
      const cells = (differ(name) ? facts : [facts[0]]).map((map) =>
        element("td", { textContent: map.get(name) ?? "–" }),
      );
      if (!differ(name)) cells[0].colSpan = facts.length;
      table.append(element("tr", {}, element("th", { textContent: name, scope: "row" }), ...cells));
    }
    $("about").hidden = !names.size;
  }

  drawPlots() {
    for (const { plots } of this.cards) plots.forEach((plot) => plot.draw());
  }

  // Also called when the colour scheme changes.
  recolour() {
    this.drawPlots();
    const legibles = new Map(this.films.flatMap((film) => film.roles.map((role) => [role, legibleColour(role.colour)])));
    this.events.forEach(({ film, agents }, i) => {
      const roles = new Set(agents.map((agent) => film.roles.find((role) => agent < role.end)));
      const colour = roles.size === 1 ? legibles.get([...roles][0]) : "";
      this.marks[i].style.color = colour;
      if (this.rows[i]) this.rows[i].querySelector("i").style.color = colour;
    });
  }

  show() {
    const { viewState } = this;
    const { step } = viewState;
    $("scrub").max = this.numSteps;
    $("scrub").value = step;
    $("scrub").style.setProperty("--done", `${(100 * step) / this.numSteps}%`);
    $("scrub").setAttribute("aria-valuetext", `step ${step} of ${this.numSteps}`);
    $("step").textContent = step.toLocaleString("en");
    $("num-steps").textContent = `/ ${this.numSteps.toLocaleString("en")}`;
    $("zoom").textContent = `${formatNumber(Number(viewState.zoom.toPrecision(2)))}×`;
    $("zoom-out").disabled = viewState.zoom <= 1;
    $("zoom-in").disabled = viewState.zoom >= MAX_ZOOM;
    for (const { film, stage, plots, ended } of this.cards) {
      stage.canvas.classList.toggle("zoomed", viewState.zoom > 1 && viewState.followed === null);
      stage.draw();
      stage.badge.textContent = this.#about(film);
      stage.badge.hidden = !stage.badge.textContent;
      ended.textContent = step > film.numSteps ? `ended at step ${film.numSteps}` : "";
      plots.forEach((plot) => plot.move(step));
    }
    this.#showEvents();
  }

  // Text of the badge: the followed agent and its return so far.
  #about(film) {
    const agent = film.agentIndex.get(this.viewState.followed);
    if (agent === undefined) return "";
    const frame = film.frame(this.viewState.step);
    const active = film.isActive(agent, frame);
    const sum = formatNumber(film.returns(agent, agent + 1)[frame]);
    return `${film.agents[agent]} · return so far ${sum}${active ? "" : " · not active"}`;
  }

  #showEvents() {
    const passed = this.events.filter((event) => event.step <= this.viewState.step).length;
    if (passed === this.passed) return;
    this.passed = passed;
    this.rows.forEach((row, i) => {
      row.classList.toggle("ahead", i >= passed);
      row.toggleAttribute("aria-current", false);
    });
    const current = this.rows[Math.min(passed, this.rows.length) - 1];
    const list = $("events-list");
    if (current && passed <= this.rows.length) current.setAttribute("aria-current", "true");
    if (list.matches(":hover, :focus-within")) return; // do not scroll a list in use
    list.scrollTop = current ? current.offsetTop - list.offsetTop - list.clientHeight / 2 : 0;
  }

  seek(step) {
    this.viewState.change({ step: clamp(Math.round(step) || 0, 0, this.numSteps) });
  }

  play() {
    if (this.playing) return;
    if (this.viewState.step >= this.numSteps) this.seek(0);
    this.playing = true;
    this.#showPlaying();
    const run = (this.run = {}); // identifies this run: frames requested before a pause are ignored
    let last = null;
    let due = 0;
    const frame = (now) => {
      if (!this.playing || this.run !== run) return;
      const seconds = Math.min(now - (last ?? now), 500) / 1000; // at most 0.5 s, so that a hidden page does not skip steps when shown again
      due += seconds * this.fps * this.speed;
      last = now;
      const whole = Math.floor(due);
      due -= whole;
      if (whole) this.#advance(whole);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  #advance(count) {
    const next = this.viewState.step + count;
    if (this.loop) return this.seek(next % (this.numSteps + 1));
    this.seek(next);
    if (next >= this.numSteps) this.pause();
  }

  pause() {
    this.playing = false;
    this.#showPlaying();
  }

  #showPlaying() {
    $("play").classList.toggle("playing", this.playing);
    $("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  step(count) {
    this.pause();
    this.seek(this.viewState.step + count);
  }

  // To the next or previous event.
  jump(direction) {
    const steps = this.events.map((event) => event.step);
    const next =
      direction > 0 ? steps.find((step) => step > this.viewState.step) : steps.findLast((step) => step < this.viewState.step);
    if (next !== undefined) this.seek(next);
  }

  follow(name) {
    if (name !== null && !this.names.includes(name)) return;
    if (name === this.viewState.followed) return;
    const near = this.viewState.zoom > 1 ? this.viewState.zoom : FOLLOW_ZOOM;
    this.viewState.change(name === null ? { followed: null, zoom: 1, x: 0.5, y: 0.5 } : { followed: name, zoom: near });
    $("follow").value = name ?? "";
    this.drawPlots();
    this.#announce(name === null ? "No agent followed" : `Following ${name}`);
  }

  followNext(direction) {
    const { names, viewState } = this;
    const from = names.indexOf(viewState.followed);
    const active = (name) =>
      this.films.some((film) => film.agentIndex.has(name) && film.isActive(film.agentIndex.get(name), viewState.step));
    for (let i = 1; i <= names.length; i++) {
      const start = from < 0 && direction < 0 ? 0 : from;
      const name = names[(start + direction * i + names.length * 2) % names.length];
      if (active(name)) return this.follow(name);
    }
  }

  zoom(factor) {
    this.viewState.change({ zoom: clamp(this.viewState.zoom * factor, 1, MAX_ZOOM) });
  }

  setSpeed(speed) {
    this.speed = speed;
    $("speed").value = speed;
  }

  faster(direction) {
    this.setSpeed(SPEEDS[clamp(SPEEDS.indexOf(this.speed) + direction, 0, SPEEDS.length - 1)]);
    this.#announce(`Speed ${this.speed}`);
  }

  setLoop(loop) {
    this.loop = loop;
    $("loop").setAttribute("aria-pressed", loop);
  }

  setTrails(trails) {
    this.viewState.change({ trails });
    $("trails").setAttribute("aria-pressed", trails);
  }

  // Announce to screen readers.
  #announce(text) {
    $("status").textContent = text;
  }

  #listen() {
    const click = (id, act) => $(id).addEventListener("click", act);
    click("play", () => this.toggle());
    click("back", () => this.step(-1));
    click("forward", () => this.step(1));
    click("loop", () => this.setLoop(!this.loop));
    click("trails", () => this.setTrails(!this.viewState.trails));
    click("zoom-in", () => this.zoom(Math.SQRT2));
    click("zoom-out", () => this.zoom(Math.SQRT1_2));
    click("help", () => $("keys").showModal());
    $("scrub").addEventListener("input", () => this.seek($("scrub").valueAsNumber));
    $("speed").addEventListener("change", () => this.setSpeed(Number($("speed").value)));
    $("follow").addEventListener("change", () => this.follow($("follow").value || null));
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    if ($("keys").open || event.ctrlKey || event.altKey || event.metaKey) return;
    const { key, shiftKey, target } = event;
    const far = shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => this.step(-far),
      ArrowRight: () => this.step(far),
      Home: () => this.seek(0),
      End: () => this.seek(this.numSteps),
      "+": () => this.faster(1),
      "=": () => this.faster(1),
      "-": () => this.faster(-1),
      "−": () => this.faster(-1),
      l: () => this.setLoop(!this.loop),
      e: () => this.jump(shiftKey ? -1 : 1),
      z: () => this.zoom(shiftKey ? Math.SQRT1_2 : Math.SQRT2),
      "?": () => $("keys").showModal(),
      " ": () => this.toggle(),
      Escape: () => (this.viewState.followed === null ? this.viewState.change({ zoom: 1, x: 0.5, y: 0.5 }) : this.follow(null)),
      ...(this.hasPositions && {
        f: () => this.followNext(shiftKey ? -1 : 1),
        t: () => this.setTrails(!this.viewState.trails),
      }),
    };
    const act = keys[key.length === 1 ? key.toLowerCase() : key];
    // A focused list keeps its keys, a focused button the space bar.
    if (!act || target.matches("select") || (key === " " && target.matches("button, summary"))) return;
    event.preventDefault();
    act();
  }
}

// window.player, for tests and the console: positions as they are drawn, in the game's units.
function handle(player) {
  const shapes = (index = 0) => {
    const film = player.films[index];
    const view = film.view(player.viewState.step);
    return Array.from(film.shapes(player.viewState.step), ({ kind, positions, size, colour, agent }) => {
      const points = [];
      for (let i = 0; i < positions.length; i += 2) points.push(film.units(view, positions[i], positions[i + 1]));
      if (kind === "circle")
        return { kind, x: points[0][0], y: points[0][1], radius: size / view.scale, colour, agent };
      return kind === "line" ? { kind, points, width: size / view.scale, colour } : { kind, points, colour };
    });
  };
  return {
    get step() {
      return player.viewState.step;
    },
    get numSteps() {
      return player.numSteps;
    },
    get playing() {
      return player.playing;
    },
    get speed() {
      return player.speed;
    },
    get loop() {
      return player.loop;
    },
    get trails() {
      return player.viewState.trails;
    },
    get zoom() {
      return player.viewState.zoom;
    },
    get followed() {
      return player.viewState.followed;
    },
    get events() {
      return player.events.map(({ step, text, index }) => ({ step, text, film: index }));
    },
    seek: (step) => player.seek(step),
    play: () => player.play(),
    pause: () => player.pause(),
    follow: (name) => player.follow(name),
    shapes,
  };
}

async function start() {
  if (!globalThis.DecompressionStream) {
    throw new Error("this browser is too old: expected Chrome or Edge 97, Firefox 113, Safari 16.4 or a later one");
  }
  const { title, subpixels, films } = JSON.parse($("data").textContent);
  const unpacked = await Promise.all(films.map(async (film) => new Film(film, await inflate(film.data), subpixels)));
  const player = new Player(title, unpacked);
  window.player = handle(player);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) player.play();
}

start().catch((error) => {
  $("error").textContent = `The replay cannot be shown: ${error.message}`;
  console.error(error);
});
