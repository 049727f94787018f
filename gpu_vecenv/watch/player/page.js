// The page of films: several players in step, plots, events and facts. Last of the scripts, which form one module.

class FilmPlayer extends Player {
  constructor(title, films) {
    super(title, films[0].fps);
    this.films = films;
    this.lastStep = Math.max(...films.map((film) => film.numSteps));
    $("summary").textContent = this.#summary();
    $("main").classList.toggle("single", films.length === 1);
    $("films").style.setProperty("--columns", Math.ceil(films.length / Math.ceil(films.length / 4)));
    this.#fillFilms();
    this.#fillFacts();
    $("more-keys").textContent = "Click a plot to go to that step. Ctrl + wheel, or two fingers, zoom.";
    this.begin();
    const events = films.flatMap((film, index) =>
      eventsOf(film).map(({ step, agents, text }) => ({
        step,
        index,
        name: text,
        text: films.length > 1 ? `${film.title}: ${text}` : text,
        colour: Player.colourOf(film, agents),
      })),
    );
    this.addEvents(events.sort((one, other) => one.step - other.step || one.index - other.index));
    isDark.addEventListener("change", () => this.drawPlots());
    $("main").hidden = false;
    this.drawPlots();
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
    return `${alone}${films}${this.lastStep.toLocaleString("en")} steps at ${this.fps} per second${agents}`;
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
        numSteps: this.lastStep,
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
      const box = element("div", { className: "plots beside-stage" }, ...plots.map((made) => made.box));
      $("films").append(element("article", { className: "film card" }, heading, stage.box, box));
      return { film, stage, plots, ended };
    });
    this.stages = this.cards.map(({ stage }) => stage);
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

  drawPlots() {
    for (const { plots } of this.cards) plots.forEach((plot) => plot.draw());
  }

  // Text of the badge: the followed agent and its return so far.
  about(film) {
    const agent = film.agentIndex.get(this.viewState.followed);
    if (agent === undefined) return "";
    const frame = film.frame(this.viewState.step);
    const active = film.isActive(agent, frame);
    const sum = formatNumber(film.returns(agent, agent + 1)[frame]);
    return `${film.agents[agent]} · return so far ${sum}${active ? "" : " · not active"}`;
  }

  followedChanged() {
    this.drawPlots();
  }

  play() {
    if (!this.playing && this.viewState.step >= this.numSteps) this.seek(0);
    super.play();
  }

  show() {
    super.show();
    const { step } = this.viewState;
    for (const { film, plots, ended } of this.cards) {
      ended.textContent = step > film.numSteps ? `ended at step ${film.numSteps}` : "";
      plots.forEach((plot) => plot.move(step));
    }
  }
}

// window.player, for tests and the console: positions as they are drawn, in the game's units.
function handle(player) {
  const shapes = (index = 0) => player.films[index].picture(player.viewState.step).shapes;
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
      return player.events.map(({ step, name, index }) => ({ step, text: name, film: index }));
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
  const player = new FilmPlayer(title, unpacked);
  window.player = handle(player);
  player.linked = true; // from now on the address is written
  if (!player.open() && !isStill.matches) player.play();
}

start().catch((error) => {
  $("error").textContent = `The replay cannot be shown: ${error.message}`;
  console.error(error);
});
