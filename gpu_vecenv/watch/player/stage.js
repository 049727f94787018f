// An episode's picture on a canvas: camera, trails, and pointer input.
//
// An episode has numSteps, agents (names), agentIndex (name -> agent), roles ({name, first, end, colour}), and at a step
// picture(step), place(agent, step), lastPlace(agent, step).

const TRAIL = 40; // steps
const MAX_ZOOM = 16;

class Stage {
  constructor(episode, viewState, onPick) {
    Object.assign(this, { episode, viewState, onPick, hovered: null, passive: false });
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.tip = element("div", { className: "tip", hidden: true });
    this.badge = element("div", { className: "badge", hidden: true });
    this.box = element("div", { className: "stage" }, this.canvas, this.badge, this.tip);
    this.shape(episode.picture(0));
    new ResizeObserver(() => this.fit()).observe(this.canvas);
    this.#listen();
  }

  // The canvas has the shape of the drawing.
  shape({ width, height }) {
    const aspect = `${width} / ${height}`;
    if (this.canvas.style.aspectRatio === aspect) return;
    this.canvas.style.aspectRatio = aspect;
    this.box.style.setProperty("--aspect", width / height);
  }

  fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.max(1, Math.round(width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(height * this.ratio));
    this.draw();
  }

  // The drawing that is shown; between two steps one that was never simulated.
  get drawing() {
    const { episode, viewState } = this;
    const step = Math.min(viewState.step, episode.numSteps);
    const shown = (at) => (viewState.dark ? dark(episode.picture(at)) : episode.picture(at));
    const moves = viewState.share < 1 && step > 0 && step === viewState.step;
    return moves ? between(shown(step - 1), shown(step), viewState.share) : shown(step);
  }

  // Where a drawing lies on a canvas of this size, with `k` pixels for each of its own, and (x, y) of these centred.
  camera(drawing, { width, height } = this.canvas) {
    const { episode, viewState } = this;
    const [left, right, bottom, top] = drawing.bounds;
    const [middle, centre] = middleOf(drawing);
    const units = Math.min(drawing.width / (right - left), drawing.height / (top - bottom));
    const k = Math.min(width / drawing.width, height / drawing.height) * viewState.zoom;
    const agent = episode.agentIndex.get(viewState.followed);
    const disc = discsOf(drawing).get(agent);
    const place = disc ? [disc.x, disc.y] : agent !== undefined && episode.lastPlace(agent, viewState.step);
    // Without an agent the view stays inside the picture.
    const inside = (share, length, shown) => {
      const half = Math.min(shown, length) / 2;
      return clamp(share * length, half, length - half);
    };
    const x = place ? drawing.width / 2 + (place[0] - middle) * units : inside(viewState.x, drawing.width, width / k);
    const y = place ? drawing.height / 2 - (place[1] - centre) * units : inside(viewState.y, drawing.height, height / k);
    const looked = [middle + (x - drawing.width / 2) / units, centre - (y - drawing.height / 2) / units];
    return { k, x, y, ...placement(k * units, looked, [width / 2, height / 2]) };
  }

  draw() {
    if (this.ratio) this.paint(this.canvas, this.ratio);
  }

  // Draws on any canvas; lines are at least `thin` pixels wide.
  paint(canvas, thin) {
    const { episode, viewState, drawing } = this;
    const context = canvas.getContext("2d");
    const camera = this.camera(drawing, canvas);
    const trails = viewState.trails ? () => this.#trails(context, drawing, camera, thin) : null;
    paint(context, drawing, [0, 0, canvas.width, canvas.height], thin, thin, 0, camera, trails);
    for (const name of new Set([viewState.followed, viewState.marked, this.hovered])) ring(context, drawing, camera, episode.agentIndex.get(name), thin);
  }

  #trails(context, drawing, { across, down }, thin) {
    const { episode, viewState } = this;
    const last = Math.min(viewState.step, episode.numSteps);
    const share = last === viewState.step ? viewState.share : 1;
    const [left, right, bottom, top] = drawing.bounds;
    const far = Math.max(right - left, top - bottom) / FAR; // longer than this in one step: a jump, not drawn
    const chosen = episode.agentIndex.get(viewState.followed);
    context.save();
    context.lineCap = "butt"; // round ends would overlap
    for (let step = Math.max(1, last - TRAIL + 1); step <= last; step++) {
      const young = 1 - (last - step) / TRAIL;
      for (const role of episode.roles) {
        for (const own of [false, true]) {
          // the followed agent's trail is wider
          context.beginPath();
          for (let agent = role.first; agent < role.end; agent++) {
            if ((agent === chosen) !== own) continue;
            const [from, to] = [episode.place(agent, step - 1), episode.place(agent, step)];
            if (!from || !to || !(Math.hypot(to[0] - from[0], to[1] - from[1]) < far)) continue;
            const part = step === last ? share : 1;
            context.moveTo(across(from[0]), down(from[1]));
            context.lineTo(across(from[0] + part * (to[0] - from[0])), down(from[1] + part * (to[1] - from[1])));
          }
          context.globalAlpha = (own ? 0.9 : 0.6) * young;
          context.strokeStyle = cssColour(viewState.dark ? darkColour(role.colour) : role.colour);
          context.lineWidth = (own ? 2 : 1) * 1.5 * Math.sqrt(viewState.zoom) * thin;
          context.stroke();
        }
      }
    }
    context.restore();
  }

  // The agent at a point of the canvas, and its position, in CSS pixels.
  near(offsetX, offsetY, reach) {
    const { drawing, ratio } = this;
    const { scale, across, down } = this.camera(drawing);
    let found = null;
    let least = Infinity;
    for (const [agent, disc] of discsOf(drawing)) {
      const [left, top, radius] = [across(disc.x) / ratio, down(disc.y) / ratio, (disc.radius * scale) / ratio];
      const distance = Math.hypot(left - offsetX, top - offsetY);
      if (distance < radius + reach && distance < least) [found, least] = [{ agent, left, top, radius }, distance];
    }
    return found;
  }

  hover(event) {
    const found = event && !this.passive && this.near(event.offsetX, event.offsetY, 4);
    const name = found ? this.episode.agents[found.agent] : null;
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

  // A click picks an agent; dragging pans a zoomed view; two fingers, or Ctrl with the wheel, zoom.
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
      if (this.passive) return;
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
        const view = this.drawing;
        const { k, x, y } = this.camera(view);
        viewState.change({ x: (x - (dx * this.ratio) / k) / view.width, y: (y - (dy * this.ratio) / k) / view.height });
      }
    });
    const up = (event) => {
      if (down.delete(event.pointerId) && event.type === "pointerup" && moved <= 6) {
        const found = this.near(event.offsetX, event.offsetY, event.pointerType === "mouse" ? 6 : 16);
        this.onPick(found ? this.episode.agents[found.agent] : null);
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
    const view = this.drawing;
    const { k, x, y } = this.camera(view);
    const zoom = clamp(viewState.zoom * factor, 1, MAX_ZOOM);
    const rest = (1 - viewState.zoom / zoom) / k;
    viewState.change({
      zoom,
      x: (x + (offsetX * this.ratio - canvas.width / 2) * rest) / view.width,
      y: (y + (offsetY * this.ratio - canvas.height / 2) * rest) / view.height,
    });
  }
}
