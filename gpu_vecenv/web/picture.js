// Drawings on a canvas: the shapes that `draw` returns for the state of one environment.

// An environment's state as `draw` takes it.
function drawnState(env, index = 0) {
  const state = {};
  const add = (name, dtype, shape, values) => {
    const plain = dtype === "bool" ? (value) => value !== 0 : Number;
    const kind = dtype === "bool" ? "b" : dtype.startsWith("float") ? "f" : "i";
    state[name] = new NDArray(Array.from(values, plain), shape, kind);
  };
  const row = ({ name, shape, shared }) => {
    const [array, length] = [env.state[name.replace(/^state_/, "")], product(shape)];
    return shared ? array : array.subarray(index * length, (index + 1) * length);
  };
  const field = (wanted) => env.layout.fields.find(({ name }) => name === wanted);
  add("elapsed_steps", "int32", [], row(field("engine_elapsed_steps")));
  add("active", "bool", [env.layout.num_agents], row(field("engine_active")));
  for (const one of env.layout.fields) {
    if (one.name.startsWith("state_")) add(one.name.slice("state_".length), one.dtype, one.shape, row(one));
  }
  return state;
}

const cssColour = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

// Where a drawing lies in a rectangle of the canvas: pixels a unit, and the functions of both directions.
function placed({ bounds: [left, right, bottom, top] }, [x, y, width, height]) {
  const scale = Math.min(width / (right - left), height / (top - bottom));
  const [middle, centre] = [x + width / 2, y + height / 2];
  return {
    scale,
    across: (value) => middle + (value - (left + right) / 2) * scale,
    down: (value) => centre - (value - (bottom + top) / 2) * scale,
    units: (px, py) => [(px - middle) / scale + (left + right) / 2, (centre - py) / scale + (bottom + top) / 2],
  };
}

// Draws into a rectangle [x, y, width, height] of the canvas; lines are at least `thin` pixels wide, and discs `least`.
// Lines that would be thinner than `hidden` pixels are left out.
function paint(context, drawing, rectangle, thin = 1, least = thin, hidden = 0) {
  const { scale, across, down } = placed(drawing, rectangle);
  context.save();
  context.beginPath();
  context.rect(...rectangle);
  context.clip();
  context.fillStyle = cssColour(drawing.background);
  context.fillRect(...rectangle);
  context.lineCap = context.lineJoin = "round";
  for (const shape of drawing.shapes) {
    if (shape.kind === "line" && shape.width * scale < hidden) continue;
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

// A ring around an agent's disc.
function ring(context, drawing, rectangle, agent, thin) {
  const disc = drawing.shapes.findLast((shape) => shape.kind === "circle" && shape.agent === agent);
  if (!disc) return;
  const { scale, across, down } = placed(drawing, rectangle);
  for (const [width, colour] of [
    [5, "rgb(255 255 255 / 85%)"],
    [2, "rgb(20 26 36)"],
  ]) {
    context.beginPath();
    context.arc(across(disc.x), down(disc.y), disc.radius * scale + 4 * thin, 0, 2 * Math.PI);
    context.lineWidth = width * thin;
    context.strokeStyle = colour;
    context.stroke();
  }
}
