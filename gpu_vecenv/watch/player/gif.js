// GIF files that repeat for ever: https://www.w3.org/Graphics/GIF/spec-gif89a.txt

const GIF_COLOURS = 255; // of one picture; one more stands for pixels that stay as they are
const GIF_CODES = 4096; // of LZW, of at most 12 bits

// A picture holds the smallest rectangle of what changed, and its own colours: exactly where there are at most 255.
class GifFile {
  constructor(width, height) {
    Object.assign(this, { width, height, before: null, timing: null, delay: 0 });
    const screen = Uint8Array.of(width, width >> 8, height, height >> 8, 0, 0, 0);
    const repeated = Uint8Array.of(0x21, 0xff, 11, ...ascii("NETSCAPE2.0"), 3, 1, 0, 0, 0);
    this.parts = [ascii("GIF89a"), screen, repeated];
  }

  // Adds a picture of opaque RGBA bytes, shown for `delay` hundredths of a second.
  add(rgba, delay) {
    const pixels = new Uint32Array(rgba.buffer, rgba.byteOffset, rgba.length / 4).slice();
    const changed = this.#changed(pixels);
    if (changed === null && this.delay + delay <= 0xffff) return this.#show(this.delay + delay);
    const { indices, colours, rectangle } = this.#indexed(pixels, changed ?? [0, 0, 1, 1]);
    const bits = Math.max(2, Math.ceil(Math.log2(colours.length + 1)));
    const table = new Uint8Array(3 * 2 ** bits);
    colours.forEach((colour, k) => table.set([colour, colour >> 8, colour >> 16], 3 * k));
    this.timing = Uint8Array.of(0x21, 0xf9, 4, 0b101, 0, 0, colours.length, 0);
    this.#show(delay);
    const place = rectangle.flatMap((length) => [length & 255, length >> 8]);
    this.parts.push(this.timing, Uint8Array.of(0x2c, ...place, 0x80 | (bits - 1)), table, Uint8Array.of(bits), lzwBlocks(indices, bits));
    this.before = pixels;
  }

  bytes() {
    return joined([...this.parts, Uint8Array.of(0x3b)]);
  }

  #show(delay) {
    this.delay = delay;
    this.timing.set([delay, delay >> 8], 4);
  }

  // Left, top, right and bottom of the pixels that differ from the picture before; null for none.
  #changed(pixels) {
    const { before, width, height } = this;
    if (before === null) return [0, 0, width, height];
    let [left, top, right, bottom] = [width, height, 0, 0];
    for (let y = 0, at = 0; y < height; y++) {
      for (let x = 0; x < width; x++, at++) {
        if (pixels[at] === before[at]) continue;
        left = Math.min(left, x);
        right = Math.max(right, x + 1);
        top = Math.min(top, y);
        bottom = y + 1;
      }
    }
    return right ? [left, top, right, bottom] : null;
  }

  #indexed(pixels, [left, top, right, bottom]) {
    const { before, width } = this;
    const rectangle = [left, top, right - left, bottom - top];
    const own = new Uint32Array(rectangle[2] * rectangle[3]);
    const counts = new Map();
    for (let y = top, k = 0; y < bottom; y++) {
      for (let at = y * width + left; at < y * width + right; at++, k++) {
        own[k] = before && pixels[at] === before[at] ? 0xff000000 : pixels[at] & 0xffffff;
        if (own[k] !== 0xff000000) counts.set(own[k], (counts.get(own[k]) ?? 0) + 1);
      }
    }
    const { colours, indexOf } = fewColours(counts, GIF_COLOURS);
    indexOf.set(0xff000000, colours.length);
    return { colours, rectangle, indices: Uint8Array.from(own, (colour) => indexOf.get(colour)) };
  }
}

// At most `most` colours (blue, green and red bytes of a number) for counted ones, and the index of each of these among
// them. Median cut: the box with the widest range, weighted by its pixels, is halved where half of these lie on each side.
function fewColours(counts, most) {
  const boxOf = (entries) => {
    const weight = entries.reduce((sum, [, count]) => sum + count, 0);
    let [range, shift] = [-1, 0];
    for (const channel of [0, 8, 16]) {
      let [low, high] = [255, 0];
      for (const [colour] of entries) {
        low = Math.min(low, (colour >> channel) & 255);
        high = Math.max(high, (colour >> channel) & 255);
      }
      if (high - low > range) [range, shift] = [high - low, channel];
    }
    return { entries, weight, shift, size: weight * range ** 2 };
  };
  const all = [...counts];
  const boxes = counts.size <= most ? all.map((entry) => boxOf([entry])) : [boxOf(all)];
  while (counts.size > most && boxes.length < most) {
    const widest = boxes.reduce((best, box, k) => (box.size > boxes[best].size ? k : best), 0);
    const { entries, weight, shift } = boxes[widest];
    entries.sort(([one], [other]) => ((one >> shift) & 255) - ((other >> shift) & 255));
    let [cut, sum] = [1, entries[0][1]];
    while (cut < entries.length - 1 && sum < weight / 2) sum += entries[cut++][1];
    boxes.splice(widest, 1, boxOf(entries.slice(0, cut)), boxOf(entries.slice(cut)));
  }
  const indexOf = new Map();
  const colours = boxes.map(({ entries, weight }, k) => {
    for (const [colour] of entries) indexOf.set(colour, k);
    const mean = (shift) => Math.round(entries.reduce((sum, [colour, count]) => sum + ((colour >> shift) & 255) * count, 0) / weight);
    return mean(0) | (mean(8) << 8) | (mean(16) << 16);
  });
  return { colours, indexOf };
}

// Indices of `bits` bits, packed by LZW with codes that grow, in blocks of at most 255 bytes.
function lzwBlocks(indices, bits) {
  const longer = new Uint16Array(GIF_CODES << 8); // code of a string and an index after it -> code of both; 0 for none
  const [clear, end] = [1 << bits, (1 << bits) + 1];
  let [size, next, buffer, filled] = [bits + 1, end + 1, 0, 0];
  const bytes = [];
  const write = (code) => {
    buffer |= code << filled;
    for (filled += size; filled >= 8; filled -= 8, buffer >>>= 8) bytes.push(buffer & 255);
  };
  write(clear);
  let code = indices[0];
  for (let k = 1; k < indices.length; k++) {
    const key = (code << 8) | indices[k];
    if (longer[key]) {
      code = longer[key];
      continue;
    }
    write(code);
    if (next < GIF_CODES) {
      longer[key] = next++;
      if (next > 1 << size && size < 12) size += 1;
    } else {
      write(clear);
      longer.fill(0);
      [size, next] = [bits + 1, end + 1];
    }
    code = indices[k];
  }
  write(code);
  if (next === 1 << size && size < 12) size += 1; // a reader makes another code after each but the first
  write(end);
  if (filled > 0) bytes.push(buffer & 255);
  const blocks = [];
  for (let at = 0; at < bytes.length; at += 255) blocks.push(Uint8Array.of(Math.min(255, bytes.length - at), ...bytes.slice(at, at + 255)));
  return joined([...blocks, Uint8Array.of(0)]);
}
