// Saves what a player shows, from its first step to the last that is known, as a film in a WebM file.

const FILM_FPS = 30;
const FILM_SIDE = 960; // pixels of the longer side of one picture
const KEY_FRAMES = 150; // frames from one key frame to the next: five seconds
const MAX_FRAMES = 18000; // ten minutes
const QUEUED = 8; // frames that wait for the encoder
const CODECS = [
  ["vp09.00.31.08", "V_VP9"],
  ["vp8", "V_VP8"],
];

const canSave = () => "VideoEncoder" in globalThis;

// The bytes of the film; null if progress(share), which is called for each frame, returns false.
async function savedFilm(player, progress) {
  const { stages, viewState } = player;
  const pictures = stages.map((stage) => {
    const { width, height } = stage.episode.picture(viewState.step);
    const scale = FILM_SIDE / Math.max(width, height);
    return new OffscreenCanvas(2 * Math.round((width * scale) / 2), 2 * Math.round((height * scale) / 2));
  });
  const width = pictures.reduce((sum, one) => sum + one.width, 0);
  const height = Math.max(...pictures.map((one) => one.height));
  const whole = new OffscreenCanvas(width, height);
  const rate = (player.fps * player.speed) / FILM_FPS; // steps a frame
  const count = Math.min(Math.ceil(player.numSteps / rate) + 1, MAX_FRAMES);
  const { codec, config } = await usableCodec(width, height);
  const frames = [];
  let failed = null;
  const encoder = new VideoEncoder({
    output: (chunk) => {
      const data = new Uint8Array(chunk.byteLength);
      chunk.copyTo(data);
      frames.push({ data, key: chunk.type === "key", time: Math.round(chunk.timestamp / 1000) });
    },
    error: (error) => (failed = error),
  });
  encoder.configure(config);
  for (let k = 0; k < count && !failed; k++) {
    const at = Math.min(k * rate, player.numSteps);
    player.move(Math.ceil(at));
    viewState.share = at > 0 ? at - Math.ceil(at) + 1 : 1;
    const context = whole.getContext("2d");
    let left = 0;
    stages.forEach((stage, index) => {
      stage.paint(pictures[index], FILM_SIDE / 600);
      context.drawImage(pictures[index], left, 0);
      left += pictures[index].width;
    });
    const frame = new VideoFrame(whole, { timestamp: (k * 1e6) / FILM_FPS, duration: 1e6 / FILM_FPS });
    encoder.encode(frame, { keyFrame: k % KEY_FRAMES === 0 });
    frame.close();
    if (!progress(k / count)) {
      encoder.close();
      return null;
    }
    do await new Promise((resolve) => setTimeout(resolve));
    while (encoder.encodeQueueSize > QUEUED && !failed);
  }
  if (!failed) await encoder.flush().catch((error) => (failed = error));
  if (failed) throw failed;
  encoder.close();
  return webmFile(frames, { codec, width, height, fps: FILM_FPS });
}

async function usableCodec(width, height) {
  for (const [name, codec] of CODECS) {
    const config = { codec: name, width, height, framerate: FILM_FPS, bitrate: Math.max(1e6, 3 * width * height) };
    if ((await VideoEncoder.isConfigSupported(config)).supported) return { codec, config };
  }
  throw new Error(`this browser encodes neither VP9 nor VP8 of ${width} x ${height} pixels`);
}
