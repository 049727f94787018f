// What the translated `draw` of a game calls: arrays as NumPy has them, Python's operators and functions, shapes.
// Numbers are doubles; an array's kind is "b" (bool), "i" (int) or "f" (float).

class NDArray {
  constructor(data, shape, kind) {
    Object.assign(this, { data, shape, kind });
  }

  *[Symbol.iterator]() {
    for (let k = 0; k < this.shape[0]; k++) yield py.get(this, k);
  }
}

class Slice {
  constructor(start, stop, step) {
    Object.assign(this, { start, stop, step: step ?? 1 });
  }

  // The indices of an axis of this length.
  indices(length) {
    const { step } = this;
    const place = (value, missing) => {
      if (value === null) return missing;
      const from = py.float(value) < 0 ? py.float(value) + length : py.float(value);
      return step > 0 ? Math.min(Math.max(from, 0), length) : Math.min(Math.max(from, -1), length - 1);
    };
    const found = [];
    const stop = place(this.stop, step > 0 ? length : -1);
    for (let k = place(this.start, step > 0 ? 0 : length - 1); step > 0 ? k < stop : k > stop; k += step) found.push(k);
    return found;
  }
}

const size = (shape) => shape.reduce((all, length) => all * length, 1);
const kindOf = (value) => (typeof value === "boolean" ? "b" : Number.isInteger(value) ? "i" : "f");
const wider = (...kinds) => ["f", "i", "b"].find((kind) => kinds.includes(kind)) ?? "f";
const isScalar = (value) => typeof value === "number" || typeof value === "boolean";
const isArray = (value) => value instanceof NDArray;

function asarray(value, kind = null) {
  if (isArray(value)) return kind === null ? value : new NDArray(value.data, value.shape, kind);
  if (isScalar(value)) return new NDArray([value], [], kind ?? kindOf(value));
  const rows = [...value].map((row) => asarray(row));
  const shape = rows.length > 0 ? rows[0].shape : [];
  if (rows.some((row) => row.shape.join() !== shape.join())) throw new Error("rows of an array have different shapes");
  const data = rows.flatMap((row) => row.data);
  return new NDArray(data, [rows.length, ...shape], kind ?? wider(...rows.map((row) => row.kind)));
}

// A 0-dimensional result is a number, as NumPy's scalars are to those who use them.
const result = (data, shape, kind) => (shape.length === 0 ? data[0] : new NDArray(data, shape, kind));

function broadcastShape(one, other) {
  const length = Math.max(one.length, other.length);
  return Array.from({ length }, (_, k) => {
    const [a, b] = [one, other].map((shape) => shape[shape.length - length + k] ?? 1);
    if (a !== b && a !== 1 && b !== 1) throw new Error(`shapes (${one}) and (${other}) do not broadcast`);
    return a === 1 ? b : a;
  });
}

function broadcastTo(array, shape) {
  if (array.shape.join() === shape.join()) return array.data;
  const missing = shape.length - array.shape.length;
  const data = new Array(size(shape));
  for (let k = 0; k < data.length; k++) {
    let [rest, from, stride] = [k, 0, 1];
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      const index = rest % shape[axis];
      rest = (rest - index) / shape[axis];
      const own = axis < missing ? 1 : array.shape[axis - missing];
      if (own > 1) from += index * stride;
      stride *= own;
    }
    data[k] = array.data[from];
  }
  return data;
}

function elementwise(f, kind = null) {
  return (one, other) => {
    if (isScalar(one) && isScalar(other)) return f(one, other);
    const [a, b] = [asarray(one), asarray(other)];
    const shape = broadcastShape(a.shape, b.shape);
    const [x, y] = [broadcastTo(a, shape), broadcastTo(b, shape)];
    return result(x.map((value, k) => f(value, y[k])), shape, kind ?? wider("i", a.kind, b.kind));
  };
}

function mapped(f, kind = null) {
  return (value) => {
    if (isScalar(value)) return f(value);
    const array = asarray(value);
    return result(array.data.map(f), array.shape, kind ?? array.kind);
  };
}

// Over one axis, or all: `f` gets the list of the values that are reduced.
function reduction(f, kind = null) {
  return (value, axis = null) => {
    const array = asarray(value);
    if (axis === null) return f(array.data);
    const at = axis < 0 ? axis + array.shape.length : axis;
    const [outer, length, inner] = [size(array.shape.slice(0, at)), array.shape[at], size(array.shape.slice(at + 1))];
    const data = Array.from({ length: outer * inner }, (_, k) => {
      const start = Math.floor(k / inner) * length * inner + (k % inner);
      return f(Array.from({ length }, (_, j) => array.data[start + j * inner]));
    });
    return result(data, array.shape.filter((_, k) => k !== at), kind ?? array.kind);
  };
}

const sum = (values) => values.reduce((all, value) => all + Number(value), 0);
const floorMod = (a, b) => a - b * Math.floor(a / b);
function roundHalfEven(value) {
  const low = Math.floor(value);
  const rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
}

function nonzero(array) {
  const found = array.shape.map(() => []);
  array.data.forEach((value, k) => {
    if (!value) return;
    let rest = k;
    for (let axis = array.shape.length - 1; axis >= 0; axis--) {
      found[axis].push(rest % array.shape[axis]);
      rest = Math.floor(rest / array.shape[axis]);
    }
  });
  return found.map((places) => new NDArray(places, [places.length], "i"));
}

// Elements of an array by indices of its axes: numbers, slices, null (a new axis), lists, arrays of ints or bools.
function select(array, given) {
  const indices = [];
  for (const index of given) {
    if (isArray(index) && index.kind === "b" && index.shape.length > 0) indices.push(...nonzero(index));
    else if (isArray(index) && index.shape.length === 0) indices.push(index.data[0]);
    else if (Array.isArray(index)) {
      const listed = asarray(index, index.length === 0 ? "i" : null);
      indices.push(...(listed.kind === "b" ? nonzero(listed) : [listed]));
    } else indices.push(index);
  }
  const covered = indices.filter((index) => index !== null).length;
  for (let k = covered; k < array.shape.length; k++) indices.push(new Slice(null, null, null));
  const lists = indices.filter(isArray);
  const together = lists.reduce((shape, list) => broadcastShape(shape, list.shape), []);
  const spread = lists.map((list) => broadcastTo(list, together));
  const inside = (index, length) => {
    const place = index < 0 ? index + length : index;
    if (!(place >= 0 && place < length)) throw new RangeError(`index ${index} is out of bounds of an axis of ${length}`);
    return place;
  };
  // Offsets of the elements, axis after axis; lists contribute together, at the first one's place.
  let [offsets, shape, axis, listed] = [[0], [], 0, 0];
  const stride = (at) => size(array.shape.slice(at + 1));
  const extend = (more) => (offsets = offsets.flatMap((offset) => more.map((other) => offset + other)));
  for (const index of indices) {
    if (index === null) {
      shape.push(1);
      continue;
    }
    const length = array.shape[axis];
    if (index instanceof Slice) {
      const places = index.indices(length);
      extend(places.map((place) => place * stride(axis)));
      shape.push(places.length);
    } else if (isArray(index)) {
      if (listed++ === 0) {
        let all = spread[0].map(() => 0);
        let at = axis;
        for (const [k, other] of indices.entries()) {
          if (k < indices.indexOf(index) || !isArray(other)) continue;
          const own = at + k - indices.indexOf(index);
          const values = spread[lists.indexOf(other)];
          all = all.map((offset, j) => offset + inside(values[j], array.shape[own]) * stride(own));
        }
        extend(all);
        shape.push(...together);
      }
    } else {
      const place = inside(Number(index), length) * stride(axis);
      offsets = offsets.map((offset) => offset + place);
    }
    axis++;
  }
  return result(offsets.map((offset) => array.data[offset]), shape, array.kind);
}

const numpy = {
  pi: Math.PI,
  inf: Infinity,
  newaxis: null,
  float64: "f",
  float32: "f",
  int64: "i",
  int32: "i",
  bool_: "b",
  ndarray: NDArray,
  asarray: (value, dtype) => asarray(value, py.kind(dtype)),
  array: (value, dtype) => asarray(value, py.kind(dtype)),
  arange(start, stop, step = 1) {
    return asarray([...py.range(...(stop === undefined ? [0, start] : [start, stop]), step)], null);
  },
  linspace(start, stop, count = 50) {
    return asarray(Array.from({ length: count }, (_, k) => (k === count - 1 ? stop : start + (k * (stop - start)) / (count - 1))), "f");
  },
  full(shape, value) {
    const sizes = isScalar(shape) ? [shape] : [...shape];
    return new NDArray(new Array(size(sizes)).fill(value), sizes, kindOf(value));
  },
  zeros: (shape, dtype) => numpy.asarray(numpy.full(shape, 0), dtype ?? "f"),
  ones: (shape, dtype) => numpy.asarray(numpy.full(shape, 1), dtype ?? "f"),
  concatenate(arrays, axis = 0) {
    const all = [...arrays].map((array) => asarray(array));
    const shape = [...all[0].shape];
    const at = axis < 0 ? axis + shape.length : axis;
    shape[at] = sum(all.map((array) => array.shape[at]));
    const rows = size(shape.slice(0, at));
    const data = Array.from({ length: rows }, (_, row) =>
      all.flatMap(({ data: own }) => own.slice((row * own.length) / rows, ((row + 1) * own.length) / rows)),
    ).flat();
    return new NDArray(data, shape, wider(...all.map(({ kind }) => kind)));
  },
  stack(arrays, axis = 0) {
    const all = [...arrays].map((array) => asarray(array));
    const at = axis < 0 ? axis + all[0].shape.length + 1 : axis;
    const open = ({ data, shape, kind }) => new NDArray(data, [...shape.slice(0, at), 1, ...shape.slice(at)], kind);
    return numpy.concatenate(all.map(open), at);
  },
  split(array, places, axis = 0) {
    if (axis !== 0) throw new Error("split: axis is not 0");
    const length = asarray(array).shape[0];
    const whole = isScalar(places) ? Array.from({ length: places - 1 }, (_, k) => ((k + 1) * length) / places) : [...places];
    const ends = [...whole, length];
    return ends.map((end, k) => py.get(asarray(array), new Slice(k === 0 ? 0 : ends[k - 1], end, 1)));
  },
  diff(array) {
    const { data, kind } = asarray(array);
    return asarray(data.slice(1).map((value, k) => value - data[k]), kind);
  },
  nonzero: (array) => nonzero(asarray(array)),
  flatnonzero: (array) => nonzero(numpy.ravel(array))[0],
  argwhere: (array) => numpy.stack(nonzero(asarray(array)), 1),
  ravel(array) {
    const { data, kind } = asarray(array);
    return new NDArray(data, [data.length], kind);
  },
  argsort(array) {
    const { data } = asarray(array);
    return asarray(data.map((_, k) => k).sort((a, b) => data[a] - data[b] || a - b), "i");
  },
  where(condition, one, other) {
    const chosen = elementwise((is, k) => is && k)(condition, 1);
    const values = [asarray(one), asarray(other)];
    const shape = broadcastShape(broadcastShape(asarray(chosen).shape, values[0].shape), values[1].shape);
    const [is, x, y] = [asarray(chosen), ...values].map((array) => broadcastTo(array, shape));
    return result(is.map((chosen, k) => (chosen ? x[k] : y[k])), shape, wider(values[0].kind, values[1].kind));
  },
  ndindex(...given) {
    const shape = given.flat();
    return Array.from({ length: size(shape) }, (_, k) =>
      py.tuple_of(...shape.map((length, axis) => Math.floor(k / size(shape.slice(axis + 1))) % length)),
    );
  },
  minimum: elementwise(Math.min),
  maximum: elementwise(Math.max),
  hypot: elementwise(Math.hypot, "f"),
  arctan2: elementwise(Math.atan2, "f"),
  clip: (value, low, high) => numpy.minimum(numpy.maximum(value, low), high),
  sum: reduction(sum),
  mean: reduction((values) => sum(values) / values.length, "f"),
  min: reduction((values) => Math.min(...values)),
  max: reduction((values) => Math.max(...values)),
  any: reduction((values) => values.some(Boolean), "b"),
  all: reduction((values) => values.every(Boolean), "b"),
  argmin: reduction((values) => values.indexOf(Math.min(...values)), "i"),
  argmax: reduction((values) => values.indexOf(Math.max(...values)), "i"),
};
for (const [name, own] of Object.entries({ arcsin: "asin", arccos: "acos", arctan: "atan" })) numpy[name] = mapped(Math[own], "f");
for (const name of ["sin", "cos", "tan", "sqrt", "exp", "log", "floor", "ceil", "tanh"]) numpy[name] = mapped(Math[name], "f");
numpy.absolute = mapped(Math.abs);
numpy.sign = mapped(Math.sign);

const math = { pi: Math.PI, tau: 2 * Math.PI, inf: Infinity, fabs: Math.abs };
for (const name of "sin cos tan asin acos atan atan2 sqrt hypot exp log floor ceil tanh".split(" ")) {
  math[name] = (...values) => Math[name](...values.map((value) => py.float(value)));
}

const TUPLES = new Map();
const METHODS = "sum mean min max any all argmin argmax clip nonzero ravel argsort".split(" ");

const py = {
  add: (a, b) => (Array.isArray(a) && Array.isArray(b) ? [...a, ...b] : elementwise((x, y) => x + y)(a, b)),
  // += extends a list in place.
  add_in_place(a, b) {
    if (!Array.isArray(a) || a.isTuple) return py.add(a, b);
    for (const value of py.iterate(b)) a.push(value);
    return a;
  },
  multiply(a, b) {
    if (Array.isArray(b) && isScalar(a)) return py.multiply(b, a);
    return Array.isArray(a) && isScalar(b) ? Array.from({ length: b }, () => a).flat() : elementwise((x, y) => x * y)(a, b);
  },
  subtract: elementwise((x, y) => x - y),
  divide: elementwise((x, y) => x / y, "f"),
  floor_divide: elementwise((x, y) => Math.floor(x / y)),
  remainder: elementwise(floorMod),
  power: elementwise((x, y) => x ** y),
  left_shift: elementwise((x, y) => x * 2 ** y),
  right_shift: elementwise((x, y) => Math.floor(x / 2 ** y)),
  bitwise_and: elementwise((x, y) => (typeof x === "boolean" ? x && y : x & y)),
  bitwise_or: elementwise((x, y) => (typeof x === "boolean" ? x || y : x | y)),
  bitwise_xor: elementwise((x, y) => (typeof x === "boolean" ? x !== y : x ^ y)),
  matmul(one, other) {
    const [a, b] = [asarray(one), asarray(other)];
    const inner = a.shape.at(-1);
    const columns = b.shape.length > 1 ? b.shape[1] : 1;
    const rows = a.data.length / inner;
    const data = Array.from({ length: rows * columns }, (_, k) =>
      sum(Array.from({ length: inner }, (_, j) => a.data[Math.floor(k / columns) * inner + j] * b.data[j * columns + (k % columns)])),
    );
    return result(data, [...a.shape.slice(0, -1), ...b.shape.slice(1)], "f");
  },
  equal: (a, b) => (isArray(a) || isArray(b) ? elementwise((x, y) => Number(x) === Number(y), "b")(a, b) : py.same(a, b)),
  not_equal: (a, b) => (isArray(a) || isArray(b) ? elementwise((x, y) => Number(x) !== Number(y), "b")(a, b) : !py.same(a, b)),
  less: elementwise((x, y) => x < y, "b"),
  less_equal: elementwise((x, y) => x <= y, "b"),
  greater: elementwise((x, y) => x > y, "b"),
  greater_equal: elementwise((x, y) => x >= y, "b"),
  contains: (container, value) => (container instanceof Map || container instanceof Set ? container.has(py.key(value)) : [...container].some((other) => py.same(other, value))),
  negative: mapped((x) => -x),
  invert: mapped((x) => (typeof x === "boolean" ? !x : ~x)),
  not: (value) => !py.truth(value),
  and(value, other) {
    return py.truth(value) ? other() : value;
  },
  or(value, other) {
    return py.truth(value) ? value : other();
  },
  // Equality of plain values: 1 == True, lists element by element.
  same(a, b) {
    if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((value, k) => py.same(value, b[k]));
    return isScalar(a) && isScalar(b) ? Number(a) === Number(b) : a === b;
  },
  truth(value) {
    if (isArray(value)) {
      if (value.data.length !== 1) throw new Error("the truth value of an array is ambiguous; use any() or all()");
      return Boolean(value.data[0]);
    }
    if (value instanceof Map || value instanceof Set) return value.size > 0;
    return Array.isArray(value) ? value.length > 0 : Boolean(value);
  },
  iterate: (value) => (value instanceof Map ? value.keys() : value),
  slice: (start, stop, step) => new Slice(start, stop, step),
  get(container, index) {
    if (isArray(container)) return select(container, Array.isArray(index) && index.isTuple ? index : [index]);
    if (container instanceof Map) return container.get(py.key(index));
    if (index instanceof Slice) {
      const taken = index.indices(container.length).map((k) => container[k]);
      return typeof container === "string" ? taken.join("") : taken;
    }
    if (!Array.isArray(container) && typeof container !== "string") return container[index];
    const place = py.int(index);
    if (place >= container.length || place < -container.length) throw new RangeError(`index ${place} of a list of ${container.length}`);
    return container[place < 0 ? place + container.length : place];
  },
  set(container, index, value) {
    if (container instanceof Map) container.set(py.key(index), value);
    else if (!isArray(container)) container[py.int(index) < 0 ? py.int(index) + container.length : py.int(index)] = value;
    else {
      const all = new NDArray(container.data.map((_, k) => k), container.shape, "i");
      const places = asarray(py.get(all, index));
      const values = broadcastTo(asarray(value), places.shape);
      places.data.forEach((place, k) => (container.data[place] = values[k]));
    }
  },
  tuple_of: (...values) => Object.assign(values, { isTuple: true }), // a tuple selects by several axes, a list by one
  attribute(value, name) {
    if (isScalar(value)) return py.attribute(asarray(value), name);
    if (!isArray(value)) return value[name];
    if (name === "size") return value.data.length;
    if (name === "ndim") return value.shape.length;
    if (name !== "T") return value[name];
    if (value.shape.length < 2) return value;
    const [rows, columns] = value.shape;
    return new NDArray(value.data.map((_, k) => value.data[(k % rows) * columns + Math.floor(k / rows)]), [columns, rows], value.kind);
  },
  // A method of an array, a number as NumPy has it, a list, a dict or a str.
  call(value, name, ...values) {
    if (isArray(value) || isScalar(value)) {
      if (METHODS.includes(name)) return numpy[name](value, ...values);
      const array = asarray(value);
      const { data, shape, kind } = array;
      if (name === "item") return data[values[0] ?? 0];
      if (name === "copy") return result([...data], shape, kind);
      if (name === "flatten") return numpy.ravel(value);
      if (name === "astype") {
        const as = py.kind(values[0]);
        const cast = { b: Boolean, i: Math.trunc, f: Number }[as];
        return result(data.map((x) => cast(x)), shape, as);
      }
      if (name === "tolist") return shape.length === 0 ? data[0] : [...array].map((row) => (isArray(row) ? py.call(row, "tolist") : row));
      if (name === "reshape") {
        const sizes = values.flat();
        const known = size(sizes.filter((length) => length >= 0));
        return new NDArray(data, sizes.map((length) => (length < 0 ? data.length / known : length)), kind);
      }
    } else if (Array.isArray(value)) {
      if (name === "append") return void value.push(values[0]);
      if (name === "extend") return void value.push(...py.iterate(values[0]));
      if (name === "index") return value.findIndex((other) => py.same(other, values[0]));
      if (name === "count") return value.filter((other) => py.same(other, values[0])).length;
      if (name === "pop") return values.length > 0 ? value.splice(values[0], 1)[0] : value.pop();
    } else if (value instanceof Map) {
      if (name === "get") return value.get(py.key(values[0])) ?? values[1] ?? null;
      if (name === "items") return [...value];
      if (name === "keys") return [...value.keys()];
      if (name === "values") return [...value.values()];
    } else if (value instanceof Set && name === "add") return void value.add(values[0]);
    throw new Error(`no method ${name} of ${value}`);
  },
  kind(dtype) {
    if (dtype === undefined || dtype === null || typeof dtype === "string") return dtype ?? null;
    return { [py.float]: "f", [py.int]: "i", [py.bool]: "b" }[dtype];
  },
  float: (value) => Number(isArray(value) ? value.data[0] : value),
  int: (value) => Math.trunc(py.float(value)),
  bool: (value) => py.truth(value),
  abs: (value) => numpy.absolute(value),
  round(value, digits = 0) {
    const scale = 10 ** digits;
    return roundHalfEven(py.float(value) * scale) / scale;
  },
  len: (value) => (isArray(value) ? value.shape[0] : value.size ?? value.length),
  *range(start, stop, step = 1) {
    const [first, end] = stop === undefined ? [0, start] : [start, stop];
    for (let k = first; step > 0 ? k < end : k > end; k += step) yield k;
  },
  *zip(...all) {
    const iterators = all.map((each) => py.iterate(each)[Symbol.iterator]());
    if (iterators.length === 0) return;
    for (;;) {
      const next = iterators.map((iterator) => iterator.next());
      if (next.some(({ done }) => done)) return;
      yield py.tuple_of(...next.map(({ value }) => value));
    }
  },
  *enumerate(values, start = 0) {
    let k = start;
    for (const value of py.iterate(values)) yield [k++, value];
  },
  *map(f, ...all) {
    for (const values of py.zip(...all)) yield f(...values);
  },
  list: (values = []) => [...py.iterate(values)],
  tuple: (values = []) => py.tuple_of(...py.iterate(values)),
  set_of: (values = []) => new Set(py.iterate(values)),
  dict: (values = []) => new Map([...values].map(([key, value]) => [py.key(key), value])),
  // Equal tuples are one key.
  key(value) {
    if (!Array.isArray(value)) return value;
    const text = JSON.stringify(value);
    if (!TUPLES.has(text)) TUPLES.set(text, value);
    return TUPLES.get(text);
  },
  pairwise(values) {
    const all = py.list(values);
    return all.slice(1).map((value, k) => py.tuple_of(all[k], value));
  },
  sum: (values, start = 0) => [...py.iterate(values)].reduce((all, value) => py.add(all, value), start),
  min: (...values) => py.sorted(values.length === 1 ? values[0] : values)[0],
  max: (...values) => py.sorted(values.length === 1 ? values[0] : values).at(-1),
  all: (values) => [...py.iterate(values)].every(py.truth),
  any: (values) => [...py.iterate(values)].some(py.truth),
  reversed: (values) => [...py.iterate(values)].reverse(),
  sorted(values) {
    const before = (a, b) => {
      if (!Array.isArray(a)) return py.float(a) - py.float(b);
      const at = a.findIndex((value, k) => before(value, b[k]) !== 0);
      return at < 0 ? 0 : before(a[at], b[at]);
    };
    return [...py.iterate(values)].sort(before);
  },
  colour: (colour) => [...colour],
  points: (points) => [...points].map((point) => [...point].map(py.float)),
  Circle: (x, y, radius, colour, agent = null) => ({
    kind: "circle",
    x: py.float(x),
    y: py.float(y),
    radius: py.float(radius),
    colour: py.colour(colour),
    agent: agent === null ? null : py.int(agent),
  }),
  Line: (points, width, colour) => ({ kind: "line", points: py.points(points), width: py.float(width), colour: py.colour(colour) }),
  Polygon: (points, colour) => ({ kind: "polygon", points: py.points(points), colour: py.colour(colour) }),
  Drawing: (bounds, shapes, width = 600, height = 600, background = [255, 255, 255]) => ({
    bounds: [...bounds].map(py.float),
    shapes: [...shapes],
    width,
    height,
    background: [...background],
  }),
  discs(positions, radius, colour, agents = null) {
    const rows = [...asarray(positions)];
    const owners = agents === null ? rows.map(() => null) : [...py.iterate(agents)];
    return rows.map((row, k) => py.Circle(...row, radius, colour, owners[k]));
  },
  blend: (colour, other, share) => [...colour].map((part, k) => roundHalfEven(part + (other[k] - part) * py.float(share))),
  square_bounds(circles, half = 0) {
    for (const { x, y, radius } of circles) half = Math.max(half, 1.05 * (Math.max(Math.abs(x), Math.abs(y)) + radius));
    return [-half, half, -half, half];
  },
};
