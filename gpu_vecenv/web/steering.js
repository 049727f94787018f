// A person's wish as an action: each action is tried in copies of the environment, and the one whose picture comes
// nearest to the wish is taken. So no game needs a table of keys.

const MAX_CHOICES = 7; // tried of each head, evenly spaced
const MAX_TRIED = 60;

class Steering {
  constructor(simulation) {
    this.simulation = simulation;
    this.copies = new Map(); // number of environments -> copies
    this.last = new Map(); // agent -> its last action
  }

  // The action of an agent for a wish: {direction: [x, y]} in the picture, {point: [x, y]} in its units, {choice: k},
  // or null, the wish for nothing.
  action(agent, wish) {
    const found = this.#action(agent, wish);
    this.last.set(agent, found);
    return found;
  }

  #action(agent, wish) {
    const { simulation } = this;
    const role = simulation.roleOf[agent].name;
    const sizes = simulation.layout.action.sizes[role];
    const box = simulation.layout.action.bounds[role];
    if (wish === null) return simulation.content.noop[role] ?? this.#idle(agent, sizes, box);
    if (wish.choice !== undefined) {
      const first = box ? box[1][0] : Math.min(wish.choice, sizes[0] - 1);
      return sizes.map((_, head) => (head === 0 ? first : 0));
    }
    const tried = this.#candidates(agent, sizes, box);
    const before = simulation.draw();
    const pictures = this.#tried(agent, tried);
    const costs = this.#costs(agent, wish, before, pictures);
    if (costs === null) return this.#along(wish, sizes, box, before);
    return tried[costs.indexOf(Math.min(...costs))];
  }

  // Without a noop: the middle one of three or more choices and of a Box, else the last action.
  #idle(agent, sizes, box) {
    if (box) return box[0].map((low, k) => (low + box[1][k]) / 2);
    return sizes[0] > 2 && sizes.length === 1 ? [Math.floor(sizes[0] / 2)] : (this.last.get(agent) ?? sizes.map(() => 0));
  }

  // Where no disc follows the action: to the left is the first choice, to the right the last.
  #along(wish, sizes, box, before) {
    const [left, right] = before.bounds;
    const x = wish.direction ? wish.direction[0] || wish.direction[1] : (2 * (wish.point[0] - left)) / (right - left) - 1;
    if (box) return box[0].map((low, k) => low + ((Math.min(Math.max(x, -1), 1) + 1) / 2) * (box[1][k] - low));
    return sizes.map((size, head) => (head > 0 || x < 0 ? 0 : size - 1));
  }

  #candidates(agent, sizes, box) {
    const mask = this.simulation.mask(agent);
    let rows = [[]];
    let start = 0;
    for (const [head, size] of sizes.entries()) {
      let options;
      if (box) options = [box[0][head], (box[0][head] + box[1][head]) / 2, box[1][head]];
      else {
        const count = sizes.length === 1 ? Math.min(size, MAX_TRIED) : Math.min(size, MAX_CHOICES);
        options = Array.from({ length: count }, (_, k) => Math.round((k * (size - 1)) / Math.max(count - 1, 1)));
        const allowed = mask ? options.filter((k) => mask[start + k]) : options;
        if (allowed.length) options = allowed;
      }
      start += size;
      if (rows.length * options.length > MAX_TRIED) options = options.slice(0, 1);
      rows = rows.flatMap((row) => options.map((option) => [...row, option]));
    }
    return rows;
  }

  // The pictures after one step with each action, while others do nothing.
  #tried(agent, actions) {
    const { simulation } = this;
    const { env, layout, content } = simulation;
    if (!this.copies.has(actions.length)) {
      const options = { numEnvs: actions.length, autoresetMode: "disabled" };
      this.copies.set(actions.length, new VecEnv(simulation.module, layout, content.shared, options));
    }
    const copies = this.copies.get(actions.length);
    for (const { name, shared } of layout.fields) {
      const key = name.replace(/^state_/, "");
      const row = env.state[key];
      for (let k = 0; k < (shared ? 1 : actions.length); k++) copies.state[key].set(row, k * row.length);
    }
    const { heads } = layout.action;
    copies.actions.fill(0);
    for (const [k, action] of actions.entries()) {
      const row = copies.actions.subarray(k * layout.num_agents * heads, (k + 1) * layout.num_agents * heads);
      for (let other = 0; other < layout.num_agents; other++) {
        row.set(other === agent ? action : (content.noop[simulation.roleOf[other].name] ?? []), other * heads);
      }
    }
    copies.step();
    return actions.map((_, k) => draw(drawnState(copies, k)));
  }

  // How far each picture is from the wish; null if none differs.
  #costs(agent, wish, before, pictures) {
    const disc = (picture) => picture.shapes.findLast((shape) => shape.kind === "circle" && shape.agent === agent);
    const [from, discs] = [disc(before), pictures.map(disc)];
    const moves = from && discs.every(Boolean) && discs.some(({ x, y }) => x !== discs[0].x || y !== discs[0].y);
    if (moves && wish.direction) {
      const [dx, dy] = wish.direction;
      return discs.map(({ x, y }) => -((x - from.x) * dx + (y - from.y) * dy));
    }
    if (moves) return discs.map(({ x, y }) => Math.hypot(x - wish.point[0], y - wish.point[1]));
    if (wish.direction) return null;
    // Nothing of the agent moves: the nearest shape that an action adds or changes.
    const old = new Set(before.shapes.map((shape) => JSON.stringify(shape)));
    const changed = pictures.map(({ shapes }) => shapes.filter((shape) => shape.agent === null && !old.has(JSON.stringify(shape))));
    const common = new Set(changed[0].map((shape) => JSON.stringify(shape)).filter((text) => changed.every((own) => own.some((shape) => JSON.stringify(shape) === text))));
    const distance = (shape) => Math.hypot(shape.x - wish.point[0], shape.y - wish.point[1]);
    const costs = changed.map((own) => {
      const circles = own.filter((shape) => shape.kind === "circle" && !common.has(JSON.stringify(shape)));
      return Math.min(Infinity, ...circles.map(distance));
    });
    return costs.every((cost) => cost === Infinity) ? null : costs;
  }
}

const DEAD_ZONE = 0.3; // of a gamepad's stick
const PAD_MOVES = { 12: [0, 1], 13: [0, -1], 14: [-1, 0], 15: [1, 0] }; // buttons of the standard layout
const PAD_CHOICES = 4; // its first buttons

// What keys, the pointer and gamepads wish for.
class Controls {
  constructor(canvas, toUnits) {
    this.keys = new Set();
    this.held = null; // where the pointer is held, in units of the picture
    this.choice = null; // of a number key, or of a click: taken once
    this.clicked = null;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], KeyA: [-1, 0], KeyD: [1, 0], KeyW: [0, 1], KeyS: [0, -1] };
    this.moves = moves;
    this.enabled = false;
    this.pressed = new Set(); // a gamepad's buttons, when it was last read
    const keydown = (event) => {
      if (!this.enabled || event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input, select")) return;
      if (event.code in moves) {
        this.keys.add(event.code);
        event.preventDefault();
      } else if (/^[0-9]$/.test(event.key)) this.choice = (Number(event.key) + 9) % 10; // 1 is the first choice, 0 the tenth
    };
    addEventListener("keydown", keydown, { capture: true }); // before the player's keys
    addEventListener("keyup", (event) => this.keys.delete(event.code));
    addEventListener("blur", () => this.keys.clear());
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.enabled) return;
      canvas.setPointerCapture(event.pointerId);
      this.held = this.clicked = toUnits(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.held) this.held = toUnits(event);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (this.held = null));
  }

  enable(enabled) {
    Object.assign(this, { enabled, held: null, choice: null, clicked: null });
    this.keys.clear();
  }

  // The present wish, see Steering. Where `once`, in games of turns, held keys and pointers count a single time.
  wish(once) {
    const { choice, clicked } = this;
    this.choice = this.clicked = null;
    if (choice !== null) return { choice };
    const pad = this.#pad(once);
    if (pad.choice !== null) return { choice: pad.choice };
    const pressed = [...[...this.keys].map((code) => this.moves[code]), ...pad.moves];
    const direction = pressed.reduce(([x, y], [dx, dy]) => [x + dx, y + dy], [0, 0]);
    if (once) this.keys.clear();
    if (direction[0] || direction[1]) return { direction };
    const point = once ? clicked : (this.held ?? clicked);
    return point ? { point } : null;
  }

  // Directions and the choice of gamepads: a choice counts once for each press; where `once`, a direction too.
  #pad(once) {
    const [moves, pressed] = [[], new Set()];
    let choice = null;
    for (const pad of navigator.getGamepads?.() ?? []) {
      if (!pad) continue;
      const [x, y] = [pad.axes[0] ?? 0, -(pad.axes[1] ?? 0)];
      const own = pad.buttons.flatMap((button, k) => (button.pressed && PAD_MOVES[k] ? [PAD_MOVES[k]] : []));
      if (Math.hypot(x, y) > DEAD_ZONE) own.push([x, y]);
      if (own.length) pressed.add("direction");
      if (!once || !this.pressed.has("direction")) moves.push(...own);
      for (let k = 0; k < PAD_CHOICES; k++) {
        if (!pad.buttons[k]?.pressed) continue;
        if (!this.pressed.has(k)) choice = k;
        pressed.add(k);
      }
    }
    this.pressed = pressed;
    return { moves, choice };
  }
}
