// MP4 files with one track of H.264: ISO/IEC 14496-12 and 14496-15.

const MATRIX = [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000];

// A box: its size, its type, its content.
function mp4Box(type, ...content) {
  const body = contents(content);
  return joined([bigEndian(body.length + 8, 4), ascii(type), body]);
}

// A file of encoded frames, {data, key} each, shown for 1 / fps seconds. description: the encoder's AVCDecoderConfigurationRecord.
function mp4File(frames, { width, height, fps, description }) {
  const short = (...values) => joined(values.map((value) => bigEndian(value, 2)));
  const duration = frames.length;
  const keys = frames.flatMap(({ key }, k) => (key ? [k + 1] : []));
  const type = mp4Box("ftyp", "isom", 512, "isomavc1mp41");
  const data = mp4Box("mdat", ...frames.map((frame) => frame.data));
  const entry = [new Uint8Array(6), short(1), new Uint8Array(16), short(width, height), 0x480000, 0x480000, 0, short(1), new Uint8Array(32), short(24, 0xffff)];
  const samples = mp4Box(
    "stbl",
    mp4Box("stsd", 0, 1, mp4Box("avc1", ...entry, mp4Box("avcC", description))),
    mp4Box("stts", 0, 1, duration, 1),
    mp4Box("stss", 0, keys.length, ...keys),
    mp4Box("stsc", 0, 1, 1, duration, 1),
    mp4Box("stsz", 0, 0, duration, ...frames.map((frame) => frame.data.length)),
    mp4Box("stco", 0, 1, type.length + 8),
  );
  const media = mp4Box(
    "mdia",
    mp4Box("mdhd", 0, 0, 0, fps, duration, short(0x55c4, 0)),
    mp4Box("hdlr", 0, 0, "vide", 0, 0, 0, "video\0"),
    mp4Box("minf", mp4Box("vmhd", 1, 0, 0), mp4Box("dinf", mp4Box("dref", 0, 1, mp4Box("url ", 1))), samples),
  );
  const track = mp4Box("trak", mp4Box("tkhd", 3, 0, 0, 1, 0, duration, 0, 0, 0, 0, ...MATRIX, width * 0x10000, height * 0x10000), media);
  const movie = mp4Box("mvhd", 0, 0, 0, fps, duration, 0x10000, 0x1000000, 0, 0, ...MATRIX, 0, 0, 0, 0, 0, 0, 2);
  return joined([type, data, mp4Box("moov", movie, track)]);
}
