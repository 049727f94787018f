// The default networks: their layers, with rows of inputs of one agent in several environments.

function float32OfBase64(text) {
  return new Float32Array(bytesOfBase64(text).buffer);
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

// Rows of inputs times a weight (outputs, inputs), plus a bias: rows of outputs. Four sums at a time take half as long.
function affine(weight, input, bias, outputs, count) {
  const inputs = weight.length / outputs;
  const result = new Float32Array(count * outputs);
  for (let row = 0; row < count; row++) {
    const [from, to] = [row * inputs, row * outputs];
    let k = 0;
    for (; k + 4 <= outputs; k += 4) {
      const start = k * inputs;
      let [a, b, c, d] = [0, 0, 0, 0];
      for (let j = 0; j < inputs; j++) {
        const x = input[from + j];
        a += weight[start + j] * x;
        b += weight[start + inputs + j] * x;
        c += weight[start + 2 * inputs + j] * x;
        d += weight[start + 3 * inputs + j] * x;
      }
      result[to + k] = a;
      result[to + k + 1] = b;
      result[to + k + 2] = c;
      result[to + k + 3] = d;
    }
    for (; k < outputs; k++) {
      let sum = 0;
      for (let j = 0; j < inputs; j++) sum += weight[k * inputs + j] * input[from + j];
      result[to + k] = sum;
    }
    if (bias !== null) for (k = 0; k < outputs; k++) result[to + k] += bias[k];
  }
  return result;
}

function inPlace(input, f) {
  for (let k = 0; k < input.length; k++) input[k] = f(input[k]);
  return input;
}

const ACTIVATIONS = { tanh: Math.tanh, relu: (x) => (x > 0 ? x : 0) };

// Layer kind -> (layer, input, count, states) => output; rows lie one after the other, an image as (channels, height,
// width). A recurrent layer reads and writes its rows of states.
const LAYERS = {
  linear: (layer, input, count) => affine(layer.weight, input, layer.bias, layer.outputs, count),
  tanh: (layer, input) => inPlace(input, ACTIVATIONS.tanh),
  relu: (layer, input) => inPlace(input, ACTIVATIONS.relu),
  layer_norm({ weight, bias, eps }, input, count) {
    const size = weight.length;
    for (let row = 0; row < count; row++) {
      const own = input.subarray(row * size, (row + 1) * size);
      const mean = own.reduce((sum, x) => sum + x, 0) / size;
      const variance = own.reduce((sum, x) => sum + (x - mean) ** 2, 0) / size;
      const scale = 1 / Math.sqrt(variance + eps);
      for (let k = 0; k < size; k++) own[k] = (own[k] - mean) * scale * weight[k] + bias[k];
    }
    return input;
  },
  conv({ filters, channels, kernel, stride, padding, weight, bias, image: [height, width], map: [rows, columns] }, input, count) {
    const output = new Float32Array(count * filters * rows * columns);
    for (let row = 0, at = 0; row < count; row++) {
      const own = input.subarray(row * channels * height * width, (row + 1) * channels * height * width);
      for (let f = 0; f < filters; f++) {
        for (let top = -padding[0], i = 0; i < rows; i++, top += stride[0]) {
          for (let left = -padding[1], j = 0; j < columns; j++, left += stride[1], at++) {
            let sum = bias[f];
            for (let c = 0; c < channels; c++) {
              for (let y = Math.max(0, -top); y < kernel[0] && top + y < height; y++) {
                const from = ((f * channels + c) * kernel[0] + y) * kernel[1];
                const line = (c * height + top + y) * width + left;
                for (let x = Math.max(0, -left); x < kernel[1] && left + x < width; x++) sum += weight[from + x] * own[line + x];
              }
            }
            output[at] = sum;
          }
        }
      }
    }
    return output;
  },
  // The agent's own part, then mean and maximum of each list's entities, each after two layers.
  entities({ own, lists, size }, input, count) {
    const inputs = input.length / count;
    const output = new Float32Array(count * size);
    for (let row = 0; row < count; row++) {
      const obs = input.subarray(row * inputs, (row + 1) * inputs);
      const ownPart = Float32Array.from(own, (column) => obs[column]);
      let at = row * size;
      output.set(ownPart, at);
      at += own.length;
      for (const list of lists) {
        output.set(encodedEntities(list, obs, ownPart), at);
        at += 2 * list.second.outputs;
      }
    }
    return output;
  },
  gru({ units, weight_ih, weight_hh, bias_ih, bias_hh }, input, count, { hidden }) {
    const gates = affine(weight_ih, input, bias_ih, 3 * units, count);
    const before = affine(weight_hh, hidden, bias_hh, 3 * units, count);
    for (let row = 0; row < count; row++) {
      for (let k = 0, at = 3 * row * units; k < units; k++, at++) {
        const reset = sigmoid(gates[at] + before[at]);
        const update = sigmoid(gates[at + units] + before[at + units]);
        const fresh = Math.tanh(gates[at + 2 * units] + reset * before[at + 2 * units]);
        hidden[row * units + k] = fresh + update * (hidden[row * units + k] - fresh);
      }
    }
    return hidden.slice();
  },
  lstm({ units, weight_ih, weight_hh, bias_ih, bias_hh }, input, count, { hidden, cell }) {
    const gates = affine(weight_ih, input, bias_ih, 4 * units, count);
    const before = affine(weight_hh, hidden, bias_hh, 4 * units, count);
    for (let row = 0; row < count; row++) {
      for (let k = 0; k < units; k++) {
        const gate = (part) => gates[(4 * row + part) * units + k] + before[(4 * row + part) * units + k];
        const at = row * units + k;
        cell[at] = sigmoid(gate(1)) * cell[at] + sigmoid(gate(0)) * Math.tanh(gate(2));
        hidden[at] = sigmoid(gate(3)) * Math.tanh(cell[at]);
      }
    }
    return hidden.slice();
  },
};

// Mean and maximum over the entities of a list that are there.
function encodedEntities({ columns, presence, first, of_own, second, activation }, obs, own) {
  const there = presence === null ? columns : columns.filter((places) => obs[places[presence]] !== 0);
  const units = second.outputs;
  const found = new Float32Array(2 * units);
  if (there.length === 0) return found;
  const rows = affine(first.weight, Float32Array.from(there.flat(), (column) => obs[column]), first.bias, units, there.length);
  if (of_own) {
    const shift = affine(of_own, own, null, units, 1);
    for (let k = 0; k < rows.length; k++) rows[k] += shift[k % units];
  }
  const features = inPlace(affine(second.weight, inPlace(rows, ACTIVATIONS[activation]), second.bias, units, there.length), ACTIVATIONS[activation]);
  for (let k = 0; k < units; k++) {
    let [sum, most] = [0, -Infinity];
    for (let at = k; at < features.length; at += units) {
      sum += features[at];
      most = Math.max(most, features[at]);
    }
    found[k] = sum / there.length;
    found[units + k] = most;
  }
  return found;
}

// A layer with its numbers as arrays, whatever it contains.
function decoded(content) {
  if (Array.isArray(content)) return content.map(decoded);
  if (content === null || typeof content !== "object") return content;
  const value = (name, own) => (/^(weight|bias|of_own)/.test(name) && own !== null ? float32OfBase64(own) : decoded(own));
  return Object.fromEntries(Object.entries(content).map(([name, own]) => [name, value(name, own)]));
}

// The layers of one policy, or of its critic; where one of them is recurrent, callers keep the states of agents.
class Network {
  // `content`: layers, obs_shape, obs_scale, which bytes are divided by, agents, agent_ids, and mean and std of what is
  // observed, in base64, or null.
  constructor(content) {
    this.load(content);
  }

  load({ layers, obs_shape, obs_scale, agents, agent_ids, mean, std }) {
    Object.assign(this, { obs_shape, obs_scale, agents, agent_ids, size: product(obs_shape) });
    [this.mean, this.std] = [mean, std].map((text) => text && float32OfBase64(text));
    this.layers = layers.map(decoded);
    this.cell = this.layers.find(({ kind }) => kind === "gru" || kind === "lstm");
    let [height, width] = obs_shape;
    for (const layer of this.layers.filter(({ kind }) => kind === "conv")) {
      layer.image = [height, width];
      [height, width] = layer.image.map((length, k) => Math.floor((length + 2 * layer.padding[k] - layer.kernel[k]) / layer.stride[k]) + 1);
      layer.map = [height, width];
    }
  }

  // The state of one agent in `count` environments before the first observation of an episode; null without memory.
  states(count = 1) {
    return this.cell ? { hidden: new Float32Array(count * this.cell.units), cell: new Float32Array(count * this.cell.units) } : null;
  }

  // Outputs for one agent in `count` environments, row after row. `obs`: rows of what is observed, without padding;
  // `states`: of the rows, which are written; `begins`: whether a row is the first of an episode, or null for none.
  outputs(agent, obs, states = null, count = 1, begins = null) {
    begins?.forEach((begin, row) => begin && states && cleared(states, row, count));
    let rows = this.#inputs(agent, obs, count);
    for (const layer of this.layers) rows = LAYERS[layer.kind](layer, rows, count, states);
    return rows;
  }

  #inputs(agent, obs, count) {
    const { size, mean, std } = this;
    const width = size + (this.agent_ids ? this.agents.length : 0);
    const rows = new Float32Array(count * width);
    const scale = obs instanceof Uint8Array && !mean ? this.obs_scale : 1;
    const image = this.layers[0].kind === "conv";
    const [channels, pixels] = [this.obs_shape[2], this.obs_shape[0] * this.obs_shape[1]];
    for (let row = 0; row < count; row++) {
      for (let k = 0; k < size; k++) {
        let value = obs[row * size + k] / scale;
        if (mean) value = Math.min(Math.max((value - mean[k]) / std[k], -10), 10);
        rows[row * width + (image ? (k % channels) * pixels + Math.floor(k / channels) : k)] = value;
      }
      if (this.agent_ids) rows[row * width + size + this.agents.indexOf(agent)] = 1;
    }
    return rows;
  }
}

// A copy of states, or null.
const copied = (states) => states && { hidden: states.hidden.slice(), cell: states.cell.slice() };

// Sets one of `count` rows of states to 0.
function cleared(states, row = 0, count = 1) {
  for (const own of Object.values(states)) own.fill(0, (row * own.length) / count, ((row + 1) * own.length) / count);
}
