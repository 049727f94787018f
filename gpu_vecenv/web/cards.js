// The cards beside a game's picture: who acts, who is steered, parameters, the score, facts.

const MAX_LISTED = 40; // agents in the list of those that can be steered

const formatted = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 2 }).replace("-", "−"));

class Cards {
  constructor(page) {
    Object.assign(this, { page, simulation: page.simulation, content: page.content });
    this.#actors();
    this.#steered();
    this.#parameters();
    this.#facts();
  }

  #actors() {
    for (const { name, agents } of this.simulation.roles) {
      const kinds = this.simulation.kinds(name);
      const select = element("select", { id: `actor-${name}` }, ...kinds.map((kind) => new Option(kind, kind)));
      select.value = this.simulation.actors[name];
      select.addEventListener("change", () => (this.simulation.actors[name] = select.value));
      const label = element("label", { htmlFor: select.id });
      label.append(...this.#key(name), agents.length > 1 ? `${name} (${agents.length})` : name);
      $("actors").append(label, select);
    }
    $("greedy-line").hidden = this.simulation.policies.length === 0;
  }

  // The colour of a role in the picture, where it has several.
  #key(name) {
    const { roles, hasPlaces } = this.page.episode;
    if (!hasPlaces || roles.length === 1) return [];
    const key = element("i", { className: "key" });
    key.style.color = `rgb(${roles.find((role) => role.name === name).colour.join()})`;
    return [key];
  }

  #steered() {
    const { agents } = this.simulation.layout;
    $("steer").append(new Option("nobody", ""));
    const shown = agents.map((name, agent) => [name, agent]).filter(([, agent]) => agents.length <= MAX_LISTED || this.simulation.roleOf[agent].agents.indexOf(agent) < MAX_LISTED / 4);
    for (const [name, agent] of shown) $("steer").append(new Option(agents.length === 1 ? "the agent" : name.replace("_", " "), agent));
  }

  #parameters() {
    const { page } = this;
    const { parameters, scalars } = this.content;
    $("parameters-card").hidden = parameters.length + scalars.length === 0;
    for (const { name, low, high, value } of parameters) {
      const input = element("input", { type: "range", id: `parameter-${name}`, min: low, max: high, step: (high - low) / 200, value });
      const output = element("output");
      input.addEventListener("input", () => {
        page.chosen[name] = Number(input.value);
        output.textContent = formatted(page.chosen[name]);
        page.edit(name, [page.chosen[name]]);
      });
      $("parameters").append(element("label", { htmlFor: input.id, textContent: name.replaceAll("_", " ") }), input, output);
      output.textContent = "drawn";
    }
    for (const { name, value } of scalars) {
      const input = element("input", { type: "number", id: `parameter-${name}`, step: "any", value });
      input.addEventListener("change", () => {
        delete page.chosen[name];
        page.edit(name, [this.#scalar(name, input.value)]);
      });
      $("parameters").append(element("label", { htmlFor: input.id, textContent: name.replaceAll("_", " ") }), input, element("output"));
    }
  }

  // What a field of one number holds for a number, or for the text of one.
  #scalar(name, value) {
    return this.simulation.env.state[name] instanceof BigInt64Array ? BigInt(Math.round(Number(value))) : Number(value);
  }

  // Gives a field of one number that all environments share a value, from the next episode on.
  share(name, value) {
    $(`parameter-${name}`).value = Number(value);
    this.page.chosen[name] = this.#scalar(name, value);
  }

  #facts() {
    for (const [name, text] of this.content.facts) $("facts").append(element("dt", { textContent: name }), element("dd", { textContent: text }));
  }

  // The returns at the present step.
  score() {
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
}
