// WebM files with one track of video: https://www.matroska.org/technical/elements.html

function float64Bytes(value) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  return new Uint8Array(view.buffer);
}

// An element: its id, its size in eight bytes, its content.
function ebml(id, ...content) {
  const body = contents(content);
  const width = id > 0xffffff ? 4 : id > 0xffff ? 3 : id > 0xff ? 2 : 1;
  return joined([bigEndian(id, width), Uint8Array.of(1), bigEndian(body.length, 7), body]);
}

// A file of encoded frames, {data, key, time} each, time in milliseconds; every key frame begins a cluster, of at most
// 32 seconds. codec: "V_VP9" or "V_VP8".
function webmFile(frames, { codec, width, height, fps }) {
  const head = ebml(
    0x1a45dfa3,
    ...[ebml(0x4286, 1), ebml(0x42f7, 1), ebml(0x42f2, 4), ebml(0x42f3, 8)],
    ...[ebml(0x4282, "webm"), ebml(0x4287, 4), ebml(0x4285, 2)],
  );
  const duration = frames.at(-1).time + 1000 / fps;
  const info = ebml(
    0x1549a966,
    ...[ebml(0x2ad7b1, 1000000), ebml(0x4489, float64Bytes(duration)), ebml(0x4d80, "gpu_vecenv"), ebml(0x5741, "gpu_vecenv")],
  );
  const video = ebml(0xe0, ebml(0xb0, width), ebml(0xba, height));
  const track = ebml(0xae, ebml(0xd7, 1), ebml(0x73c5, 1), ebml(0x83, 1), ebml(0x86, codec), ebml(0x23e383, Math.round(1e9 / fps)), video);
  const clusters = [];
  for (const { data, key, time } of frames) {
    if (key) clusters.push({ time, blocks: [] });
    const { time: start, blocks } = clusters.at(-1);
    blocks.push(ebml(0xa3, Uint8Array.of(0x81), bigEndian(time - start, 2), Uint8Array.of(key ? 0x80 : 0), data));
  }
  const written = clusters.map(({ time, blocks }) => ebml(0x1f43b675, ebml(0xe7, time), ...blocks));
  return joined([head, ebml(0x18538067, info, ebml(0x1654ae6b, track), ...written)]);
}
