// Plots over steps, as SVG, in legible colours.

function svgElement(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A tick interval for about this many ticks: 1, 2 or 5 times a power of ten.
function niceStep(range, count) {
  const rough = range / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

class Plot {
  // curves(): [{name, colour, values, dashed}]; range(): lowest and highest value of all films' curves.
  constructor({ title, note, numSteps, whole, curves, range, onSeek }) {
    Object.assign(this, { numSteps, whole, curves, range, step: 0 });
    this.svg = svgElement("svg", { role: "img", "aria-label": `${title}, ${note}, over steps` });
    this.legend = element("ul", { className: "legend" });
    const caption = element(
      "figcaption",
      {},
      element("b", { textContent: title }),
      " ",
      element("span", { textContent: note }),
    );
    this.box = element("figure", { className: "plot" }, caption, this.legend, this.svg);
    new ResizeObserver(() => this.draw()).observe(this.svg);
    const seek = (event) => {
      const left = event.clientX - this.svg.getBoundingClientRect().left;
      onSeek(Math.round(((left - this.left) / (this.right - this.left)) * this.numSteps));
    };
    this.svg.addEventListener("pointerdown", (event) => {
      this.svg.setPointerCapture(event.pointerId);
      seek(event);
    });
    this.svg.addEventListener("pointermove", (event) => event.buttons && seek(event));
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    this.svg.replaceChildren();
    this.shown = this.curves();
    const { low, high, step, values, label } = this.#scale();
    this.left = 10 + 6.6 * Math.max(...values.map((value) => label(value).length));
    this.right = width - 12;
    const top = 8;
    const bottom = height - 34;
    this.across = (step) => this.left + ((this.right - this.left) * step) / this.numSteps;
    this.down = (value) => bottom - ((bottom - top) * (value - low)) / (high - low);
    const line = (name, x1, y1, x2, y2) => this.svg.append(svgElement("line", { class: name, x1, y1, x2, y2 }));
    const text = (x, y, anchor, content) => {
      const made = svgElement("text", { x, y, "text-anchor": anchor });
      made.textContent = content;
      this.svg.append(made);
    };
    for (const value of values) {
      line(Math.abs(value) < step / 2 ? "axis" : "grid", this.left, this.down(value), this.right, this.down(value));
      text(this.left - 6, this.down(value) + 4, "end", label(value));
    }
    line("axis", this.left, top, this.left, bottom);
    const apart = Math.max(1, niceStep(this.numSteps, clamp(Math.floor((this.right - this.left) / 60), 2, 6)));
    for (let step = 0; step <= this.numSteps; step += apart) {
      line("axis", this.across(step), bottom, this.across(step), bottom + 4);
      text(this.across(step), bottom + 16, "middle", step.toLocaleString("en"));
    }
    text((this.left + this.right) / 2, height - 3, "middle", "step");
    for (const curve of this.shown) this.svg.append(this.#path(curve));
    this.cursor = svgElement("line", { class: "cursor", y1: top, y2: bottom });
    this.svg.append(this.cursor);
    this.legend.replaceChildren();
    for (const curve of this.shown) {
      curve.dot = svgElement("circle", { class: "dot", r: 4, fill: curve.colour });
      this.svg.append(curve.dot);
      curve.value = element("b");
      const key = element("i");
      key.style.color = curve.colour;
      this.legend.append(element("li", {}, key, element("span", { textContent: curve.name }), curve.value));
    }
    this.move(this.step);
  }

  // Axis limits and ticks at round numbers around the range.
  #scale() {
    let [low, high] = this.range();
    if (!(high > low)) [low, high] = [low - (this.whole ? 0 : 1), low + 1];
    const step = Math.max(niceStep(high - low, 4), this.whole ? 1 : 0);
    low = Math.floor(low / step + 1e-9) * step; // 1e-9: tolerance for an exact multiple
    high = Math.ceil(high / step - 1e-9) * step;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const style = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    const label = (value) => value.toLocaleString("en", style).replace("-", "−");
    const values = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, i) => low + i * step);
    return { low, high, step, values, label };
  }

  #path({ values, colour, dashed }) {
    let path = "";
    let pen = false;
    values.forEach((value, step) => {
      if (!Number.isFinite(value)) {
        pen = false;
        return;
      }
      const x = this.across(step).toFixed(1);
      const y = this.down(value).toFixed(1);
      path += !pen ? `M${x} ${y}` : this.whole ? `H${x}V${y}` : `L${x} ${y}`;
      pen = true;
    });
    return svgElement("path", { class: "curve", d: path, stroke: colour, ...(dashed && { "stroke-dasharray": "5 3" }) });
  }

  move(step) {
    this.step = step;
    if (!this.cursor) return;
    this.cursor.setAttribute("x1", this.across(step));
    this.cursor.setAttribute("x2", this.across(step));
    for (const { values, value, dot } of this.shown) {
      const now = values[Math.min(step, values.length - 1)];
      value.textContent = formatNumber(now);
      dot.setAttribute("visibility", Number.isFinite(now) && step < values.length ? "visible" : "hidden");
      if (!Number.isFinite(now)) continue;
      dot.setAttribute("cx", this.across(step));
      dot.setAttribute("cy", this.down(now));
    }
  }
}

function extent(curves) {
  let low = 0;
  let high = 0;
  for (const { values } of curves) {
    for (const value of values) {
      if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
  }
  return [low, high];
}
