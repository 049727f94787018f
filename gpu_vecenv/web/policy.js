// Policies of a page: random numbers with a seed, the default networks, and draws from their distributions.

// Bob Jenkins' small fast counter generator, 32 bits; each call gives a number in [0, 1).
function randomNumbers(seed) {
  let [a, b, c, counter] = [Number(BigInt(seed) & 0xffffffffn) | 0, Number((BigInt(seed) >> 32n) & 0xffffffffn) | 0, 0, 1];
  const next = () => {
    const sum = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = ((c << 21) | (c >>> 11)) + sum;
    return (sum >>> 0) / 2 ** 32;
  };
  for (let k = 0; k < 12; k++) next();
  return next;
}

const normalNumber = (random) => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

function float32OfBase64(text) {
  return new Float32Array(bytesOfBase64(text).buffer);
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function product_of(weight, inputs, bias, count) {
  const outputs = new Float32Array(count);
  for (let k = 0; k < count; k++) {
    let sum = bias[k];
    for (let j = 0, at = k * inputs.length; j < inputs.length; j++) sum += weight[at + j] * inputs[j];
    outputs[k] = sum;
  }
  return outputs;
}

// Layer kind -> (layer, input, state) => output; an image is an array with its shape (channels, height, width).
const LAYERS = {
  linear: (layer, input) => product_of(layer.weight, input, layer.bias, layer.outputs),
  tanh: (layer, input) => sameShape(input, input.map(Math.tanh)),
  relu: (layer, input) => sameShape(input, input.map((x) => Math.max(x, 0))),
  conv(layer, input) {
    const [, height, width] = input.image;
    const { filters, channels, kernel, stride, padding, weight, bias } = layer;
    const [rows, columns] = [height, width].map((length, k) => Math.floor((length + 2 * padding[k] - kernel[k]) / stride[k]) + 1);
    const output = new Float32Array(filters * rows * columns);
    for (let f = 0, at = 0; f < filters; f++) {
      for (let row = 0; row < rows; row++) {
        for (let column = 0; column < columns; column++, at++) {
          let sum = bias[f];
          for (let c = 0; c < channels; c++) {
            for (let i = 0; i < kernel[0]; i++) {
              const y = row * stride[0] - padding[0] + i;
              if (y < 0 || y >= height) continue;
              for (let j = 0; j < kernel[1]; j++) {
                const x = column * stride[1] - padding[1] + j;
                if (x < 0 || x >= width) continue;
                sum += weight[((f * channels + c) * kernel[0] + i) * kernel[1] + j] * input[(c * height + y) * width + x];
              }
            }
          }
          output[at] = sum;
        }
      }
    }
    return Object.assign(output, { image: [filters, rows, columns] });
  },
  gru(layer, input, state) {
    const { units } = layer;
    const gates = product_of(layer.weight_ih, input, layer.bias_ih, 3 * units);
    const hidden = product_of(layer.weight_hh, state[0], layer.bias_hh, 3 * units);
    state[0] = state[0].map((before, k) => {
      const reset = sigmoid(gates[k] + hidden[k]);
      const update = sigmoid(gates[units + k] + hidden[units + k]);
      const fresh = Math.tanh(gates[2 * units + k] + reset * hidden[2 * units + k]);
      return fresh + update * (before - fresh);
    });
    return state[0];
  },
  lstm(layer, input, state) {
    const { units } = layer;
    const gates = product_of(layer.weight_ih, input, layer.bias_ih, 4 * units);
    const hidden = product_of(layer.weight_hh, state[0], layer.bias_hh, 4 * units);
    const gate = (part, k) => gates[part * units + k] + hidden[part * units + k];
    state[1] = state[1].map((before, k) => sigmoid(gate(1, k)) * before + sigmoid(gate(0, k)) * Math.tanh(gate(2, k)));
    state[0] = state[1].map((cell, k) => sigmoid(gate(3, k)) * Math.tanh(cell));
    return state[0];
  },
};

const sameShape = (input, output) => Object.assign(output, input.image && { image: input.image });

// One policy of a run: acts for its agents, each with a state of its own where it is recurrent.
class TrainedPolicy {
  constructor(content) {
    this.states = new Map();
    this.load(content);
  }

  // Takes newer weights of the same policy; states stay.
  load(content) {
    Object.assign(this, content);
    const arrays = (object) =>
      Object.fromEntries(Object.entries(object).map(([name, value]) => [name, /weight|bias/.test(name) ? float32OfBase64(value) : value]));
    this.layers = content.layers.map(arrays);
    for (const name of ["mean", "std", "log_std"]) this[name] = content[name] && float32OfBase64(content[name]);
    this.cell = this.layers.find(({ kind }) => kind === "gru" || kind === "lstm");
  }

  // Before the first observation of an episode.
  reset() {
    this.states.clear();
  }

  // Parameters of the distribution, for the row of an agent's observation without padding.
  parameters(agent, obs) {
    let row = obs instanceof Uint8Array ? Float32Array.from(obs, (value) => (this.mean ? value : value / 255)) : Float32Array.from(obs);
    if (this.mean) row = row.map((value, k) => Math.min(Math.max((value - this.mean[k]) / this.std[k], -10), 10));
    if (this.agent_ids) {
      const own = this.agents.map((other) => Number(other === agent));
      row = Float32Array.from([...row, ...own]);
    }
    if (this.layers[0].kind === "conv") row = channelsFirst(row, this.obs_shape);
    if (this.cell && !this.states.has(agent)) this.states.set(agent, [new Float32Array(this.cell.units), new Float32Array(this.cell.units)]);
    for (const layer of this.layers) row = LAYERS[layer.kind](layer, row, this.states.get(agent));
    return this.log_std ? Float32Array.from([...row, ...this.log_std]) : row;
  }

  // An action: a choice of each head, or the numbers of a Box. `mask`: allowed choices, or null.
  act(agent, obs, mask, random, greedy = false) {
    const parameters = this.parameters(agent, obs);
    if (this.head_sizes.length === 0) return this.#box(parameters, random, greedy);
    let start = 0;
    return this.head_sizes.map((size) => {
      let [best, most] = [0, -Infinity];
      for (let k = start; k < start + size; k++) {
        if (mask && !mask[k]) continue;
        // The argmax of logits with Gumbel noise is a sample.
        const value = parameters[k] - (greedy ? 0 : Math.log(-Math.log(1 - random())));
        if (value > most) [best, most] = [k - start, value];
      }
      start += size;
      return best;
    });
  }

  #box(parameters, random, greedy) {
    const [low, high] = this.bounds;
    return low.map((least, k) => {
      let draw;
      if (this.squash === "beta") draw = 2 * betaNumber(parameters[k], parameters[low.length + k], random, greedy) - 1;
      else draw = parameters[k] + (greedy ? 0 : Math.exp(parameters[low.length + k]) * normalNumber(random));
      const unit = this.squash === "tanh" ? Math.tanh(draw) : Math.min(Math.max(draw, -1), 1);
      return least + ((unit + 1) / 2) * (high[k] - least);
    });
  }
}

// (height, width, channels) -> (channels, height, width)
function channelsFirst(row, [height, width, channels]) {
  const image = row.map((_, k) => {
    const pixel = k % (height * width);
    return row[pixel * channels + Math.floor(k / (height * width))];
  });
  return Object.assign(image, { image: [channels, height, width] });
}

// Draw, or mean, of a Beta distribution whose parameters are 1 + softplus of these.
function betaNumber(one, other, random, greedy) {
  const [a, b] = [one, other].map((x) => 1 + Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x))));
  if (greedy) return a / (a + b);
  const gamma = (shape) => {
    // Marsaglia and Tsang 2000, for shapes of at least 1.
    const d = shape - 1 / 3;
    for (;;) {
      const x = normalNumber(random);
      const v = (1 + x / Math.sqrt(9 * d)) ** 3;
      if (v > 0 && Math.log(1 - random()) < 0.5 * x * x + d - d * v + d * Math.log(v)) return d * v;
    }
  };
  const [x, y] = [gamma(a), gamma(b)];
  return x / (x + y);
}
