// Many environments at once with random actions, as tiles of one picture, and how many agent-steps a second they take.

const MOSAIC_ENVS = 1024;
const STEP_MS = 9; // of a frame of the screen, for steps of all environments
const DRAW_MS = 5; // for tiles; those that are left follow in the next frames
const RATE_MS = 500; // over which the rate is measured

class Mosaic {
  constructor(simulation, canvas, seed) {
    const { module, layout, content } = simulation;
    this.env = new VecEnv(module, layout, content.shared, { numEnvs: MOSAIC_ENVS, autoresetMode: "same_step" });
    this.env.reset({ seed });
    Object.assign(this, { canvas, layout, tile: 0, steps: 0, rate: null, measured: null });
    this.fit();
  }

  // The grid of tiles: square drawings in as many columns as rows.
  fit() {
    const { width, height } = this.canvas;
    const { bounds: [left, right, bottom, top] } = draw(drawnState(this.env));
    const aspect = (right - left) / (top - bottom);
    this.columns = Math.ceil(Math.sqrt((MOSAIC_ENVS * width) / (height * aspect)));
    this.rows = Math.ceil(MOSAIC_ENVS / this.columns);
    this.canvas.getContext("2d").clearRect(0, 0, width, height);
    for (let k = 0; k < MOSAIC_ENVS; k++) this.paint(k);
  }

  paint(index) {
    const pixel = devicePixelRatio;
    const across = (column) => Math.round((column * this.canvas.width) / this.columns);
    const down = (row) => Math.round((row * this.canvas.height) / this.rows);
    const [column, row] = [index % this.columns, Math.floor(index / this.columns)];
    const [x, y] = [across(column), down(row)];
    const gap = Math.ceil(pixel);
    const tile = [x, y, across(column + 1) - x - gap, down(row + 1) - y - gap];
    paint(this.canvas.getContext("2d"), draw(drawnState(this.env, index)), tile, 0.7 * pixel, 2.5 * pixel, 0.3 * pixel);
  }

  // Steps for STEP_MS, then draws for DRAW_MS; whether the rate was measured anew.
  frame(now) {
    const start = performance.now();
    do {
      this.env.sampleActions();
      this.env.step();
      this.steps += 1;
    } while (performance.now() - start < STEP_MS);
    const stepped = performance.now();
    do {
      this.paint(this.tile);
      this.tile = (this.tile + 1) % MOSAIC_ENVS;
    } while (performance.now() - stepped < DRAW_MS);
    this.measured ??= { now, steps: this.steps };
    const elapsed = now - this.measured.now;
    if (elapsed < RATE_MS) return false;
    this.rate = ((this.steps - this.measured.steps) * MOSAIC_ENVS * this.layout.num_agents * 1000) / elapsed;
    this.measured = { now, steps: this.steps };
    return true;
  }
}
