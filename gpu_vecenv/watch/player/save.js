// Saves what a player shows, from its first step to the last that is known, as a film: WebM, MP4 or GIF.

const KEY_FRAMES = 150; // frames from one key frame to the next: five seconds
const QUEUED = 8; // frames that wait for the encoder

// fps: frames a second; side: pixels of the longer side of one picture; most: frames; codecs: names for WebCodecs, those
// that are tried first in front, and in the file.
const FILMS = {
  webm: { label: "WebM", type: "video/webm", fps: 30, side: 960, most: 18000, codecs: { "vp09.00.31.08": "V_VP9", vp8: "V_VP8" }, file: webmFile },
  mp4: { label: "MP4", type: "video/mp4", fps: 30, side: 960, most: 18000, codecs: { "avc1.640028": "avc1", "avc1.42e028": "avc1" }, file: mp4File },
  gif: { label: "GIF", type: "image/gif", fps: 20, side: 480, most: 1200 },
};

// The names of the films that this browser can make.
async function usableFilms() {
  const names = [];
  for (const [name, film] of Object.entries(FILMS)) {
    if (!film.codecs || (await usableCodec(film, film.side, film.side))) names.push(name);
  }
  return names;
}

// The bytes of the film of a name; null if progress(share), which is called for each frame, returns false.
async function savedFilm(player, name, progress) {
  const film = FILMS[name];
  const { stages, viewState } = player;
  const pictures = stages.map((stage) => {
    const { width, height } = stage.episode.picture(viewState.step);
    const scale = film.side / Math.max(width, height);
    return new OffscreenCanvas(2 * Math.round((width * scale) / 2), 2 * Math.round((height * scale) / 2));
  });
  const width = pictures.reduce((sum, one) => sum + one.width, 0);
  const height = Math.max(...pictures.map((one) => one.height));
  const whole = new OffscreenCanvas(width, height);
  const context = whole.getContext("2d", { willReadFrequently: !film.codecs });
  const rate = (player.fps * player.speed) / film.fps; // steps a frame
  const count = Math.min(Math.ceil(player.numSteps / rate) + 1, film.most);
  const encoder = await (film.codecs ? VideoFilm : GifFilm).of(film, whole);
  try {
    for (let k = 0; k < count; k++) {
      const at = Math.min(k * rate, player.numSteps);
      player.move(Math.ceil(at));
      viewState.share = at > 0 ? at - Math.ceil(at) + 1 : 1;
      let left = 0;
      stages.forEach((stage, index) => {
        stage.paint(pictures[index], film.side / 600);
        context.drawImage(pictures[index], left, 0);
        left += pictures[index].width;
      });
      encoder.add(whole, k);
      if (!progress(k / count)) return null;
      do await new Promise((resolve) => setTimeout(resolve));
      while (encoder.isBusy);
    }
    return await encoder.bytes();
  } finally {
    encoder.close();
  }
}

// A film by the browser's encoder.
class VideoFilm {
  static async of(film, { width, height }) {
    const found = await usableCodec(film, width, height);
    if (!found) throw new Error(`this browser encodes no ${film.label} of ${width} x ${height} pixels`);
    return new VideoFilm(film, found);
  }

  constructor(film, { codec, config }) {
    Object.assign(this, { film, codec, config, frames: [], failed: null });
    this.encoder = new VideoEncoder({
      output: (chunk, { decoderConfig } = {}) => {
        const data = new Uint8Array(chunk.byteLength);
        chunk.copyTo(data);
        const description = decoderConfig?.description;
        if (description) this.description ??= new Uint8Array(description.buffer ?? description).slice();
        this.frames.push({ data, key: chunk.type === "key", time: Math.round(chunk.timestamp / 1000) });
      },
      error: (error) => (this.failed = error),
    });
    this.encoder.configure(config);
  }

  get isBusy() {
    return this.encoder.encodeQueueSize > QUEUED && !this.failed;
  }

  add(canvas, k) {
    if (this.failed) throw this.failed;
    const { fps } = this.film;
    const frame = new VideoFrame(canvas, { timestamp: Math.round((k * 1e6) / fps), duration: Math.round(1e6 / fps) });
    this.encoder.encode(frame, { keyFrame: k % KEY_FRAMES === 0 });
    frame.close();
  }

  async bytes() {
    await this.encoder.flush().catch((error) => (this.failed ??= error));
    if (this.failed) throw this.failed;
    const { film, codec, config, description } = this;
    return film.file(this.frames, { codec, description, width: config.width, height: config.height, fps: film.fps });
  }

  close() {
    if (this.encoder.state !== "closed") this.encoder.close();
  }
}

// A film by our own encoder, of pictures that follow each other after whole hundredths of a second.
class GifFilm {
  isBusy = false;

  static of(film, { width, height }) {
    return new GifFilm(film, width, height);
  }

  constructor({ fps }, width, height) {
    Object.assign(this, { delay: 100 / fps, gif: new GifFile(width, height) });
  }

  add(canvas) {
    this.gif.add(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, this.delay);
  }

  bytes() {
    return this.gif.bytes();
  }

  close() {}
}

// What WebCodecs encodes of a film's codecs; null for none.
async function usableCodec({ codecs, fps }, width, height) {
  if (!("VideoEncoder" in globalThis)) return null;
  for (const [name, codec] of Object.entries(codecs)) {
    const config = { codec: name, width, height, framerate: fps, bitrate: Math.max(1e6, 3 * width * height) };
    if (codec === "avc1") config.avc = { format: "avc" };
    if ((await VideoEncoder.isConfigSupported(config)).supported) return { codec, config };
  }
  return null;
}
