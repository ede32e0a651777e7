// Words for bytes and times, round numbers, and elements that hold text only.

/** Return a number with the unit that fits and at most two decimals, as cudatool.units does. */
function withUnit(value, units, step) {
  let unit = 0;
  let size = Math.abs(value);
  while (unit < units.length - 1 && Number(size.toFixed(2)) >= step) { size /= step; unit++; }
  return `${value < 0 ? "-" : ""}${Number(size.toFixed(2))} ${units[unit]}`;
}
const formatBytes = (size) => size === null ? "unknown" : withUnit(size, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const formatTime = (ns) => withUnit(ns, ["ns", "us", "ms", "s"], 1000);
/** Return a moment, to the microsecond. */
function formatMoment(ns) {
  const [divisor, unit, digits] = ns >= 1e9 ? [1e9, "s", 6] : ns >= 1e6 ? [1e6, "ms", 3] : ns >= 1e3 ? [1e3, "us", 1] : [1, "ns", 0];
  return ns === 0 ? "0 s" : `${Number((ns / divisor).toFixed(digits))} ${unit}`;
}
const formatCount = (count) => count.toLocaleString("en-US");
/** Return a share in percent, as cudatool.units does: rounding never makes it all or nothing. */
function formatShare(share) {
  const text = (100 * share).toFixed(1);
  return text === "100.0" && share < 1 ? "> 99.9 %" : text === "0.0" && share > 0 ? "< 0.1 %" : `${text} %`;
}
const counted = (count, one, many = `${one}s`) => `${formatCount(count)} ${count === 1 ? one : many}`;

/** Return the first index of a sorted array, from `low` on, whose value is above `value`. */
function upperBound(array, value, low = 0, high = array.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/** Return the first index with the highest value in a part of an array. */
function highest(values, from, to) {
  let best = from;
  for (let i = from + 1; i < to; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** Return round numbers that divide a range into at most about `count` steps, each at least `least` wide. */
function ticks(low, high, count, base = 10, least = 0) {
  const span = (high - low) / Math.max(count, 1);
  if (!(span > 0)) return [];
  let step;
  if (base === 2) {
    step = 2 ** Math.ceil(Math.log2(span));
  } else {
    const power = 10 ** Math.floor(Math.log10(span));
    step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= span);
  }
  step = Math.max(step, least);
  const result = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) result.push(value);
  return result;
}

/** Return words for a tick, with enough digits to distinguish it from its neighbours. */
function formatTick(value, step, kind) {
  if (kind !== "time") return formatCount(Math.round(value));
  if (value === 0) return "0";
  const [divisor, unit] = value >= 1e9 ? [1e9, "s"] : value >= 1e6 ? [1e6, "ms"] : value >= 1e3 ? [1e3, "us"] : [1, "ns"];
  const digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / divisor) + 1e-9)));
  return `${(value / divisor).toFixed(digits)} ${unit}`;
}

/** Make an element; children and texts are appended as text, never as markup. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return a text as pieces, with the parts between backquotes as code. */
const inCode = (text) => text.split("`").map((piece, i) => (i % 2 ? element("code", {}, piece) : piece)).filter((piece) => piece !== "");

/** Return a frame of a stack as a list item, with its line of source below if it is known. */
const frameItem = (text, code) => element("li", {}, text, code ? element("code", {}, code) : null);

const chip = (label, colour) => element("span", { className: "chip" }, swatch(colour), label);

function swatch(colour) {
  const made = element("span", { className: "swatch" });
  made.style.backgroundColor = colour;
  return made;
}

const byId = (id) => document.getElementById(id);
