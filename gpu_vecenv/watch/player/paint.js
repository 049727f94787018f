// Drawings on a canvas, {bounds, width, height, background, shapes} as a game's `draw` returns them, in its own units;
// pictures between two drawings; dark pictures.

const FAR = 4; // what moves by more than this part of a picture in one step jumps

// Where units lie on a canvas: pixels a unit, and a point that both have.
function placement(scale, [x, y], [left, top]) {
  return {
    scale,
    across: (value) => left + (value - x) * scale,
    down: (value) => top - (value - y) * scale,
    units: (px, py) => [(px - left) / scale + x, (top - py) / scale + y],
  };
}

const middleOf = ({ bounds: [left, right, bottom, top] }) => [(left + right) / 2, (bottom + top) / 2];

// Where a drawing lies in a rectangle [x, y, width, height] of a canvas.
function placed(drawing, [x, y, width, height]) {
  const [left, right, bottom, top] = drawing.bounds;
  const scale = Math.min(width / (right - left), height / (top - bottom));
  return placement(scale, middleOf(drawing), [x + width / 2, y + height / 2]);
}

// Draws into a rectangle of the canvas; lines are at least `thin` pixels wide, and discs `least`.
// Lines that would be thinner than `hidden` pixels are left out. `below` draws what the agents cover.
function paint(context, drawing, rectangle, thin = 1, least = thin, hidden = 0, place = placed(drawing, rectangle), below = null) {
  const { scale, across, down } = place;
  context.save();
  context.beginPath();
  context.rect(...rectangle);
  context.clip();
  context.fillStyle = cssColour(drawing.background);
  context.fillRect(...rectangle);
  context.lineCap = context.lineJoin = "round";
  for (const shape of drawing.shapes) {
    if (shape.kind === "line" && shape.width * scale < hidden) continue;
    if (below && (shape.agent ?? null) !== null) {
      below();
      below = null;
    }
    context.beginPath();
    if (shape.kind === "circle") {
      context.arc(across(shape.x), down(shape.y), Math.max(shape.radius * scale, least / 2), 0, 2 * Math.PI);
    } else {
      for (const [x, y] of shape.points) context.lineTo(across(x), down(y));
    }
    if (shape.kind === "line") {
      context.strokeStyle = cssColour(shape.colour);
      context.lineWidth = Math.max(shape.width * scale, thin);
      context.stroke();
    } else {
      context.fillStyle = cssColour(shape.colour);
      context.fill();
    }
  }
  context.restore();
}

const discs = new WeakMap();

// Agent -> its disc in a drawing, the first one.
function discsOf(drawing) {
  if (!discs.has(drawing)) {
    const found = drawing.shapes.filter(({ kind, agent }) => kind === "circle" && (agent ?? null) !== null);
    discs.set(drawing, new Map(found.reverse().map((shape) => [shape.agent, shape])));
  }
  return discs.get(drawing);
}

// A ring around an agent's disc.
function ring(context, drawing, place, agent, thin) {
  const disc = discsOf(drawing).get(agent);
  if (!disc) return;
  for (const [width, colour] of [
    [5, "rgb(255 255 255 / 85%)"],
    [2, "rgb(20 26 36)"],
  ]) {
    context.beginPath();
    context.arc(place.across(disc.x), place.down(disc.y), disc.radius * place.scale + 4 * thin, 0, 2 * Math.PI);
    context.lineWidth = width * thin;
    context.strokeStyle = colour;
    context.stroke();
  }
}

const pointsOf = (shape) => (shape.kind === "circle" ? [[shape.x, shape.y]] : shape.points);
const motions = new WeakMap(); // drawing -> {before, pairs}

// A drawing between two others, `share` of the way: shown only, never simulated.
function between(before, after, share) {
  if (share >= 1 || before.bounds.join() !== after.bounds.join()) return after;
  if (motions.get(after)?.before !== before) motions.set(after, { before, pairs: moving(before, after) });
  const { pairs } = motions.get(after);
  const mixed = (from, to) => from + (to - from) * share;
  const shapes = pairs.map(([from, to]) => {
    if (from === null) return to;
    if (to.kind === "circle") {
      return { ...to, x: mixed(from.x, to.x), y: mixed(from.y, to.y), radius: mixed(from.radius, to.radius) };
    }
    return { ...to, points: to.points.map(([x, y], k) => [mixed(from.points[k][0], x), mixed(from.points[k][1], y)]) };
  });
  return { ...after, shapes };
}

// Each shape of `after` with that of `before` from which it moves, or null. Shapes are the same where their kind, agent
// and place in order are; of those without an agent only such as differ, and only where none was added or removed.
function moving(before, after) {
  const text = (shape) => `${shape.kind} ${pointsOf(shape)} ${shape.colour}`;
  const [old, fresh] = [before, after].map(({ shapes }) => new Set(shapes.map(text)));
  const groups = (shapes, others) => {
    const found = new Map();
    for (const shape of shapes) {
      if ((shape.agent ?? null) === null && others.has(text(shape))) continue;
      const key = `${shape.kind} ${shape.agent} ${pointsOf(shape).length}${(shape.agent ?? null) === null ? ` ${shape.colour}` : ""}`;
      found.set(key, [...(found.get(key) ?? []), shape]);
    }
    return found;
  };
  const [left, right, bottom, top] = after.bounds;
  const far = Math.max(right - left, top - bottom) / FAR;
  const near = (one, other) => pointsOf(one).every(([x, y], k) => Math.hypot(x - pointsOf(other)[k][0], y - pointsOf(other)[k][1]) < far);
  const sources = new Map();
  const past = groups(before.shapes, fresh);
  for (const [key, shapes] of groups(after.shapes, old)) {
    const from = past.get(key) ?? [];
    if (from.length === shapes.length) shapes.forEach((shape, k) => near(shape, from[k]) && sources.set(shape, from[k]));
  }
  return after.shapes.map((shape) => [sources.get(shape) ?? null, shape]);
}

const isGrey = (colour) => Math.max(...colour) - Math.min(...colour) < 40;

// A colour on a dark picture: greys are inverted; the white in pale colours becomes the dark background; others stay.
function darkColour(colour) {
  const white = Math.min(...colour);
  if (isGrey(colour)) return colour.map((part) => Math.round(240 - (part * 216) / 255));
  return white < 128 ? colour : colour.map((part) => Math.round(part - white + (white * 24) / 255));
}
const darkened = new WeakMap();

// The drawing for a dark page; the drawing itself where its background is dark or has a colour.
function dark(drawing) {
  const { background } = drawing;
  if (!isGrey(background) || Math.max(...background) < 128) return drawing;
  if (!darkened.has(drawing)) {
    const shapes = drawing.shapes.map((shape) => ({ ...shape, colour: darkColour(shape.colour) }));
    darkened.set(drawing, { ...drawing, background: darkColour(background), shapes });
  }
  return darkened.get(drawing);
}

// The most frequent colour of each role's discs in a drawing; colours of others where that is taken.
function roleColours(drawing, roles) {
  const taken = new Set();
  return roles.map(({ first, end }, index) => {
    const counts = new Map();
    for (let agent = first; agent < end; agent++) {
      const colour = discsOf(drawing).get(agent)?.colour.join();
      if (colour) counts.set(colour, (counts.get(colour) ?? 0) + 1);
    }
    const own = [...counts].sort((one, other) => other[1] - one[1])[0]?.[0].split(",").map(Number);
    const spare = [...FALLBACK_COLOURS.slice(index), ...FALLBACK_COLOURS];
    const colour = [own, ...spare].find((one) => one && !taken.has(one.join())) ?? spare[0];
    taken.add(colour.join());
    return colour;
  });
}

// Of Okabe and Ito's palette.
const FALLBACK_COLOURS = [
  [0, 114, 178],
  [213, 94, 0],
  [0, 158, 115],
  [204, 121, 167],
  [230, 159, 0],
  [86, 180, 233],
];
