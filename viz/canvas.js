// A canvas with a window onto a larger plane: raster drawing, zoom, pan, keys, tooltip.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Twelve colours that stay apart in both themes; red is left to the peak.
const PALETTE = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#ff9da7", "#edc948", "#9c755f", "#5b8ff9", "#d37295", "#86bc4b", "#8c6bb1"];
const paletteColour = (index) => PALETTE[index % PALETTE.length];

/** Return a CSS colour "#rrggbb" as the 32-bit value of a canvas pixel. */
function pixel(colour) {
  const value = parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
/** Mix two pixels. */
function mix(one, other, share) {
  let result = 0xff000000;
  for (const shift of [0, 8, 16]) {
    const a = (one >> shift) & 0xff;
    const b = (other >> shift) & 0xff;
    result |= Math.round(a + (b - a) * share) << shift;
  }
  return result >>> 0;
}

const TICK_HEIGHT = 22;
const TICK_WIDTH = 110;
const PLOT_LEFT = 74; // the curves and the map below them share one horizontal axis
const PLOT_RIGHT = 12;

class Plane {
  /**
   * `bounds` is {x0, x1, y0, y1}; `draw(plane)` paints; `describe(x, y)` returns the tooltip's text or null.
   * `onView` is called after the user moved the window, `onPick(x)` after a click.
   */
  constructor(canvas, { bounds, left = 0, right = 0, draw, describe, onView = () => {}, onPick = null }) {
    Object.assign(this, { canvas, bounds, left, right, drawNow: draw, describe, onView, onPick });
    this.view = { ...bounds };
    this.context = canvas.getContext("2d");
    this.pending = 0;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Draw with the next frame, once, however often this was called. */
  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      const ratio = window.devicePixelRatio || 1;
      const width = Math.max(1, Math.round(this.canvas.clientWidth * ratio));
      const height = Math.max(1, Math.round(this.canvas.clientHeight * ratio));
      if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
      this.ratio = ratio;
      this.inset = Math.round(this.left * ratio); // labels stand left of it
      this.width = Math.max(1, width - this.inset - Math.round(this.right * ratio));
      this.height = Math.max(1, height - Math.round(TICK_HEIGHT * ratio));
      this.scaleX = this.width / (this.view.x1 - this.view.x0);
      this.scaleY = this.height / (this.view.y1 - this.view.y0);
      this.drawNow(this);
    });
  }

  /** Start a picture: rectangles go into a pixel buffer, which costs the same however many there are. */
  beginRaster(colour) {
    if (!this.image || this.image.width !== this.width || this.image.height !== this.height) {
      this.image = this.context.createImageData(this.width, this.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(colour);
  }

  /** Fill a rectangle, given on the plane; at least one pixel. `gap` leaves its last column and row free. */
  rectangle(x0, x1, y0, y1, colour, gap) {
    const { view, width, height } = this;
    let left = Math.floor((x0 - view.x0) * this.scaleX);
    let right = Math.floor((x1 - view.x0) * this.scaleX);
    let top = Math.floor((y0 - view.y0) * this.scaleY);
    let bottom = Math.floor((y1 - view.y0) * this.scaleY);
    if (gap) {
      if (right - left > 4) right--;
      if (bottom - top > 3) bottom--;
    }
    left = Math.max(left, 0);
    top = Math.max(top, 0);
    right = Math.min(Math.max(right, left + 1), width);
    bottom = Math.min(Math.max(bottom, top + 1), height);
    const { pixels } = this;
    for (let row = top * width; row < bottom * width; row += width) {
      if (right - left < 8) for (let i = row + left; i < row + right; i++) pixels[i] = colour;
      else pixels.fill(colour, row + left, row + right);
    }
  }

  /** Show the buffer, on a cleared canvas. */
  endRaster() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.putImageData(this.image, this.inset, 0);
  }

  /** Draw the labels of the horizontal axis. */
  axis(format) {
    const { context, ratio, view } = this;
    context.font = `${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    context.fillStyle = styleOf("--quiet");
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const value of ticks(view.x0, view.x1, this.width / (TICK_WIDTH * ratio))) {
      const at = this.inset + (value - view.x0) * this.scaleX;
      const half = context.measureText(format(value)).width / 2;
      const inside = Math.min(Math.max(at, this.inset + half), this.inset + this.width - half);
      context.fillText(format(value), inside, this.height + (TICK_HEIGHT * ratio) / 2 + ratio);
      context.fillRect(Math.round(at), this.height, ratio, 3 * ratio);
    }
  }

  setView(view, tell = true) {
    const { bounds } = this;
    for (const [low, high] of [["x0", "x1"], ["y0", "y1"]]) {
      const whole = bounds[high] - bounds[low];
      const span = Math.min(Math.max(view[high] - view[low], whole * 1e-7), whole);
      const begin = Math.min(Math.max(view[low], bounds[low]), bounds[high] - span);
      this.view[low] = begin;
      this.view[high] = begin + span;
    }
    this.draw();
    if (tell) this.onView();
  }

  zoom(factor, vertical, shareX = 0.5, shareY = 0.5) {
    const view = { ...this.view };
    const [low, high, share] = vertical ? ["y0", "y1", shareY] : ["x0", "x1", shareX];
    const span = (view[high] - view[low]) * factor;
    view[low] += (view[high] - view[low] - span) * share;
    view[high] = view[low] + span;
    this.setView(view);
  }

  pan(x, y) {
    const { view } = this;
    this.setView({ x0: view.x0 + x, x1: view.x1 + x, y0: view.y0 + y, y1: view.y1 + y });
  }

  /** Return where a pointer is: shares of the drawing, and the point on the plane. */
  locate(event) {
    const box = this.canvas.getBoundingClientRect();
    const shareX = (event.clientX - box.left - this.left) / Math.max(1, box.width - this.left - this.right);
    const shareY = (event.clientY - box.top) / Math.max(1, box.height - TICK_HEIGHT);
    const { view } = this;
    return {
      shareX, shareY, inside: shareX >= 0 && shareX <= 1 && shareY <= 1,
      x: view.x0 + shareX * (view.x1 - view.x0), y: view.y0 + shareY * (view.y1 - view.y0),
    };
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { shareX, shareY } = this.locate(event);
      const turned = event.deltaY || event.deltaX; // with Shift some browsers turn it sideways
      this.zoom(Math.exp(Math.sign(turned) * Math.min(Math.abs(turned), 120) * 0.002), event.shiftKey, shareX, shareY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        const at = this.locate(event);
        showTip(at.inside ? this.describe(at.x, at.y) : null, event.clientX, event.clientY);
        return;
      }
      const x = event.clientX - drag.x;
      const y = event.clientY - drag.y;
      if (!drag.moved && Math.hypot(x, y) < 4) return;
      showTip(null);
      drag = { x: event.clientX, y: event.clientY, moved: true };
      this.pan((-x * this.ratio) / this.scaleX, (-y * this.ratio) / this.scaleY);
    });
    canvas.addEventListener("pointerup", (event) => {
      const at = this.locate(event);
      if (drag && !drag.moved && this.onPick && at.inside) this.onPick(at.x);
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => showTip(null));
    canvas.addEventListener("keydown", (event) => {
      const { view } = this;
      const x = (view.x1 - view.x0) / 8;
      const y = (view.y1 - view.y0) / 8;
      const actions = {
        ArrowLeft: () => this.pan(-x, 0), ArrowRight: () => this.pan(x, 0),
        ArrowUp: () => this.pan(0, -y), ArrowDown: () => this.pan(0, y),
        "+": () => this.zoom(0.7, false), "=": () => this.zoom(0.7, false), "-": () => this.zoom(1 / 0.7, false),
        "*": () => this.zoom(0.7, true), _: () => this.zoom(1 / 0.7, true),
        0: () => this.setView(this.bounds),
        Enter: () => this.onPick && this.onPick((view.x0 + view.x1) / 2),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
  }
}

function showTip(text, x = 0, y = 0) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > window.innerHeight ? Math.max(4, y - tip.offsetHeight - 10) : y + 18}px`;
}
