// Pictures of many environments as tiles of one canvas: through WebGL as instances of discs, segments and triangles, or,
// where there is none, on the canvas itself. Both draw the shapes that `draw` returns.

const TILE_THIN = 0.7; // pixels of the screen that a line is wide at least, in a tile
const TILE_LEAST = 2.5; // and a disc
const TILE_HIDDEN = 0.3; // lines that would be thinner are left out

// Columns and rows of `count` tiles of this aspect on a canvas.
function tileGrid({ width, height }, count, aspect) {
  const columns = Math.max(1, Math.ceil(Math.sqrt((count * width) / (height * aspect))));
  const rows = Math.ceil(count / columns);
  const edge = (k, length, parts) => Math.round((k * length) / parts);
  const gap = Math.min(Math.ceil(devicePixelRatio), Math.floor(Math.min(width / columns, height / rows) / 4));
  return {
    columns,
    rows,
    gap,
    // [x, y, width, height] of a tile, in pixels of the canvas.
    rectangle(index) {
      const [column, row] = [index % columns, Math.floor(index / columns)];
      const [x, y] = [edge(column, width, columns), edge(row, height, rows)];
      return [x, y, edge(column + 1, width, columns) - x - gap, edge(row + 1, height, rows) - y - gap];
    },
    at: (x, y) => Math.floor((y * rows) / height) * columns + Math.floor((x * columns) / width),
  };
}

class CanvasTiles {
  constructor(canvas) {
    this.context = canvas.getContext("2d");
  }

  begin(grid) {
    const { width, height } = this.context.canvas;
    this.grid = grid;
    this.context.clearRect(0, 0, width, height);
  }

  paint(index, drawing) {
    const pixel = devicePixelRatio;
    paint(this.context, drawing, this.grid.rectangle(index), TILE_THIN * pixel, TILE_LEAST * pixel, TILE_HIDDEN * pixel);
  }

  flush() {}
}

const [SEGMENT, TRIANGLE, GROUND] = [1, 2, 3]; // kinds of instances; a segment of no length is a disc
const WORDS = 7; // of 4 bytes, of an instance: three points, or two and a radius; colour and kind
const VERTEX_SHADER = `#version 300 es
uniform vec2 canvas;
uniform vec2 tiles;
uniform float gap;
uniform int capacity;
layout(location = 0) in vec4 ab;
layout(location = 1) in vec2 c;
layout(location = 2) in vec4 colour;
out vec2 place;
flat out vec4 segment;
flat out vec4 tile;
flat out vec4 tint;
flat out float radius;
void main() {
  int kind = int(colour.a * 255.0 + 0.5);
  vec2 cell = vec2((gl_InstanceID / capacity) % int(tiles.x), (gl_InstanceID / capacity) / int(tiles.x));
  vec2 corner = floor(cell * canvas / tiles + 0.5);
  vec2 size = floor((cell + 1.0) * canvas / tiles + 0.5) - gap - corner;
  vec2 unit = vec2(gl_VertexID & 1, gl_VertexID >> 1);
  segment = ab;
  tile = vec4(size, 0.0, 0.0);
  tint = vec4(colour.rgb, 1.0);
  radius = kind == ${SEGMENT} ? c.x : -1.0;
  if (kind == ${SEGMENT}) {
    vec2 along = ab.zw - ab.xy;
    along = dot(along, along) > 0.0 ? normalize(along) : vec2(1.0, 0.0);
    vec2 across = vec2(-along.y, along.x);
    place = mix(ab.xy - along * (c.x + 1.0), ab.zw + along * (c.x + 1.0), unit.x) + across * (c.x + 1.0) * (2.0 * unit.y - 1.0);
  } else if (kind == ${TRIANGLE}) {
    place = gl_VertexID == 0 ? ab.xy : gl_VertexID == 1 ? ab.zw : c;
  } else {
    place = unit * size;
  }
  vec2 at = (corner + place) / canvas * 2.0 - 1.0;
  gl_Position = kind == 0 ? vec4(2.0, 2.0, 2.0, 1.0) : vec4(at.x, -at.y, 0.0, 1.0);
}`;
const FRAGMENT_SHADER = `#version 300 es
precision highp float;
in vec2 place;
flat in vec4 segment;
flat in vec4 tile;
flat in vec4 tint;
flat in float radius;
out vec4 colour;
void main() {
  if (any(lessThan(place, vec2(0.0))) || any(greaterThan(place, tile.xy))) discard;
  float shown = 1.0;
  if (radius >= 0.0) {
    vec2 along = segment.zw - segment.xy;
    float share = clamp(dot(place - segment.xy, along) / max(dot(along, along), 1e-9), 0.0, 1.0);
    shown = clamp(radius + 0.5 - distance(place, segment.xy + share * along), 0.0, 1.0);
  }
  colour = vec4(tint.rgb, shown);
}`;

class WebGLTiles {
  // Null where there is no WebGL 2, or one that the browser computes without a GPU, slower than the other canvas.
  static on(canvas) {
    const gl = document.createElement("canvas").getContext("webgl2");
    const named = gl?.getExtension("WEBGL_debug_renderer_info");
    const name = named ? gl.getParameter(named.UNMASKED_RENDERER_WEBGL) : "";
    gl?.getExtension("WEBGL_lose_context")?.loseContext();
    if (gl === null || /swiftshader|llvmpipe|software|basic render/i.test(name)) return null;
    return new WebGLTiles(canvas.getContext("webgl2", { antialias: true }));
  }

  constructor(gl) {
    Object.assign(this, { gl, cuts: [], capacity: 0 });
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX_SHADER], [gl.FRAGMENT_SHADER, FRAGMENT_SHADER]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) throw new Error(gl.getProgramInfoLog(program));
    gl.useProgram(program);
    this.uniforms = Object.fromEntries(["canvas", "tiles", "gap", "capacity"].map((name) => [name, gl.getUniformLocation(program, name)]));
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
    for (const [place, count, kind, offset] of [[0, 4, gl.FLOAT, 0], [1, 2, gl.FLOAT, 16], [2, 4, gl.UNSIGNED_BYTE, 24]]) {
      gl.enableVertexAttribArray(place);
      gl.vertexAttribPointer(place, count, kind, kind === gl.UNSIGNED_BYTE, 4 * WORDS, offset);
      gl.vertexAttribDivisor(place, 1);
    }
    gl.enable(gl.BLEND);
    gl.blendFuncSeparate(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA, gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  begin(grid, count) {
    const { gl, uniforms } = this;
    Object.assign(this, { grid, count });
    const { width, height } = gl.canvas;
    gl.viewport(0, 0, width, height);
    gl.uniform2f(uniforms.canvas, width, height);
    gl.uniform2f(uniforms.tiles, grid.columns, grid.rows);
    gl.uniform1f(uniforms.gap, grid.gap);
    this.capacity = 0;
    this.#grow(8);
  }

  // Room for so many instances of each tile.
  #grow(capacity) {
    const [before, row] = [this.numbers, WORDS * this.capacity];
    this.numbers = new Float32Array(this.count * capacity * WORDS);
    for (let k = 0; row > 0 && k < this.count; k++) this.numbers.set(before.subarray(k * row, (k + 1) * row), k * capacity * WORDS);
    this.words = new Uint32Array(this.numbers.buffer);
    this.capacity = capacity;
    this.changed = null; // all of it
    this.gl.uniform1i(this.uniforms.capacity, capacity);
  }

  paint(index, drawing) {
    const pixel = devicePixelRatio;
    const [, , width, height] = this.grid.rectangle(index);
    const { scale, across, down } = placed(drawing, [0, 0, width, height]);
    let at = index * this.capacity;
    const end = at + this.capacity;
    const parts = ({ kind, points }) => (kind === "circle" ? 1 : points.length - (kind === "line" ? 1 : 2));
    const missing = 1 + drawing.shapes.reduce((sum, shape) => sum + parts(shape), 0) - this.capacity;
    if (missing > 0) {
      this.#grow(this.capacity + missing + (this.capacity >> 3));
      this.paint(index, drawing);
      return;
    }
    const add = (kind, [red, green, blue], ax, ay, bx, by, cx, cy) => {
      const start = at * WORDS;
      at += 1;
      this.numbers[start] = ax;
      this.numbers[start + 1] = ay;
      this.numbers[start + 2] = bx;
      this.numbers[start + 3] = by;
      this.numbers[start + 4] = cx;
      this.numbers[start + 5] = cy;
      this.words[start + 6] = red | (green << 8) | (blue << 16) | (kind << 24);
    };
    add(GROUND, drawing.background, 0, 0, 0, 0, 0, 0);
    for (const shape of drawing.shapes) {
      const { kind, colour } = shape;
      if (kind === "circle") {
        const [x, y] = [across(shape.x), down(shape.y)];
        add(SEGMENT, colour, x, y, x, y, Math.max(shape.radius * scale, (TILE_LEAST * pixel) / 2), 0);
        continue;
      }
      if (kind === "line" && shape.width * scale < TILE_HIDDEN * pixel) continue;
      const points = shape.points.map(([x, y]) => [across(x), down(y)]);
      if (kind === "line") {
        const half = Math.max(shape.width * scale, TILE_THIN * pixel) / 2;
        for (let k = 1; k < points.length; k++) add(SEGMENT, colour, ...points[k - 1], ...points[k], half, 0);
      } else for (const [a, b, c] of this.#triangles(shape.points)) add(TRIANGLE, colour, ...points[a], ...points[b], ...points[c]);
    }
    this.words.fill(0, at * WORDS, end * WORDS);
    if (this.changed) this.changed = [Math.min(this.changed[0], index), Math.max(this.changed[1], index + 1)];
  }

  // Triangles of a polygon; those of long ones, which rarely change, are kept.
  #triangles(points) {
    if (points.length <= 4) return triangles(points);
    const known = this.cuts.find(({ of }) => of.length === points.length && of.every(([x, y], k) => x === points[k][0] && y === points[k][1]));
    if (known) return known.cut;
    const cut = triangles(points);
    this.cuts = [{ of: points, cut }, ...this.cuts].slice(0, 8);
    return cut;
  }

  // Shows what was painted.
  flush() {
    const { gl, capacity } = this;
    if (this.changed === null) gl.bufferData(gl.ARRAY_BUFFER, this.numbers, gl.DYNAMIC_DRAW);
    else {
      const [first, end] = this.changed.map((index) => index * capacity * WORDS);
      if (end > first) gl.bufferSubData(gl.ARRAY_BUFFER, 4 * first, this.numbers, first, end - first);
    }
    this.changed = [this.count, 0];
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, 4, this.count * capacity);
  }
}

// Indices of the corners of the triangles that a simple polygon consists of: ears are cut off, one after the other.
function triangles(points) {
  const left = ([ax, ay], [bx, by], [cx, cy]) => (bx - ax) * (cy - ay) - (by - ay) * (cx - ax);
  let area = 0;
  for (let k = 0; k < points.length; k++) area += left([0, 0], points[k], points[(k + 1) % points.length]);
  const sign = Math.sign(area);
  const rest = points.map((_, k) => k);
  const found = [];
  while (rest.length > 3) {
    const ear = rest.findIndex((b, k) => {
      const [a, c] = [rest.at(k - 1), rest[(k + 1) % rest.length]];
      const [p, q, r] = [points[a], points[b], points[c]];
      if (sign * left(p, q, r) < 0) return false;
      return !rest.some((other) => other !== a && other !== b && other !== c && [[p, q], [q, r], [r, p]].every(([one, two]) => sign * left(one, two, points[other]) > 0));
    });
    const k = ear < 0 ? 0 : ear; // a polygon that crosses itself has none
    found.push([rest.at(k - 1), rest[k], rest[(k + 1) % rest.length]]);
    rest.splice(k, 1);
  }
  if (rest.length === 3) found.push(rest);
  return found;
}
