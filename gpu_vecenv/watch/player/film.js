// A film: unpacks what __init__.py packs; shapes, positions, returns and events at each step.

const NAMED = 3; // agents named in the text of one event
const FALLBACK_COLOURS = [
  [47, 111, 208],
  [208, 96, 40],
  [40, 150, 96],
  [142, 84, 190],
  [180, 140, 20],
  [20, 150, 170],
];

const rgb = (colour) => `rgb(${colour.join(" ")})`;

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
    this.#positions(count);
    let first = 0;
    this.roles = packed.roles.map(([name, number], index) => {
      const role = { name, first, end: (first += number) };
      return { ...role, colour: this.#colour(role) ?? FALLBACK_COLOURS[index % FALLBACK_COLOURS.length] };
    });
    this.#makeColoursDistinct();
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

  // Positions of the agents' bodies in the game's units; NaN for an agent without one.
  #positions(count) {
    this.positions = new Float64Array(2 * count * (this.numSteps + 1)).fill(NaN);
    this.frames.forEach((numbers, frame) => {
      for (const [agent, { at }] of this.layouts[this.layoutOf[frame]].bodies) {
        const place = this.units(
          this.views[this.viewOf[frame]],
          numbers[at] / this.subpixels,
          numbers[at + 1] / this.subpixels,
        );
        this.positions.set(place, 2 * (frame * count + agent));
      }
    });
    this.hasPositions = this.positions.some((number) => !Number.isNaN(number));
  }

  // The most frequent colour of a role's bodies.
  #colour(role) {
    const counts = new Map();
    for (const [agent, { at, points }] of this.layouts[this.layoutOf[0]].bodies) {
      const colour = this.frames[0][at + 2 * points + 1];
      if (agent >= role.first && agent < role.end) counts.set(colour, (counts.get(colour) ?? 0) + 1);
    }
    const [most] = [...counts].sort((one, other) => other[1] - one[1]);
    return most && this.colours[most[0]];
  }

  // Assign distinct colours to roles, for the plots.
  #makeColoursDistinct() {
    const taken = new Set();
    for (const role of this.roles) {
      const free = [role.colour, ...FALLBACK_COLOURS].find((colour) => !taken.has(rgb(colour)));
      role.colour = free ?? role.colour;
      taken.add(rgb(role.colour));
    }
  }

  frame(step) {
    return Math.min(step, this.numSteps);
  }

  view(step) {
    return this.views[this.viewOf[this.frame(step)]];
  }

  layout(step) {
    return this.layouts[this.layoutOf[this.frame(step)]];
  }

  // From pixels of the picture to the game's units.
  units(view, x, y) {
    return [view.x + (x - view.width / 2) / view.scale, view.y - (y - view.height / 2) / view.scale];
  }

  // From the game's units to pixels of the picture.
  pixels(view, x, y) {
    return [view.width / 2 + (x - view.x) * view.scale, view.height / 2 - (y - view.y) * view.scale];
  }

  // The shapes at a step, in pixels of the picture: {kind, positions: [x, y, …], size, colour, agent}.
  *shapes(step) {
    const numbers = this.frames[this.frame(step)];
    for (const { kind, points, agent, at } of this.layout(step).shapes) {
      const positions = Array.from(numbers.subarray(at, at + 2 * points), (number) => number / this.subpixels);
      const size = numbers[at + 2 * points] / this.subpixels;
      const colour = this.colours[numbers[at + 2 * points + 1]];
      yield { kind, positions, size, colour, agent };
    }
  }

  // The last known position of an agent, in the game's units.
  lastPosition(agent, step) {
    for (let frame = this.frame(step); frame >= 0; frame--) {
      const at = 2 * (frame * this.agents.length + agent);
      if (!Number.isNaN(this.positions[at])) return [this.positions[at], this.positions[at + 1]];
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

// "a, b, c and 7 more"
function joinNames(film, agents) {
  const names = agents.slice(0, NAMED).map((agent) => film.agents[agent]);
  const more = agents.length - names.length;
  if (more) return `${names.join(", ")} and ${more} more`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
}

// Agents that left or returned, and the end of the episode: {step, agents, text}.
function eventsOf(film) {
  const events = [];
  const count = film.agents.length;
  for (let step = 1; step <= film.numSteps; step++) {
    const left = [];
    const cut = [];
    const back = [];
    let before = 0;
    for (let agent = 0; agent < count; agent++) {
      const flag = agent * film.numSteps + step - 1;
      const was = film.isActive(agent, step - 1);
      const is = film.isActive(agent, step);
      before += was;
      if (!was && is) back.push(agent);
      else if (was && film.terminations[flag]) left.push(agent);
      else if (was && film.truncations[flag]) cut.push(agent);
      else if (was && !is) left.push(agent);
    }
    const add = (agents, text) => events.push({ step, agents, text });
    if (before && left.length + cut.length === before && !back.length) {
      const how = [left.length && "terminated", cut.length && "truncated"].filter(Boolean);
      const each = how.length > 1 ? `${left.length} terminated, ${cut.length} truncated` : how[0];
      add(
        [...left, ...cut],
        before > 1 ? `the episode ended: ${each} (${before} agents)` : `the episode ended: ${each}`,
      );
    } else {
      if (left.length) add(left, `${joinNames(film, left)} left`);
      if (cut.length) add(cut, `${joinNames(film, cut)} left: truncated`);
    }
    if (back.length) add(back, `${joinNames(film, back)} returned`);
  }
  return events;
}
