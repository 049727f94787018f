// A film: unpacks what __init__.py packs; pictures, places, returns and events at each step.

const KEPT_PICTURES = 64;

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Reads what __init__.py packs: see _packed there.
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  floats(count) {
    const part = this.bytes.slice(this.at, (this.at += 4 * count));
    return new Float32Array(part.buffer);
  }

  flags(count) {
    const part = this.bytes.subarray(this.at, (this.at += Math.ceil(count / 8)));
    return Uint8Array.from({ length: count }, (_, i) => (part[i >> 3] >> (i & 7)) & 1);
  }

  number() {
    let value = 0;
    let factor = 1;
    let byte;
    do {
      byte = this.bytes[this.at++];
      value += (byte & 127) * factor;
      factor *= 128;
    } while (byte & 128);
    return value % 2 ? -(value + 1) / 2 : value / 2;
  }

  // Cumulative sums: numbers are stored as differences.
  sums(count) {
    let sum = 0;
    return Int32Array.from({ length: count }, () => (sum += this.number()));
  }
}

class Film {
  constructor(packed, bytes, subpixels) {
    const { title, num_steps: numSteps, fps, agents, facts, views, colours } = packed;
    Object.assign(this, { title, numSteps, fps, agents, facts, colours, subpixels });
    const reader = new Reader(bytes);
    const count = agents.length;
    const frames = numSteps + 1;
    this.rewards = reader.floats(numSteps * count); // agent-major, like all that follows
    this.active = reader.flags(frames * count);
    this.terminations = reader.flags(numSteps * count);
    this.truncations = reader.flags(numSteps * count);
    this.views = views.map(([left, right, bottom, top, width, height, background]) => ({
      bounds: [left, right, bottom, top],
      x: (left + right) / 2,
      y: (bottom + top) / 2,
      scale: Math.min(width / (right - left), height / (top - bottom)),
      width,
      height,
      background,
    }));
    this.viewOf = reader.sums(frames);
    this.layoutOf = reader.sums(frames);
    this.layouts = packed.layouts.map((length) => this.#layout(reader.sums(length), packed.tracks));
    this.#frames(reader, packed.tracks);
    this.pictures = new Map();
    let first = 0;
    this.roles = packed.roles.map(([name, number]) => ({ name, first, end: (first += number) }));
    const distinct = roleColours(this.picture(0), this.roles);
    this.roles.forEach((role, k) => (role.colour = distinct[k]));
    this.hasPlaces = this.layouts.some(({ bodies }) => bodies.size > 0);
    this.agentIndex = new Map(agents.map((name, place) => [name, place]).reverse());
  }

  // The shapes of a frame, and the offsets of their numbers.
  #layout(order, tracks) {
    let at = 0;
    const shapes = Array.from(order, (track) => {
      const [kind, points, agent] = tracks[track];
      const shape = { track, kind, points, agent, at };
      at += 2 * points + 2;
      return shape;
    });
    const bodies = new Map();
    for (const shape of shapes) {
      if (shape.agent !== null && !bodies.has(shape.agent)) bodies.set(shape.agent, shape);
    }
    return { shapes, bodies, length: at };
  }

  // The page stores numbers by track; this.frames has them by frame.
  #frames(reader, tracks) {
    this.frames = Array.from(this.layoutOf, (layout) => new Int32Array(this.layouts[layout].length));
    const rows = tracks.map(() => []); // [frame, offset] of each track
    this.layoutOf.forEach((layout, frame) => {
      for (const { track, at } of this.layouts[layout].shapes) rows[track].push([this.frames[frame], at]);
    });
    tracks.forEach(([, points], track) => {
      for (let column = 0; column < 2 * points + 2; column++) {
        const relative = column >= 2 && column < 2 * points;
        let sum = 0;
        for (const [numbers, at] of rows[track]) {
          sum += reader.number();
          numbers[at + column] = sum + (relative ? numbers[at + column - 2] : 0);
        }
      }
    });
  }

  frame(step) {
    return Math.min(step, this.numSteps);
  }

  // The drawing at a step, in the game's units.
  picture(step) {
    const frame = this.frame(step);
    let found = this.pictures.get(frame);
    if (!found) {
      if (this.pictures.size >= KEPT_PICTURES) this.pictures.delete(this.pictures.keys().next().value);
      this.pictures.set(frame, (found = this.#picture(frame)));
    }
    return found;
  }

  #picture(frame) {
    const [numbers, view] = [this.frames[frame], this.views[this.viewOf[frame]]];
    const shapes = this.layouts[this.layoutOf[frame]].shapes.map(({ kind, points, agent, at }) => {
      const size = numbers[at + 2 * points] / this.subpixels / view.scale;
      const colour = this.colours[numbers[at + 2 * points + 1]];
      const places = Array.from({ length: points }, (_, k) => this.#units(view, numbers, at + 2 * k));
      if (kind === "circle") return { kind, x: places[0][0], y: places[0][1], radius: size, colour, agent };
      return kind === "line" ? { kind, points: places, width: size, colour } : { kind, points: places, colour };
    });
    const { bounds, width, height, background } = view;
    return { bounds, width, height, background, shapes };
  }

  // A point of the picture in the game's units.
  #units(view, numbers, at) {
    const [x, y] = [numbers[at] / this.subpixels, numbers[at + 1] / this.subpixels];
    return [view.x + (x - view.width / 2) / view.scale, view.y - (y - view.height / 2) / view.scale];
  }

  // Where an agent is drawn at a step, in the game's units; null for nowhere.
  place(agent, step) {
    const frame = this.frame(step);
    const body = this.layouts[this.layoutOf[frame]].bodies.get(agent);
    return body ? this.#units(this.views[this.viewOf[frame]], this.frames[frame], body.at) : null;
  }

  // Where an agent was last drawn.
  lastPlace(agent, step) {
    for (let frame = this.frame(step); frame >= 0; frame--) {
      const found = this.place(agent, frame);
      if (found) return found;
    }
    return null;
  }

  isActive(agent, step) {
    return this.active[agent * (this.numSteps + 1) + this.frame(step)] === 1;
  }

  // Returns up to each step, mean of these agents: numSteps + 1 values. The last is that of `evaluate`.
  returns(first, end) {
    const sums = new Float64Array(this.numSteps + 1);
    for (let step = 0; step < this.numSteps; step++) {
      let sum = 0;
      for (let agent = first; agent < end; agent++) sum += this.rewards[agent * this.numSteps + step];
      sums[step + 1] = sums[step] + sum / (end - first);
    }
    return sums;
  }

  // Number of active agents among these: numSteps + 1 values.
  counts(first, end) {
    const counts = new Float64Array(this.numSteps + 1);
    for (let agent = first; agent < end; agent++) {
      for (let step = 0; step <= this.numSteps; step++) counts[step] += this.isActive(agent, step);
    }
    return counts;
  }
}

// Events of all steps of a film.
function eventsOf(film) {
  const flag = (flags, step) => (agent) => flags[agent * film.numSteps + step - 1] === 1;
  const reward = (step) => (agent) => (step > 0 ? film.rewards[agent * film.numSteps + step - 1] : 0);
  return Array.from({ length: film.numSteps }, (_, k) =>
    stepEvents(k + 1, film.agents, {
      was: (agent) => film.isActive(agent, k),
      is: (agent) => film.isActive(agent, k + 1),
      terminated: flag(film.terminations, k + 1),
      truncated: flag(film.truncations, k + 1),
      reward: reward(k + 1),
      before: reward(k),
    }),
  ).flat();
}
