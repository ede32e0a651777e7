// The document's columns, and words for bytes and times.

const TYPES = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f64: Float64Array };

/** Return the numbers in a column as a typed array (see payload.py for the format). */
function decodeColumn(column) {
  const text = atob(column.b);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stored = new TYPES[column.d](bytes.buffer); // every machine with a browser is little-endian
  if (column.scale === 1 && column.base === 0) return stored;
  const values = new Float64Array(column.n);
  for (let i = 0; i < values.length; i++) values[i] = column.base + column.scale * stored[i];
  return values;
}

/** Return an object of columns with each of them decoded; everything else stays as it is. */
function decodeColumns(table) {
  const isColumn = (value) => value !== null && typeof value === "object" && typeof value.b === "string";
  return Object.fromEntries(Object.entries(table).map(([key, value]) => [key, isColumn(value) ? decodeColumn(value) : value]));
}

function withUnit(value, units, step) {
  if (value === 0) return `0 ${units[0] === "ns" ? "s" : units[0]}`;
  let unit = 0;
  let size = Math.abs(value);
  while (unit < units.length - 1 && size >= step * 0.999995) { size /= step; unit++; }
  const digits = size >= 100 || unit === 0 ? 0 : size >= 10 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${Number(size.toFixed(digits))} ${units[unit]}`;
}
const formatBytes = (size) => withUnit(size, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const formatTime = (ns) => withUnit(ns, ["ns", "us", "ms", "s"], 1000);
const formatCount = (count) => count.toLocaleString("en-US");
const formatShare = (share) => `${(100 * share).toFixed(1)} %`;

/** Return the first index of a sorted array whose value is above `value`. */
function upperBound(array, value, end = array.length) {
  let low = 0;
  let high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/** Return round numbers that divide a range into about `count` steps. */
function ticks(low, high, count, base = 10) {
  const span = (high - low) / Math.max(count, 1);
  if (!(span > 0)) return [];
  let step;
  if (base === 2) {
    step = 2 ** Math.ceil(Math.log2(span));
  } else {
    const power = 10 ** Math.floor(Math.log10(span));
    step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= span);
  }
  const result = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) result.push(value);
  return result;
}

/** Make an element; children and texts are appended as text, never as markup. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}
const byId = (id) => document.getElementById(id);
