// A film's picture on a canvas: camera, shapes, trails, and pointer input.

const TRAIL = 40; // steps
const MAX_ZOOM = 16;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

class Stage {
  constructor(film, viewState, onPick) {
    Object.assign(this, { film, viewState, onPick, hovered: null });
    const { width, height } = film.views[film.viewOf[0]];
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.style.aspectRatio = `${width} / ${height}`;
    this.tip = element("div", { className: "tip", hidden: true });
    this.badge = element("div", { className: "badge", hidden: true });
    this.box = element("div", { className: "stage" }, this.canvas, this.badge, this.tip);
    this.box.style.setProperty("--aspect", width / height);
    new ResizeObserver(() => this.fit()).observe(this.canvas);
    this.#listen();
  }

  fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.max(1, Math.round(width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(height * this.ratio));
    this.draw();
  }

  // The camera: scale k, and the point (x, y) of the picture at the centre of the canvas.
  camera() {
    const { film, viewState, canvas } = this;
    const view = film.view(viewState.step);
    const k = Math.min(canvas.width / view.width, canvas.height / view.height) * viewState.zoom;
    const agent = film.agentIndex.get(viewState.followed);
    const place = agent !== undefined && film.lastPosition(agent, viewState.step);
    if (place) {
      const [x, y] = film.pixels(view, ...place);
      return { k, x, y };
    }
    // The view stays inside the picture.
    const inside = (share, length, shown) => {
      const half = Math.min(shown, length) / 2;
      return clamp(share * length, half, length - half);
    };
    return { k, x: inside(viewState.x, view.width, canvas.width / k), y: inside(viewState.y, view.height, canvas.height / k) };
  }

  draw() {
    if (!this.ratio) return;
    const { film, viewState, canvas } = this;
    const context = canvas.getContext("2d");
    const view = film.view(viewState.step);
    const { k, x, y } = this.camera();
    const thin = this.ratio; // minimum width of discs and lines: one pixel
    const across = (place) => (place - x) * k + canvas.width / 2;
    const down = (place) => (place - y) * k + canvas.height / 2;
    context.fillStyle = rgb(view.background);
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.lineCap = context.lineJoin = "round";
    let trails = viewState.trails;
    for (const { kind, positions, size, colour, agent } of film.shapes(viewState.step)) {
      if (trails && agent !== null) {
        this.#trails(context, view, across, down);
        trails = false;
      }
      context.beginPath();
      if (kind === "circle") {
        context.arc(across(positions[0]), down(positions[1]), Math.max(size * k, thin / 2), 0, 2 * Math.PI);
      } else {
        for (let i = 0; i < positions.length; i += 2) context.lineTo(across(positions[i]), down(positions[i + 1]));
      }
      if (kind === "line") {
        context.strokeStyle = rgb(colour);
        context.lineWidth = Math.max(size * k, thin);
        context.stroke();
      } else {
        context.fillStyle = rgb(colour);
        context.fill();
      }
    }
    for (const name of new Set([viewState.followed, this.hovered])) this.#ring(context, view, across, down, name);
  }

  #trails(context, view, across, down) {
    const { film, viewState } = this;
    const last = film.frame(viewState.step);
    const count = film.agents.length;
    const far = Math.max(view.width, view.height) / 4; // longer than this in one step: a jump, not drawn
    const at = (agent, frame) => {
      const place = 2 * (frame * count + agent);
      return film.pixels(view, film.positions[place], film.positions[place + 1]);
    };
    const chosen = film.agentIndex.get(viewState.followed);
    context.lineCap = "butt"; // round ends would overlap
    for (let frame = Math.max(1, last - TRAIL + 1); frame <= last; frame++) {
      const young = 1 - (last - frame) / TRAIL;
      for (const role of film.roles) {
        for (const own of [false, true]) {
          // the followed agent's trail is wider
          context.beginPath();
          for (let agent = role.first; agent < role.end; agent++) {
            if ((agent === chosen) !== own) continue;
            const from = at(agent, frame - 1);
            const to = at(agent, frame);
            if (!(Math.hypot(to[0] - from[0], to[1] - from[1]) < far)) continue;
            context.moveTo(across(from[0]), down(from[1]));
            context.lineTo(across(to[0]), down(to[1]));
          }
          context.globalAlpha = (own ? 0.9 : 0.6) * young;
          context.strokeStyle = rgb(role.colour);
          context.lineWidth = (own ? 2 : 1) * 1.5 * Math.sqrt(viewState.zoom) * this.ratio;
          context.stroke();
        }
      }
    }
    context.globalAlpha = 1;
    context.lineCap = "round";
  }

  #ring(context, view, across, down, name) {
    const agent = this.film.agentIndex.get(name);
    const body = this.film.layout(this.viewState.step).bodies.get(agent);
    if (!body) return;
    const [x, y, size] = this.film.frames[this.film.frame(this.viewState.step)].subarray(body.at, body.at + 3);
    const { subpixels } = this.film;
    const { k } = this.camera();
    const radius = (size / subpixels) * k + 4 * this.ratio;
    for (const [width, colour] of [
      [5, "rgb(255 255 255 / 85%)"],
      [2, "rgb(20 26 36)"],
    ]) {
      context.beginPath();
      context.arc(across(x / subpixels), down(y / subpixels), radius, 0, 2 * Math.PI);
      context.lineWidth = width * this.ratio;
      context.strokeStyle = colour;
      context.stroke();
    }
  }

  // The agent at a point of the canvas, and its position, in CSS pixels.
  near(offsetX, offsetY, reach) {
    const { film, viewState, canvas } = this;
    const numbers = film.frames[film.frame(viewState.step)];
    const { k, x, y } = this.camera();
    let found = null;
    let least = Infinity;
    for (const [agent, { at }] of film.layout(viewState.step).bodies) {
      const left = ((numbers[at] / film.subpixels - x) * k + canvas.width / 2) / this.ratio;
      const top = ((numbers[at + 1] / film.subpixels - y) * k + canvas.height / 2) / this.ratio;
      const radius = ((numbers[at + 2] / film.subpixels) * k) / this.ratio;
      const distance = Math.hypot(left - offsetX, top - offsetY);
      if (distance < radius + reach && distance < least) [found, least] = [{ agent, left, top, radius }, distance];
    }
    return found;
  }

  hover(event) {
    const found = event && this.near(event.offsetX, event.offsetY, 4);
    const name = found ? this.film.agents[found.agent] : null;
    this.tip.hidden = !found;
    this.canvas.classList.toggle("near", Boolean(found));
    if (found) {
      this.tip.textContent = name;
      this.tip.style.left = `${found.left}px`;
      this.tip.style.top = `${Math.max(found.top - found.radius, 30)}px`;
    }
    if (name !== this.hovered) {
      this.hovered = name;
      this.draw();
    }
  }

  // A click follows an agent; dragging pans a zoomed view; two fingers, or Ctrl with the wheel, zoom.
  #listen() {
    const { canvas, viewState } = this;
    const down = new Map();
    let moved = 0;
    let spread = 0;
    const fingers = () => {
      const [one, other] = [...down.values()];
      return Math.hypot(one.offsetX - other.offsetX, one.offsetY - other.offsetY);
    };
    canvas.addEventListener("pointerdown", (event) => {
      down.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
      moved = down.size > 1 ? Infinity : 0;
      if (down.size === 2) spread = fingers();
    });
    canvas.addEventListener("pointermove", (event) => {
      const last = down.get(event.pointerId);
      if (!last) return this.hover(event.pointerType === "mouse" ? event : null);
      const [dx, dy] = [event.offsetX - last.offsetX, event.offsetY - last.offsetY];
      moved += Math.hypot(dx, dy);
      down.set(event.pointerId, event);
      if (down.size === 2) {
        const wider = fingers();
        this.zoomAt(event.offsetX, event.offsetY, wider / spread);
        spread = wider;
      } else if (moved > 6 && viewState.zoom > 1 && viewState.followed === null) {
        const { k, x, y } = this.camera();
        const view = this.film.view(viewState.step);
        viewState.change({ x: (x - (dx * this.ratio) / k) / view.width, y: (y - (dy * this.ratio) / k) / view.height });
      }
    });
    const up = (event) => {
      if (down.delete(event.pointerId) && event.type === "pointerup" && moved <= 6) {
        const found = this.near(event.offsetX, event.offsetY, event.pointerType === "mouse" ? 6 : 16);
        this.onPick(found ? this.film.agents[found.agent] : null);
      }
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.zoomAt(event.offsetX, event.offsetY, Math.exp(-event.deltaY / 200));
      },
      { passive: false },
    );
  }

  // Zooms by a factor around a point of the canvas.
  zoomAt(offsetX, offsetY, factor) {
    const { viewState, canvas } = this;
    const view = this.film.view(viewState.step);
    const { k, x, y } = this.camera();
    const zoom = clamp(viewState.zoom * factor, 1, MAX_ZOOM);
    const rest = (1 - viewState.zoom / zoom) / k;
    viewState.change({
      zoom,
      x: (x + (offsetX * this.ratio - canvas.width / 2) * rest) / view.width,
      y: (y + (offsetY * this.ratio - canvas.height / 2) * rest) / view.height,
    });
  }
}
