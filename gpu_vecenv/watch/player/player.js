// What all players have: playback, timeline, events, view, keys, links to a step. Text enters the page as text nodes
// only.

const LISTED = 200; // events in the list
const MARKED = 2000; // events on the timeline
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16];
const FOLLOW_ZOOM = 4;

class Player {
  // fps: steps a second at speed 1. A player then has `stages` and begins with `begin`.
  constructor(title, fps) {
    Object.assign(this, { fps, playing: false, speed: 1, loop: false, stages: [], events: [], rows: [], marks: [] });
    this.viewState = {
      step: 0,
      share: 1, // of the way from the step before that is shown
      trails: false,
      dark: isDark.matches,
      followed: null,
      marked: null, // a further agent with a ring
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
  }

  begin() {
    this.hasPlaces = this.stages.some(({ episode }) => episode.hasPlaces);
    for (const made of document.querySelectorAll(".of-agents")) made.hidden = !this.hasPlaces;
    this.#fillFollow();
    $("speed").append(...SPEEDS.map((speed) => element("option", { value: speed, textContent: `${speed}×` })));
    this.setSpeed(1);
    this.#listen();
    $("view").hidden = false;
  }

  // ------------------------------------------------------------------ what players differ in

  get firstStep() {
    return 0;
  }

  // The last step that is known.
  get numSteps() {
    return Math.max(...this.stages.map(({ episode }) => episode.numSteps));
  }

  // Steps on by at most `count`, from the last one to the first in a loop; how many steps were made.
  advance(count) {
    const { step } = this.viewState;
    const made = this.loop ? count : Math.min(count, this.numSteps - step);
    this.viewState.step = (step + made) % (this.numSteps + 1);
    return made;
  }

  // Goes to a step, 0 … numSteps.
  move(step) {
    this.viewState.step = step;
  }

  // Where no step could be made: the end.
  end() {
    this.pause();
  }

  // The agent of this name acts at the present step.
  isActive(name) {
    const { step } = this.viewState;
    return this.stages.some(({ episode }) => episode.agentIndex.has(name) && episode.isActive(episode.agentIndex.get(name), step));
  }

  // Text of the badge of a stage.
  about() {
    return "";
  }

  // Keys of this player alone: key -> act.
  keys() {
    return {};
  }

  followedChanged() {}

  // ------------------------------------------------------------------ playback

  play() {
    if (this.playing) return;
    this.playing = true;
    this.rest = 1; // steps that are due
    this.#showPlaying();
    const run = (this.run = {}); // identifies this run: frames requested before a pause are ignored
    let last = null;
    const frame = (now) => {
      if (!this.playing || this.run !== run) return;
      const seconds = Math.min(now - (last ?? now), 500) / 1000; // at most 0.5 s, so that a hidden page does not skip steps when shown again
      last = now;
      this.frame(now, seconds);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // A frame of the screen while it plays. A step is due when the motion of the one before it has been shown.
  frame(now, seconds) {
    const { viewState } = this;
    this.rest += seconds * this.fps * this.speed;
    const due = Math.floor(this.rest);
    if (due > 0) {
      const made = this.advance(due);
      this.rest = made < due ? 1 : this.rest - due;
      if (made === 0) this.end(now);
    }
    viewState.share = isStill.matches ? 1 : Math.min(this.rest, 1);
    this.show();
  }

  pause() {
    this.playing = false;
    this.viewState.share = 1;
    this.#showPlaying();
    this.show();
    this.linkAddress();
  }

  #showPlaying() {
    $("play").classList.toggle("playing", this.playing);
    $("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  seek(step) {
    this.move(clamp(Math.round(step) || 0, this.firstStep, this.numSteps));
    this.viewState.change({ share: 1 });
    this.linkAddress();
  }

  stepBy(count) {
    this.pause();
    this.seek(this.viewState.step + count);
  }

  // To the next or previous event.
  jump(direction) {
    const steps = this.events.map((event) => event.step);
    const next =
      direction > 0 ? steps.find((step) => step > this.viewState.step) : steps.findLast((step) => step < this.viewState.step);
    if (next === undefined) return;
    this.seek(next);
    const texts = this.events.filter((event) => event.step === next).map((event) => event.text);
    this.announce(`Step ${next}: ${texts.join("; ")}`);
  }

  // The page's address names the step at which it is paused.
  linkAddress() {
    if (!this.playing && this.linked) history.replaceState(null, "", this.address());
  }

  address() {
    return `#t=${this.viewState.step}`;
  }

  // Goes to what the address names; false if it names no step.
  open() {
    const step = Player.named("t");
    if (step !== null) this.seek(Number(step));
    return step !== null;
  }

  // A number that the address names, as text; null for none.
  static named(name) {
    const text = new URLSearchParams(location.hash.slice(1)).get(name);
    return text !== null && /^\d{1,20}$/.test(text) ? text : null;
  }

  setSpeed(speed) {
    this.speed = speed;
    $("speed").value = speed;
  }

  faster(direction) {
    this.setSpeed(SPEEDS[clamp(SPEEDS.indexOf(this.speed) + direction, 0, SPEEDS.length - 1)]);
    this.announce(`Speed ${this.speed}`);
  }

  setLoop(loop) {
    this.loop = loop;
    $("loop").setAttribute("aria-pressed", loop);
  }

  // Offers the films that the browser can make, or takes the offer back; while one is saved: stops that.
  async offerFilms() {
    const isOffered = $("save").ariaExpanded === "true";
    if (this.saving) this.saving = null;
    else if (isOffered) this.#closeFormats();
    else {
      $("save").ariaExpanded = "true";
      const names = await usableFilms();
      $("formats").replaceChildren(
        ...names.map((name) => element("button", { type: "button", textContent: FILMS[name].label, onclick: () => this.save(name) })),
      );
      $("formats").hidden = false;
      $("formats").firstChild.focus();
    }
  }

  #closeFormats() {
    if ($("formats").contains(document.activeElement)) $("save").focus();
    $("formats").hidden = true;
    $("save").ariaExpanded = "false";
  }

  // Saves a film of all known steps at the present speed, as they are shown. name: of FILMS.
  async save(name) {
    this.#closeFormats();
    this.pause();
    const { step } = this.viewState;
    const saving = (this.saving = {});
    const note = (text) => {
      $("saving").hidden = text === "";
      $("saving").textContent = text;
    };
    $("save").setAttribute("aria-pressed", true);
    try {
      const film = await savedFilm(this, name, (share) => {
        note(`Saving the film: ${Math.round(100 * share)} %. Press the button again to stop.`);
        return this.saving === saving && !this.playing;
      });
      note("");
      if (film) {
        const url = URL.createObjectURL(new Blob([film], { type: FILMS[name].type }));
        element("a", { href: url, download: `${document.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.${name}` }).click();
        setTimeout(() => URL.revokeObjectURL(url), 60000);
      }
    } catch (error) {
      note(`No film could be saved: ${error.message}`);
    }
    this.saving = null;
    $("save").removeAttribute("aria-pressed");
    this.seek(step);
  }

  // ------------------------------------------------------------------ view

  #fillFollow() {
    const groups = new Map();
    const names = new Set();
    for (const { episode } of this.stages) {
      for (const role of episode.roles) {
        if (!groups.has(role.name)) groups.set(role.name, element("optgroup", { label: role.name }));
        for (const name of episode.agents.slice(role.first, role.end)) {
          if (!names.has(name)) groups.get(role.name).append(element("option", { value: name, textContent: name }));
          names.add(name);
        }
      }
    }
    this.names = [...names];
    $("follow").append(element("option", { value: "", textContent: "Follow none" }), ...groups.values());
  }

  follow(name) {
    if (name !== null && !this.names.includes(name)) return;
    if (name === this.viewState.followed) return;
    const near = this.viewState.zoom > 1 ? this.viewState.zoom : FOLLOW_ZOOM;
    this.viewState.change(name === null ? { followed: null, zoom: 1, x: 0.5, y: 0.5 } : { followed: name, zoom: near });
    $("follow").value = name ?? "";
    this.followedChanged();
    this.announce(name === null ? "No agent followed" : `Following ${name}`);
  }

  followNext(direction) {
    const { names, viewState } = this;
    const from = names.indexOf(viewState.followed);
    for (let i = 1; i <= names.length; i++) {
      const start = from < 0 && direction < 0 ? 0 : from;
      const name = names[(start + direction * i + names.length * 2) % names.length];
      if (this.isActive(name)) return this.follow(name);
    }
  }

  zoom(factor) {
    this.viewState.change({ zoom: clamp(this.viewState.zoom * factor, 1, MAX_ZOOM) });
  }

  setTrails(trails) {
    this.viewState.change({ trails });
  }

  setDark(dark) {
    this.viewState.change({ dark });
  }

  setWide(wide) {
    document.body.classList.toggle("wide", wide);
    $("wide").setAttribute("aria-pressed", wide);
  }

  show() {
    const { viewState, numSteps, firstStep } = this;
    const { step } = viewState;
    const length = numSteps - firstStep || 1;
    $("scrub").min = firstStep;
    $("scrub").max = numSteps;
    $("scrub").value = step;
    $("scrub").style.setProperty("--done", `${(100 * (step - firstStep)) / length}%`);
    $("scrub").setAttribute("aria-valuetext", `step ${step} of ${numSteps}`);
    $("marks").style.setProperty("--first", firstStep);
    $("marks").style.setProperty("--steps", length);
    $("step").textContent = step.toLocaleString("en");
    $("num-steps").textContent = `/ ${numSteps.toLocaleString("en")}`;
    $("zoom").textContent = `${formatNumber(Number(viewState.zoom.toPrecision(2)))}×`;
    $("zoom-out").disabled = viewState.zoom <= 1;
    $("zoom-in").disabled = viewState.zoom >= MAX_ZOOM;
    $("trails").setAttribute("aria-pressed", viewState.trails);
    $("dark").setAttribute("aria-pressed", viewState.dark);
    for (const stage of this.stages) {
      stage.canvas.classList.toggle("zoomed", viewState.zoom > 1 && viewState.followed === null && !stage.passive);
      stage.draw();
      stage.badge.textContent = this.about(stage.episode);
      stage.badge.hidden = !stage.badge.textContent;
    }
    this.#showEvents();
  }

  // Announce to screen readers.
  announce(text) {
    $("status").textContent = text;
  }

  // ------------------------------------------------------------------ events

  // Adds events, {step, text, colour} each, after those that there are.
  addEvents(events) {
    const known = this.events.length;
    for (const event of events) {
      this.events.push(event);
      if (this.events.length <= LISTED) {
        const row = element(
          "button",
          { type: "button" },
          element("i"),
          element("span", { textContent: `step ${event.step}` }),
          element("span", { textContent: event.text }),
        );
        row.setAttribute("aria-label", `${event.text} at step ${event.step}`);
        row.addEventListener("click", () => this.seek(event.step));
        $("events-list").append(element("li", {}, row));
        this.rows.push(row);
      }
      if (this.events.length <= MARKED) {
        const mark = element("i");
        mark.style.setProperty("--step", event.step);
        $("marks").append(mark);
        this.marks.push(mark);
      }
    }
    this.#countEvents();
    this.colourEvents(known);
  }

  // Forgets the events after a step.
  cutEvents(step) {
    const kept = this.events.filter((event) => event.step <= step).length;
    this.events.length = kept;
    for (const row of this.rows.splice(kept)) row.parentElement.remove();
    for (const mark of this.marks.splice(kept)) mark.remove();
    this.#countEvents();
  }

  #countEvents() {
    this.passed = null;
    $("events").hidden = !this.events.length;
    $("events-count").textContent = this.events.length.toLocaleString("en");
    const more = this.events.length - this.rows.length;
    $("events-more").textContent = more ? `and ${more.toLocaleString("en")} more, marked on the timeline` : "";
  }

  // Also called when the colour scheme changes. An event's colour is that of the one role whose agents it has.
  colourEvents(from = 0) {
    for (const [list, target] of [
      [this.marks, (mark) => mark],
      [this.rows, (row) => row.firstChild],
    ]) {
      for (let k = from; k < list.length; k++) {
        const { colour } = this.events[k];
        target(list[k]).style.color = colour ? legibleColour(colour) : "";
      }
    }
  }

  // The colour of the one role that all agents of an event have; null for several.
  static colourOf(episode, agents) {
    const roles = new Set(agents.map((agent) => episode.roles.find((role) => agent < role.end)));
    return roles.size === 1 ? [...roles][0].colour : null;
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

  // ------------------------------------------------------------------ input

  #listen() {
    const click = (id, act) => $(id).addEventListener("click", act);
    click("play", () => this.toggle());
    click("back", () => this.stepBy(-1));
    click("forward", () => this.stepBy(1));
    click("loop", () => this.setLoop(!this.loop));
    click("save", () => this.offerFilms());
    $("formats").addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget !== $("save") && !$("formats").contains(relatedTarget)) this.#closeFormats();
    });
    click("wide", () => this.setWide(!document.body.classList.contains("wide")));
    click("trails", () => this.setTrails(!this.viewState.trails));
    click("dark", () => this.setDark(!this.viewState.dark));
    click("zoom-in", () => this.zoom(Math.SQRT2));
    click("zoom-out", () => this.zoom(Math.SQRT1_2));
    click("help", () => $("keys").showModal());
    $("scrub").addEventListener("input", () => this.seek($("scrub").valueAsNumber));
    $("speed").addEventListener("change", () => this.setSpeed(Number($("speed").value)));
    $("follow").addEventListener("change", () => this.follow($("follow").value || null));
    document.addEventListener("keydown", (event) => this.#key(event));
    isDark.addEventListener("change", () => {
      this.setDark(isDark.matches);
      this.colourEvents();
    });
    addEventListener("hashchange", () => this.open());
  }

  #key(event) {
    if ($("keys").open || event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    const { key, shiftKey, target } = event;
    const far = shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => this.stepBy(-far),
      ArrowRight: () => this.stepBy(far),
      Home: () => this.seek(0),
      End: () => this.seek(this.numSteps),
      "+": () => this.faster(1),
      "=": () => this.faster(1),
      "-": () => this.faster(-1),
      "−": () => this.faster(-1),
      l: () => this.setLoop(!this.loop),
      e: () => this.jump(shiftKey ? -1 : 1),
      b: () => this.setDark(!this.viewState.dark),
      v: () => this.setWide(!document.body.classList.contains("wide")),
      z: () => this.zoom(shiftKey ? Math.SQRT1_2 : Math.SQRT2),
      "?": () => $("keys").showModal(),
      " ": () => this.toggle(),
      Escape: () => this.escape(),
      ...(this.hasPlaces && {
        f: () => this.followNext(shiftKey ? -1 : 1),
        t: () => this.setTrails(!this.viewState.trails),
      }),
      ...this.keys(),
    };
    const act = keys[key.length === 1 ? key.toLowerCase() : key];
    // A focused list or field keeps its keys, a focused button the space bar.
    if (!act || target.matches("select, input:not(#scrub)") || (key === " " && target.matches("button, summary"))) return;
    event.preventDefault();
    act();
  }

  escape() {
    if (!$("formats").hidden) this.#closeFormats();
    else if (document.body.classList.contains("wide")) this.setWide(false);
    else if (this.viewState.followed === null) this.viewState.change({ zoom: 1, x: 0.5, y: 0.5 });
    else this.follow(null);
  }
}
