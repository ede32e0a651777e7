// The payload's columns (see payload.py for the format).

const TYPES = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f64: Float64Array };

/** Decode a base64 text and return its inflated bytes. */
async function inflate(text) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const inflater = new DecompressionStream("deflate");
  const writer = inflater.writable.getWriter();
  writer.write(packed);
  writer.close();
  return new Response(inflater.readable).arrayBuffer();
}

/** Return the payload's document, with a typed array in place of each column. */
function readPayload(buffer) {
  const length = new DataView(buffer).getUint32(0, true); // every machine with a browser is little-endian
  const document = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const decode = (node) => {
    if (node === null || typeof node !== "object") return node;
    if ("at" in node && "d" in node) return decodeColumn(node, buffer, 4 + length);
    for (const key of Object.keys(node)) node[key] = decode(node[key]);
    return node;
  };
  return decode(document);
}

function decodeColumn({ at, n, d, base, scale, delta, planes }, buffer, columns) {
  let stored = new TYPES[d](buffer, columns + at, n);
  if (planes) {
    const bytes = new Uint8Array(buffer, columns + at, n * stored.BYTES_PER_ELEMENT);
    stored = new TYPES[d](n);
    const joined = new Uint8Array(stored.buffer);
    const width = stored.BYTES_PER_ELEMENT;
    for (let plane = 0; plane < width; plane++) for (let i = 0; i < n; i++) joined[i * width + plane] = bytes[plane * n + i];
  }
  if (!delta && base === 0 && scale === 1) return stored;
  const values = new Float64Array(n);
  if (delta) {
    let [sum, low] = delta;
    for (let i = 0; i < n; i++) values[i] = base + scale * (sum += stored[i] + low);
  } else {
    for (let i = 0; i < n; i++) values[i] = base + scale * stored[i];
  }
  return values;
}
