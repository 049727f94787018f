// What an agent observes at the present step, and what its policy makes of it.

const MAX_LISTED_NUMBERS = 160; // of an observation
const MAX_BARS = 12; // of the probabilities of one head: the most likely choices
const TILE = 64; // CSS pixels of a channel of an image

class Inspector {
  constructor(simulation, content) {
    Object.assign(this, { simulation, parts: content.obs_parts ?? {} });
    const { agents } = simulation.layout;
    $("inspect").append(...agents.map((name, agent) => new Option(agents.length === 1 ? "the agent" : name.replace("_", " "), agent)));
    for (const act of ["change", "input"]) $("inspect").addEventListener(act, () => this.show());
    $("inspector").addEventListener("toggle", () => this.show());
  }

  choose(agent) {
    $("inspect").value = String(agent);
    this.show();
  }

  show() {
    if (!$("inspector").open) return;
    const { simulation } = this;
    const agent = Number($("inspect").value);
    $("observed").replaceChildren(...this.#observation(agent));
    $("action").replaceChildren(...this.#action(agent));
  }

  #observation(agent) {
    const { simulation } = this;
    const role = simulation.roleOf[agent].name;
    const numbers = [...simulation.observation(agent)];
    const shape = simulation.layout.observation.roles[role];
    if (shape.length === 3) return [this.#image(numbers, shape)];
    const all = [...numbers.keys()];
    const parts = this.parts[role] ?? (numbers.length <= MAX_LISTED_NUMBERS ? all.map((k) => [String(k), [k]]) : [["all", all]]);
    let listed = 0;
    const rows = [];
    for (const [name, columns] of parts) {
      if (listed >= MAX_LISTED_NUMBERS) break;
      listed += columns.length;
      const values = columns.slice(0, MAX_LISTED_NUMBERS).map((k) => formatNumber(numbers[k]));
      rows.push(row(name.replaceAll("_", " "), values.join("  ")));
    }
    if (listed < numbers.length) rows.push(row("…", `${numbers.length} numbers`));
    return [element("table", {}, element("tbody", {}, ...rows))];
  }

  // The channels of an image side by side, each from its least to its greatest value.
  #image(numbers, [height, width, channels]) {
    const box = element("div", { className: "channels" });
    for (let channel = 0; channel < channels; channel++) {
      const values = Array.from({ length: height * width }, (_, k) => numbers[k * channels + channel]);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const canvas = element("canvas", { width, height, title: `channel ${channel}: ${formatNumber(low)} … ${formatNumber(high)}` });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", canvas.title);
      canvas.style.width = `${TILE}px`;
      const image = new ImageData(width, height);
      values.forEach((value, k) => {
        const grey = high > low ? (255 * (value - low)) / (high - low) : 0;
        image.data.set([grey, grey, grey, 255], 4 * k);
      });
      canvas.getContext("2d").putImageData(image, 0, 0);
      box.append(canvas);
    }
    return box;
  }

  #action(agent) {
    const { simulation } = this;
    const role = simulation.roleOf[agent].name;
    const note = (textContent) => [element("p", { className: "note", textContent })];
    if (agent === simulation.steered) return note("A person steers it.");
    if (simulation.actors[role] !== "trained") return note(`Its actor: ${simulation.actors[role]}.`);
    if (!simulation.acts(agent)) return note("Its action does not count at this step.");
    const { policy, parameters, value } = simulation.outputs(agent, { withValue: true });
    const rows = policy.head_sizes.length ? this.#choices(policy, parameters, agent) : this.#box(policy, parameters);
    const shown = row("value", value === null ? policy.critic.reason : formatNumber(value));
    shown.lastChild.colSpan = rows[0].children.length - 1;
    const table = element("table", {}, element("tbody", {}, shown, ...rows));
    const gap = simulation.memory.gap(agent);
    return gap === null ? [table] : [table, ...note(gap)];
  }

  #choices(policy, parameters, agent) {
    const mask = this.simulation.mask(agent);
    let start = 0;
    return policy.head_sizes.flatMap((size, head) => {
      const [own, allowed] = [parameters.subarray(start, start + size), mask?.subarray(start, start + size)];
      const chances = policy.epsilon === null ? softmax(own, allowed) : epsilonGreedy(own, allowed, policy.epsilon);
      start += size;
      const best = [...chances.keys()].sort((one, other) => chances[other] - chances[one]).slice(0, MAX_BARS);
      const name = policy.head_sizes.length > 1 ? `${head}: ` : "";
      return best.sort((one, other) => one - other).map((choice) => {
        const bar = element("meter", { min: 0, max: 1, value: chances[choice] });
        bar.setAttribute("aria-label", `action ${name}${choice}`);
        return row(`action ${name}${choice}`, `${(100 * chances[choice]).toFixed(1)} %`, bar);
      });
    });
  }

  #box(policy, parameters) {
    const [low, high] = policy.bounds;
    const greedy = policy.draw(parameters, null, () => 0.5, true);
    return greedy.map((mean, k) => {
      const spread = policy.squash === "beta" || policy.squash === "tanh" ? null : (Math.exp(parameters[low.length + k]) * (high[k] - low[k])) / 2;
      return row(`action ${k}`, spread === null ? formatNumber(mean) : `${formatNumber(mean)} ± ${formatNumber(spread)}`);
    });
  }
}

function row(name, text, ...more) {
  return element("tr", {}, element("th", { scope: "row", textContent: name }), ...more.map((one) => element("td", {}, one)), element("td", { textContent: text }));
}

// Probabilities of logits; a mask forbids choices.
function softmax(logits, mask) {
  const allowed = Array.from(logits, (logit, k) => (mask && !mask[k] ? -Infinity : logit));
  const most = Math.max(...allowed);
  const parts = allowed.map((logit) => Math.exp(logit - most));
  const sum = parts.reduce((all, part) => all + part, 0);
  return parts.map((part) => part / sum);
}

// Probabilities of choices where the one of the greatest value is taken, but for a share epsilon, in which any is.
function epsilonGreedy(values, mask, epsilon) {
  const allowed = Array.from(values, (value, k) => (mask && !mask[k] ? -Infinity : value));
  const [best, count] = [allowed.indexOf(Math.max(...allowed)), allowed.filter(Number.isFinite).length];
  return allowed.map((value, k) => (value === -Infinity ? 0 : epsilon / count) + (k === best ? 1 - epsilon : 0));
}
