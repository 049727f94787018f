// A game's WebAssembly module: environments in its memory, their kernels, and digests of what they do.

const ARRAYS = {
  bool: Uint8Array,
  uint8: Uint8Array,
  int32: Int32Array,
  uint32: Uint32Array,
  float32: Float32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  float64: Float64Array,
};
const SETTERS = {
  pointer: "setUint32",
  int32: "setInt32",
  uint32: "setUint32",
  float32: "setFloat32",
  float64: "setFloat64",
  int64: "setBigInt64",
  uint64: "setBigUint64",
};
const PAGE_BYTES = 65536;
const ALIGNMENT = 64;
const AUTORESET_MODES = { next_step: 0, same_step: 1, disabled: 2 }; // as in step.cuh

const product = (sizes) => sizes.reduce((all, size) => all * size, 1);

function bytesOfBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

// Arrays in the memory of one instance of a module: allocated one after the other, never freed.
class Memory {
  constructor(module) {
    this.exports = new WebAssembly.Instance(module, {}).exports;
    this.exports._initialize();
    this.end = this.exports.__heap_base.value;
  }

  allocate(bytes) {
    const start = Math.ceil(this.end / ALIGNMENT) * ALIGNMENT;
    this.end = start + bytes;
    const missing = this.end - this.exports.memory.buffer.byteLength;
    if (missing > 0) this.exports.memory.grow(Math.ceil(missing / PAGE_BYTES));
    return start;
  }

  // A view; those made before the memory grew are of no use.
  view(dtype, start, count) {
    return new ARRAYS[dtype](this.exports.memory.buffer, start, count);
  }
}

// One kernel with its argument struct.
class Kernel {
  constructor(memory, name, { bytes, arguments: described }) {
    this.memory = memory;
    this.function = memory.exports[`kernel_${name}`];
    this.start = memory.allocate(bytes);
    this.described = new Map(described.map((argument) => [argument.name, argument]));
  }

  // Sets arguments that the kernel has; of a pointer the value is an address.
  set(values) {
    const struct = new DataView(this.memory.exports.memory.buffer, this.start);
    for (const [name, value] of Object.entries(values)) {
      const argument = this.described.get(name);
      if (argument === undefined) continue;
      if (argument.dtype === "bool" || argument.dtype === "uint8") struct.setUint8(argument.offset, Number(value));
      else struct[SETTERS[argument.dtype]](argument.offset, value, true);
    }
  }

  run(values = {}) {
    this.set(values);
    this.function(0n, 1n, this.start);
  }
}

// numEnvs environments of a compiled game, like VecEnv in Python.
//   state[name], outputs[name]: typed arrays, environment-major; actions: of the coming step; shapes as in `layout`.
class VecEnv {
  constructor(module, layout, shared, { numEnvs = 1, autoresetMode = "disabled", firstEnvIndex = 0n } = {}) {
    Object.assign(this, { layout, numEnvs, firstEnvIndex });
    const memory = (this.memory = new Memory(module));
    const place = ({ name, dtype, shape, shared: one = false }) => {
      const count = product(shape) * (one ? 1 : numEnvs);
      return { name, dtype, count, start: memory.allocate(count * ARRAYS[dtype].BYTES_PER_ELEMENT) };
    };
    const { num_agents, action } = layout;
    const fields = layout.fields.map(place);
    const outputs = layout.outputs.map(place);
    const actions = place({ name: "actions", dtype: action.dtype, shape: [num_agents, action.heads] });
    const mask = place({ name: "mask", dtype: "bool", shape: [] });
    const sizes = memory.allocate(24);
    this.kernels = Object.fromEntries(
      Object.entries(layout.kernels).map(([name, struct]) => [name, new Kernel(memory, name, struct)]),
    );
    this.kernels.vecenv_layout.run({ out: sizes });
    const scratch = memory.allocate(Number(memory.view("int64", sizes, 1)[0]));
    const digests = place({ name: "digests", dtype: "uint64", shape: [] });
    const largest = Math.max(...layout.outputs.map(({ shape, dtype }) => product(shape) * ARRAYS[dtype].BYTES_PER_ELEMENT));
    this.copy = memory.allocate(largest * numEnvs); // of final observations, for digests
    // All is allocated: the views stay valid.
    const view = ({ dtype, start, count }) => memory.view(dtype, start, count);
    this.starts = Object.fromEntries([...fields, ...outputs, actions, mask].map(({ name, start }) => [name, start]));
    this.state = Object.fromEntries(fields.map((field) => [field.name.replace(/^state_/, ""), view(field)]));
    this.outputs = Object.fromEntries(outputs.map((output) => [output.name, view(output)]));
    this.actions = view(actions);
    this.mask = view(mask);
    this.digest = new Digest(this, digests.start, view(digests));
    for (const [name, content] of Object.entries(shared)) {
      const values = bytesOfBase64(content);
      memory.view("uint8", this.starts[name], values.length).set(values);
    }
    for (const kernel of Object.values(this.kernels)) {
      kernel.set({
        ...this.starts,
        num_envs: BigInt(numEnvs),
        scratch,
        mode: AUTORESET_MODES[autoresetMode],
      });
    }
    this.kernels.vecenv_step.set({ final_obs: autoresetMode === "same_step" ? this.starts.final_obs : 0 });
    this.resetsInStep = autoresetMode === "same_step";
  }

  // Starts episodes where mask (numEnvs, 0 or 1) is not 0, or everywhere; a seed restarts the random streams.
  reset({ seed = null, mask = null, firstEnvIndex = this.firstEnvIndex } = {}) {
    if (mask !== null) this.mask.set(mask);
    this.kernels.vecenv_reset.run({
      mask: mask === null ? 0 : this.starts.mask,
      reseed: seed !== null,
      seed: BigInt(seed ?? 0),
      first_env_index: BigInt(firstEnvIndex),
    });
  }

  // One step with the values in `actions`.
  step() {
    this.kernels.vecenv_step.run();
  }

  // Writes observations of the current state.
  observe() {
    this.kernels.vecenv_observe.run();
  }

  // Draws random valid actions of the coming step, from the random streams of the environments.
  sampleActions() {
    this.kernels.vecenv_random_actions.run();
  }}

// Digests of trajectories, one of 64 bits for each environment: equal to those of gpu_vecenv/engine/digest.py.
class Digest {
  constructor(env, start, words) {
    Object.assign(this, { env, words });
    env.kernels.digest.set({ out: start });
  }

  clear() {
    this.words.fill(0n);
  }

  add(name, dtype, count, start = this.env.starts[name]) {
    const size = ARRAYS[dtype].BYTES_PER_ELEMENT;
    this.env.kernels.digest.run({ data: start, size, is_float: dtype.startsWith("float"), count: BigInt(count) });
  }

  addOutputs(...names) {
    for (const { name, dtype, shape } of this.env.layout.outputs) {
      if (names.includes(name)) this.add(name, dtype, product(shape));
    }
  }

  addReset() {
    this.addOutputs("obs");
    this.addOutputs("active", "action_mask", "acting");
  }

  addStep() {
    const { layout, resetsInStep } = this.env;
    this.add("actions", layout.action.dtype, layout.num_agents * layout.action.heads);
    this.addOutputs("obs", "rewards", "terminations", "truncations");
    this.addOutputs("active", "action_mask", "acting");
    if (resetsInStep) this.#addFinalObs();
  }

  // Rows of final_obs outside of final_mask count as 0.
  #addFinalObs() {
    const { env } = this;
    const { dtype, shape } = env.layout.outputs.find(({ name }) => name === "final_obs");
    const size = product(shape);
    const row = size / env.layout.num_agents;
    const kept = env.memory.view(dtype, env.copy, size * env.numEnvs);
    kept.set(env.outputs.final_obs);
    env.outputs.final_mask.forEach((written, k) => written || kept.fill(0, k * row, (k + 1) * row));
    this.addOutputs("final_mask");
    this.add("final_obs", dtype, size, env.copy);
  }

  addState() {
    for (const { name, dtype, shape, shared } of this.env.layout.fields) {
      if (name.startsWith("state_") && !shared) this.add(name, dtype, product(shape));
    }
  }

  // Of all environments, 16 hexadecimal digits.
  hex() {
    const sum = this.words.reduce((all, word, k) => all + word * (2n * BigInt(k) + 1n), 0n);
    return BigInt.asUintN(64, sum).toString(16).padStart(16, "0");
  }
}
