// The past of an episode: the actions of its steps, and snapshots of the environment's arrays every so many steps, so
// that any step is simulated again from the nearest snapshot before it.

const SNAPSHOT_BYTES = 64 * 2 ** 20; // of all snapshots; where they are more, every second one is dropped
const OBJECT_BYTES = 256; // about what a typed array takes beside its content

class History {
  constructor(simulation, limit = SNAPSHOT_BYTES) {
    Object.assign(this, { simulation, limit });
    this.arrays = simulation.arrays().map((array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    this.size = this.arrays.reduce((sum, { length }) => sum + length, 0);
    this.row = simulation.env.actions.length;
    this.begin();
  }

  // After a reset. `actions`: those of all steps, for an episode that is known already.
  begin(actions = null) {
    const { simulation } = this;
    this.known = actions !== null;
    this.actions = actions ?? new simulation.env.actions.constructor(256 * this.row);
    Object.assign(this, { first: simulation.steps, length: simulation.steps, spacing: 1, snapshots: new Map(), edits: new Map() });
    this.#keep();
  }

  // A new step at the end of what was simulated: with the actions in `env.actions`, where they are not known.
  advance() {
    const { simulation, row } = this;
    if (this.known) this.#write(this.length);
    else {
      if (this.actions.length < (this.length - this.first + 1) * row) {
        const longer = new this.actions.constructor(2 * this.actions.length);
        longer.set(this.actions);
        this.actions = longer;
      }
      this.actions.set(simulation.env.actions, (this.length - this.first) * row);
    }
    simulation.advance();
    this.length += 1;
    this.#keep();
  }

  // Goes to a step, first … length.
  seek(step) {
    const { simulation } = this;
    const nearest = step - ((step - this.first) % this.spacing);
    if (step < simulation.steps || nearest > simulation.steps) this.#restore(nearest);
    while (simulation.steps < step) {
      this.#write(simulation.steps);
      simulation.advance();
      this.#edit(simulation.steps);
    }
  }

  // Forgets what comes after the present step.
  cut() {
    const { steps } = this.simulation;
    this.length = steps;
    for (const step of this.snapshots.keys()) {
      if (step > steps) this.snapshots.delete(step);
    }
    for (const step of this.edits.keys()) {
      if (step > steps) this.edits.delete(step);
    }
  }

  // Changes an array at the present step, from which on the episode is another one.
  edit(name, values) {
    const { simulation } = this;
    this.cut();
    const own = this.edits.get(simulation.steps) ?? new Map();
    this.edits.set(simulation.steps, own.set(name, values));
    this.#edit(simulation.steps);
  }

  #edit(step) {
    const edits = this.edits.get(step);
    if (edits === undefined) return;
    const { env } = this.simulation;
    for (const [name, values] of edits) env.state[name].set(values);
    env.observe();
  }

  #write(step) {
    const { row, simulation } = this;
    simulation.env.actions.set(this.actions.subarray((step - this.first) * row, (step - this.first + 1) * row));
  }

  #keep() {
    const { simulation, snapshots } = this;
    if ((simulation.steps - this.first) % this.spacing) return;
    const snapshot = new Uint8Array(this.size);
    let at = 0;
    for (const array of this.arrays) {
      snapshot.set(array, at);
      at += array.length;
    }
    snapshots.set(simulation.steps, snapshot);
    while (snapshots.size * (this.size + OBJECT_BYTES) > this.limit && snapshots.size > 2) {
      this.spacing *= 2;
      for (const step of snapshots.keys()) {
        if ((step - this.first) % this.spacing) snapshots.delete(step);
      }
    }
  }

  #restore(step) {
    const snapshot = this.snapshots.get(step);
    let at = 0;
    for (const array of this.arrays) array.set(snapshot.subarray(at, (at += array.length)));
    this.simulation.steps = step;
    this.#edit(step);
  }
}
