// Policies of a page: random numbers with a seed, and draws from the distributions of networks.

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

// One policy of a run: acts for its agents.
class TrainedPolicy extends Network {
  // Takes newer weights of the same policy.
  load(content) {
    super.load(content);
    const { name, log_std, head_sizes, bounds, squash, epsilon, critic } = content;
    Object.assign(this, { name, head_sizes, bounds, squash, epsilon, log_std: log_std && float32OfBase64(log_std) });
    this.critic = new Critic(this, content, critic);
  }

  // Parameters of the distribution of one agent in `count` environments, row after row; see `outputs`.
  parameters(agent, obs, states = null, count = 1, begins = null) {
    const rows = this.outputs(agent, obs, states, count, begins);
    if (!this.log_std) return rows;
    const { length } = this.log_std;
    const both = new Float32Array(2 * count * length);
    for (let row = 0; row < count; row++) {
      both.set(rows.subarray(row * length, (row + 1) * length), 2 * row * length);
      both.set(this.log_std, (2 * row + 1) * length);
    }
    return both;
  }

  // An action for the parameters of one row: a choice of each head, or the numbers of a Box. `mask`: allowed choices, or
  // null.
  draw(parameters, mask, random, greedy = false) {
    if (this.head_sizes.length === 0) return this.#box(parameters, random, greedy);
    let start = 0;
    return this.head_sizes.map((size) => {
      const explores = this.epsilon !== null && !greedy && random() < this.epsilon; // then any choice is as likely
      let [best, most] = [0, -Infinity];
      for (let k = start; k < start + size; k++) {
        if (mask && !mask[k]) continue;
        // The argmax of logits with Gumbel noise is a sample.
        const noise = greedy || (this.epsilon !== null && !explores) ? 0 : -Math.log(-Math.log(1 - random()));
        const value = (explores ? 0 : parameters[k]) + noise;
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
