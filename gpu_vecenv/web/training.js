// The page of a run in training: its policies are replaced by newer ones, and its returns are drawn as curves.

const POLL_MS = 1000;
const CURVE_POINTS = 300; // at most, of one curve
const CURVE_WIDTH = 280;
const CURVE_HEIGHT = 64;

const svg = (tag, attributes = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// Rows of metrics.csv, which arrive in pieces of whole lines.
class Metrics {
  constructor() {
    Object.assign(this, { start: 0, names: null, columns: new Map() });
  }

  add(text) {
    this.start += new TextEncoder().encode(text).length;
    const lines = text.split(/\r?\n/).filter(Boolean);
    if (this.names === null && lines.length) {
      this.names = lines.shift().split(",");
      for (const name of this.names) this.columns.set(name, []);
    }
    for (const line of lines) {
      for (const [k, cell] of line.split(",").entries()) this.columns.get(this.names[k]).push(cell === "" ? NaN : Number(cell));
    }
  }

  // The points [env_steps, value] of a column, thinned: the last one of each of CURVE_POINTS stretches.
  points(name) {
    const [x, y] = ["env_steps", name].map((column) => this.columns.get(column));
    const every = Math.ceil(y.length / CURVE_POINTS);
    return y.map((value, k) => [x[k], value]).filter(([, value], k) => Number.isFinite(value) && ((y.length - 1 - k) % every === 0));
  }

  get returns() {
    return (this.names ?? []).filter((name) => name.startsWith("return_"));
  }
}

// A card beside the game with the progress and a curve for each return; asks the server that the page came from.
class TrainingCard {
  constructor(page) {
    Object.assign(this, { page, metrics: new Metrics(), known: "", ended: false });
    this.scalars = Object.fromEntries(page.content.scalars.map(({ name, value }) => [name, value])); // of training
    this.progress = element("p", { className: "note", textContent: "waiting for the first iteration" });
    this.progress.setAttribute("role", "status");
    this.curves = element("div", { className: "curves" });
    this.card = element("section", { className: "card", id: "training" }, element("h2", { textContent: "Training" }), this.progress, this.curves);
    $("side").prepend(this.card);
    this.poll();
  }

  async poll() {
    try {
      await this.#policies();
      await this.#rows();
    } catch {
      this.progress.textContent += this.ended ? "" : ". The server has ended; the policies play on";
      return;
    }
    setTimeout(() => this.poll(), POLL_MS);
  }

  async #policies() {
    const response = await fetch(`policies?after=${this.known}`);
    if (!response.ok) throw new Error(response.statusText);
    if (response.status === 204) return;
    const { iteration, num_iterations, phase, scalars, policies } = await response.json();
    for (const [k, policy] of this.page.simulation.policies.entries()) policy.load(policies[k]);
    for (const [name, value] of Object.entries(scalars)) if (value !== this.scalars[name]) this.page.cards.share(name, value);
    this.scalars = scalars;
    this.known = `${iteration}-${phase}`;
    this.ended = phase === "ended";
    const whole = num_iterations.toLocaleString("en");
    this.progress.textContent = this.ended
      ? `Training has ended after ${whole} iterations; the final policies play`
      : `The policies of iteration ${iteration.toLocaleString("en")} of ${whole} play`;
  }

  async #rows() {
    const response = await fetch(`metrics?start=${this.metrics.start}`);
    if (!response.ok) throw new Error(response.statusText);
    const text = await response.text();
    if (text === "") return;
    this.metrics.add(text);
    this.curves.replaceChildren(...this.metrics.returns.map((name) => this.#curve(name)));
  }

  #curve(name) {
    const points = this.metrics.points(name);
    const role = name.replace("return_", "").replaceAll("_", " ");
    const last = points.length ? formatted(points.at(-1)[1]) : "–";
    const caption = element("figcaption", {}, element("span", { textContent: `return of ${role}` }), element("b", { textContent: last }));
    const figure = element("figure", {}, caption);
    if (points.length < 2) return figure;
    const values = points.map(([, value]) => value);
    const [least, most, first, end] = [Math.min(...values), Math.max(...values), points[0][0], points.at(-1)[0]];
    const across = (steps) => ((steps - first) / (end - first || 1)) * CURVE_WIDTH;
    const down = (value) => CURVE_HEIGHT - 2 - ((value - least) / (most - least || 1)) * (CURVE_HEIGHT - 4);
    const picture = svg("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    picture.setAttribute("aria-label", `Return of ${role}, between ${formatted(least)} and ${formatted(most)}, now ${last}`);
    picture.append(svg("polyline", { points: points.map(([steps, value]) => `${across(steps).toFixed(1)},${down(value).toFixed(1)}`).join(" ") }));
    const range = element("p", { className: "note", textContent: `${formatted(least)} to ${formatted(most)} over ${end.toLocaleString("en")} env-steps` });
    figure.append(picture, range);
    return figure;
  }
}

const watchTraining = (page) => (page.training = new TrainingCard(page));
