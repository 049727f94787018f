// Replay files, as gpu_vecenv/watch/replay_file.py writes them: an episode as seed and actions.

const REPLAY_MAGIC = "gpu_vecenv replay ";
const REPLAY_FORMAT = "3";
const SHA_BYTES = 32;
const ACTION_ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };

// Header, actions (Float64Array or Float32Array, step after step), step digests and shared fields of a file.
async function readReplay(bytes) {
  const line = (from) => bytes.indexOf(10, from);
  const text = (from, to) => new TextDecoder().decode(bytes.subarray(from, to));
  const first = line(0);
  if (first < 0 || !text(0, first).startsWith(REPLAY_MAGIC)) throw new Error("this is no replay of gpu_vecenv");
  if (text(0, first) !== REPLAY_MAGIC + REPLAY_FORMAT) throw new Error(`the replay has another format than ${REPLAY_FORMAT}`);
  const second = line(first + 1);
  // Integers of 64 bits do not fit in a double.
  const source = text(first + 1, second).replace(/"(seed|env_index)":(\d+)/g, '"$1":"$2"');
  const header = JSON.parse(source);
  const packed = new Blob([bytes.subarray(second + 1, bytes.length - SHA_BYTES)]);
  const payload = new Uint8Array(await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  let at = 0;
  const take = (Type, shape) => {
    const count = product(shape);
    const array = unplaned(payload.subarray(at, (at += count * Type.BYTES_PER_ELEMENT)), Type, shape);
    return array;
  };
  const { dtype, shape } = header.actions;
  const actions = take(ACTION_ARRAYS[dtype], shape);
  const stepDigests = take(Uint32Array, [shape[0] + 1]);
  const shared = {};
  for (const name of Object.keys(header.shared).sort()) shared[name] = take(ARRAYS[header.shared[name].dtype], header.shared[name].shape);
  return { header, actions, numSteps: shape[0], stepDigests, shared };
}

// Undoes the order in which the file has the bytes: all first bytes before all second ones, the first axis fastest.
function unplaned(planes, Type, shape) {
  const count = product(shape);
  const width = Type.BYTES_PER_ELEMENT;
  const bytes = new Uint8Array(count * width);
  for (let k = 0; k < count; k++) {
    // k is the index in C order; the planes have that of the reversed axes.
    let [rest, place, stride] = [k, 0, count];
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      stride /= shape[axis];
      place += (rest % shape[axis]) * stride;
      rest = Math.floor(rest / shape[axis]);
    }
    for (let byte = 0; byte < width; byte++) bytes[k * width + byte] = planes[byte * count + place];
  }
  return new Type(bytes.buffer);
}

// Begins the recorded episode, whose steps the history then has to simulate.
function beginReplay(history, replay) {
  const { simulation } = history;
  for (const [name, values] of Object.entries(replay.shared)) simulation.env.state[name].set(values);
  simulation.reset(BigInt(replay.header.seed), BigInt(replay.header.env_index));
  history.begin(replay.actions);
}

// Simulates a replay in WebAssembly and compares every digest: yields after each step, and returns the first step
// that differs, or null. `advance` makes a step.
function* checkReplay(history, replay, advance = () => history.advance()) {
  const { simulation } = history;
  const { words } = simulation.env.digest;
  const differs = () => Number(words[0] & 0xffffffffn) !== replay.stepDigests[simulation.steps];
  beginReplay(history, replay);
  let first = differs() ? 0 : null;
  while (history.length < replay.numSteps) {
    advance();
    if (first === null && differs()) first = simulation.steps;
    yield;
  }
  return first ?? (simulation.digest === replay.header.digest ? null : replay.numSteps);
}
