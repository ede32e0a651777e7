// A canvas with a window onto a larger plane: raster drawing, zoom, pan, pointer and keys.

const FONT = 'system-ui, "DejaVu Sans", sans-serif';
const TICK_HEIGHT = 22;
const TICK_WIDTH = 110;
const LEFT = 78; // drawings above each other share their horizontal axis
const RIGHT = 14;
const HATCH = 9; // pixels between lines
const HATCHED = { pool: 1, stream: 2 }; // diagonal lines in either direction; both together cross

class Plane {
  /**
   * `bounds` is {x0, x1, y0, y1}; `draw(plane)` paints; `describe(x, y)` returns the tooltip's text or null; `axis` is the
   * height that the horizontal axis takes.
   * `onView()` is called after the user moved the window, `onPick(x, y)` after a click, `onKey(event)` for keys that
   * the plane has no use for. While `holdsY()` is true, dragging moves the window sideways only.
   */
  constructor(canvas, { bounds, left = LEFT, right = RIGHT, draw, describe, axis = TICK_HEIGHT, onView = () => {}, onPick = () => {}, onKey = () => false, holdsY = () => false }) {
    Object.assign(this, { canvas, bounds, left, right, paint: draw, describe, axis, onView, onPick, onKey, holdsY });
    this.view = { ...bounds };
    this.context = canvas.getContext("2d", { alpha: false });
    this.pending = 0;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Draw with the next frame, once, however often this was called; before it is printed there is no next frame. */
  draw() {
    if (theme.onScreen) this.drawNow();
    else if (!this.pending) this.pending = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(this.canvas.clientWidth * ratio));
    const height = Math.max(1, Math.round(this.canvas.clientHeight * ratio));
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    this.ratio = ratio;
    this.inset = Math.round(this.left * ratio); // labels are left of it
    this.width = Math.max(1, width - this.inset - Math.round(this.right * ratio));
    this.height = Math.max(1, height - Math.round(this.axis * ratio));
    this.scaleX = this.width / (this.view.x1 - this.view.x0);
    this.scaleY = this.height / (this.view.y1 - this.view.y0);
    this.paint(this);
  }

  /** Start a picture: rectangles go into a pixel buffer, whose cost does not depend on their number. */
  beginRaster(colour) {
    if (!this.image || this.image.width !== this.width || this.image.height !== this.height) {
      this.image = this.context.createImageData(this.width, this.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(colour);
  }

  /** Fill a rectangle of the plane; at least one pixel. `gap` leaves the last column and row of a large one free. */
  rectangle(x0, x1, y0, y1, colour, gap, hatch = 0) {
    const { view, width, height, scaleX, scaleY } = this;
    let left = Math.floor((x0 - view.x0) * scaleX);
    let right = Math.floor((x1 - view.x0) * scaleX);
    let top = Math.floor((y0 - view.y0) * scaleY);
    let bottom = Math.floor((y1 - view.y0) * scaleY);
    if (gap) {
      if (right - left > 4) right--;
      if (bottom - top > 3) bottom--;
    }
    left = Math.max(left, 0);
    top = Math.max(top, 0);
    right = Math.min(Math.max(right, left + 1), width);
    bottom = Math.min(Math.max(bottom, top + 1), height);
    this.fill(left, right, top, bottom, colour, hatch);
  }

  /** Fill a rectangle in pixels of the drawing. */
  fill(left, right, top, bottom, colour, hatch = 0) {
    const { pixels, width } = this;
    for (let row = top * width; row < bottom * width; row += width) {
      if (right - left < 8) for (let i = row + left; i < row + right; i++) pixels[i] = colour;
      else pixels.fill(colour, row + left, row + right);
    }
    if (!hatch || right - left < 5 || bottom - top < 5) return;
    const line = mix(colour, theme.pixels.text, 0.25);
    for (let y = top; y < bottom; y++) {
      // The pattern is aligned with the canvas, not the rectangle: neighbours join.
      if (hatch & HATCHED.pool) for (let x = left + (HATCH - ((left + y) % HATCH)) % HATCH; x < right; x += HATCH) pixels[y * width + x] = line;
      if (hatch & HATCHED.stream) for (let x = left + ((((y - left) % HATCH) + HATCH) % HATCH); x < right; x += HATCH) pixels[y * width + x] = line;
    }
  }

  /** Show the buffer, on a cleared canvas. */
  endRaster() {
    this.context.fillStyle = theme.card;
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.putImageData(this.image, this.inset, 0);
  }

  /** Write the labels of the horizontal axis; `format(value, step)` returns one. `counts` is for an axis of whole numbers. */
  axisX(format, { counts = false } = {}) {
    const { context, ratio, view } = this;
    context.font = `${11 * ratio}px ${FONT}`;
    context.fillStyle = theme.quiet;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const values = ticks(view.x0, view.x1, this.width / (TICK_WIDTH * ratio), 10, counts ? 1 : 0);
    for (const value of values) {
      const text = format(value, values.length > 1 ? values[1] - values[0] : view.x1 - view.x0);
      const at = this.inset + (value - view.x0) * this.scaleX;
      const half = context.measureText(text).width / 2;
      const inside = Math.min(Math.max(at, this.inset + half), this.inset + this.width - half);
      context.fillText(text, inside, this.height + (TICK_HEIGHT * ratio) / 2 + ratio);
      context.fillRect(Math.round(at), this.height, ratio, 3 * ratio);
    }
  }

  /** Write sizes along the vertical axis. */
  axisY(lines = false) {
    const { context, ratio, view } = this;
    context.font = `${11 * ratio}px ${FONT}`;
    context.fillStyle = theme.quiet;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(view.y0, view.y1, this.height / (52 * ratio), 2)) {
      const at = (value - view.y0) * this.scaleY;
      if (at < 6 * ratio || at > this.height - 2 * ratio) continue;
      context.fillText(formatBytes(Math.abs(value)), this.inset - 6 * ratio, Math.min(at, this.height - 6 * ratio));
      if (!lines) continue;
      context.globalAlpha = 0.18;
      context.fillRect(this.inset, Math.round(at), this.width, 1);
      context.globalAlpha = 1;
    }
  }

  /** Draw a vertical line at a position of the plane. */
  line(x, colour, { dash = [], wide = 1 } = {}) {
    const { context, ratio } = this;
    if (x < this.view.x0 || x > this.view.x1) return;
    const at = this.inset + (x - this.view.x0) * this.scaleX;
    context.strokeStyle = colour;
    context.lineWidth = wide * ratio;
    context.setLineDash(dash.map((d) => d * ratio));
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, this.height);
    context.stroke();
    context.setLineDash([]);
  }

  setView(view, tell = true) {
    const { bounds } = this;
    for (const [low, high] of [["x0", "x1"], ["y0", "y1"]]) {
      const whole = bounds[high] - bounds[low];
      const span = Math.min(Math.max(view[high] - view[low], whole * 1e-9), whole);
      const begin = Math.min(Math.max(view[low], bounds[low]), bounds[high] - span);
      this.view[low] = begin;
      this.view[high] = begin + span;
    }
    this.draw();
    if (tell) this.onView();
  }

  /** Zoom by a factor around a share of the window (0 left or above, 1 right or below). */
  zoom(factor, vertical, share = 0.5) {
    const view = { ...this.view };
    const [low, high] = vertical ? ["y0", "y1"] : ["x0", "x1"];
    const span = (view[high] - view[low]) * factor;
    view[low] += (view[high] - view[low] - span) * share;
    view[high] = view[low] + span;
    this.setView(view);
  }

  pan(x, y) {
    const { view } = this;
    const down = this.holdsY() ? 0 : y;
    this.setView({ x0: view.x0 + x, x1: view.x1 + x, y0: view.y0 + down, y1: view.y1 + down });
  }

  /** Return the position of a pointer: as shares of the drawing, and as a point on the plane. */
  locate(event) {
    const box = this.canvas.getBoundingClientRect();
    const shareX = (event.clientX - box.left - this.left) / Math.max(1, box.width - this.left - this.right);
    const shareY = (event.clientY - box.top) / Math.max(1, box.height - this.axis);
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
      if (!event.shiftKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan(((this.view.x1 - this.view.x0) * event.deltaX) / canvas.clientWidth, 0);
        return;
      }
      const turned = event.deltaY || event.deltaX; // with Shift some browsers scroll sideways
      const factor = Math.exp(Math.sign(turned) * Math.min(Math.abs(turned), 120) * 0.002);
      this.zoom(factor, event.shiftKey, event.shiftKey ? shareY : shareX);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, from: this.locate(event), box: event.shiftKey, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const at = this.locate(event);
      if (!drag) {
        showTip(at.inside ? this.describe(at.x, at.y) : null, event.clientX, event.clientY);
        return;
      }
      const x = event.clientX - drag.x;
      const y = event.clientY - drag.y;
      if (!drag.moved && Math.hypot(x, y) < 4) return;
      showTip(null);
      drag.moved = true;
      if (drag.box) {
        this.selected = [drag.from, at];
        this.draw();
        return;
      }
      Object.assign(drag, { x: event.clientX, y: event.clientY });
      this.pan((-x * this.ratio) / this.scaleX, (-y * this.ratio) / this.scaleY);
    });
    canvas.addEventListener("pointerup", (event) => {
      const at = this.locate(event);
      const { from, box, moved } = drag || {};
      drag = this.selected = null;
      if (box && moved) {
        const [x0, x1] = [from.x, at.x].sort((a, b) => a - b);
        const [y0, y1] = [from.y, at.y].sort((a, b) => a - b);
        this.setView({ x0, x1, y0, y1 });
      } else if (!moved && at.inside) this.onPick(at.x, at.y);
    });
    canvas.addEventListener("pointercancel", () => { drag = this.selected = null; });
    canvas.addEventListener("pointerleave", () => showTip(null));
    canvas.addEventListener("blur", () => showTip(null));
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (!this.onKey(event) && !this.key(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** Do the action of a key; return whether it has one. */
  key(event) {
    const { view } = this;
    const x = (view.x1 - view.x0) / 8;
    const y = (view.y1 - view.y0) / 8;
    const actions = {
      ArrowLeft: () => this.pan(-x, 0), ArrowRight: () => this.pan(x, 0),
      ArrowUp: () => this.pan(0, -y), ArrowDown: () => this.pan(0, y),
      PageUp: () => this.pan(-8 * x, 0), PageDown: () => this.pan(8 * x, 0),
      "+": () => this.zoom(0.7, false), "=": () => this.zoom(0.7, false), "-": () => this.zoom(1 / 0.7, false),
      "]": () => this.zoom(0.7, true), "[": () => this.zoom(1 / 0.7, true),
      0: () => this.setView(this.bounds),
    };
    if (!actions[event.key]) return false;
    actions[event.key]();
    return true;
  }

  /** Outline what a drag with Shift has marked so far. */
  outlineSelection() {
    if (!this.selected) return;
    const { context, view, ratio } = this;
    const [x0, x1] = this.selected.map((point) => this.inset + (point.x - view.x0) * this.scaleX);
    const [y0, y1] = this.selected.map((point) => (point.y - view.y0) * this.scaleY);
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.5 * ratio;
    context.strokeRect(x0, y0, x1 - x0, y1 - y0);
    context.globalAlpha = 0.12;
    context.fillStyle = theme.accent;
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
    context.globalAlpha = 1;
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
