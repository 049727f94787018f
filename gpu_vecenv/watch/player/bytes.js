// Bytes of files.

const joined = (parts) => {
  const all = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
};

// Bytes of a whole number, the highest first.
function bigEndian(value, width) {
  return Uint8Array.from({ length: width }, (_, k) => Math.floor(value / 256 ** (width - 1 - k)) % 256);
}

const ascii = (text) => new TextEncoder().encode(text);

// What a box or an element holds: bytes, text, and numbers of 32 bits.
const contents = (parts) => joined(parts.map((one) => (typeof one === "number" ? bigEndian(one, 4) : typeof one === "string" ? ascii(one) : one)));
