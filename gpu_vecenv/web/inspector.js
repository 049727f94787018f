// What an agent observes at the present step, and what its policy makes of it.

const MAX_LISTED_NUMBERS = 160; // of an observation
const MAX_BARS = 12; // of the probabilities of one head: the most likely choices
const TILE = 64; // CSS pixels of a channel of an image

class Inspector {
  constructor(simulation, content) {
    Object.assign(this, { simulation, parts: content.obs_parts ?? {} });
    const critics = content.critics ?? [];
    this.critics = critics.map((critic, k) => critic && { ...critic, policy: new TrainedPolicy({ ...content.policies[k], layers: critic.layers, log_std: null }) });
    const { agents } = simulation.layout;
    $("inspect").append(...agents.map((name, agent) => new Option(agents.length === 1 ? "the agent" : name.replace("_", " "), agent)));
    for (const act of ["change", "input"]) $("inspect").addEventListener(act, () => this.show());
    $("inspector").addEventListener("toggle", () => this.show());
  }

  choose(agent) {
    $("inspect").value = String(agent);
    this.show();
  }

  // newest: whether the present step is the newest one, at which policies with a memory are.
  show(newest = this.newest) {
    this.newest = newest;
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
    const k = simulation.policies.findIndex(({ agents }) => agents.includes(agent));
    const policy = simulation.policies[k];
    if (policy.cell && !this.newest) return note("The policy has a memory, which the page has at the newest step alone.");
    const { parameters, greedy } = this.#peek(policy, agent);
    const rows = policy.head_sizes.length ? this.#choices(policy, parameters, agent) : this.#box(policy, parameters, greedy);
    const value = this.value(k, agent);
    if (value !== null) {
      const shown = row("value", formatNumber(value));
      shown.lastChild.colSpan = rows[0].children.length - 1;
      rows.unshift(shown);
    }
    return [element("table", {}, element("tbody", {}, ...rows))];
  }

  // What the policy gives, without an effect on its memory.
  #peek(policy, agent) {
    const { simulation } = this;
    const memory = policy.states.get(agent);
    const copy = new Map(memory && [[agent, { hidden: memory.hidden.slice(), cell: memory.cell.slice() }]]);
    const parameters = policy.parameters(agent, simulation.observation(agent), 1, null, copy);
    return { parameters, greedy: policy.draw(parameters, simulation.mask(agent), () => 0.5, true) };
  }

  // The value of a policy's critic at the present step, in units of returns; null for none.
  value(k, agent) {
    const critic = this.critics[k];
    if (!critic) return null;
    return critic.policy.parameters(agent, this.simulation.observation(agent))[0] * critic.std + critic.mean;
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

  #box(policy, parameters, greedy) {
    const [low, high] = policy.bounds;
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
