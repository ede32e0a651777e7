// Bytes by rank and step, as a picture of coloured cells, and the curve of one rank over them.

const NONE = -1; // a rank without this step

/** Return the middle of sorted numbers. */
const middleOf = (sorted) => (sorted.length % 2 ? sorted[(sorted.length - 1) / 2] : (sorted[sorted.length / 2 - 1] + sorted[sorted.length / 2]) / 2);

/** The cells of a run: bytes by rank and column, and for each column the least, the median and the most of them. */
class StepCells {
  constructor(memory, ranks) {
    this.ranks = ranks;
    this.peak = memory.peak;
    this.width = memory.width;
    this.columns = memory.peak.length / ranks;
    this.steps = memory.steps;
    this.least = new Float64Array(this.columns).fill(NONE);
    this.median = new Float64Array(this.columns).fill(NONE);
    this.most = new Float64Array(this.columns).fill(NONE);
    for (let column = 0; column < this.columns; column++) {
      const values = [];
      for (let row = 0; row < ranks; row++) if (this.at(row, column) !== NONE) values.push(this.at(row, column));
      if (!values.length) continue;
      values.sort((a, b) => a - b);
      this.least[column] = values[0];
      this.most[column] = values.at(-1);
      this.median[column] = middleOf(values);
    }
    const known = Array.from(this.least).filter((value) => value !== NONE);
    this.low = Math.min(...known);
    this.high = Math.max(...this.most);
    this.furthest = new Float64Array(ranks);
    for (let row = 0; row < ranks; row++) {
      for (let column = 0; column < this.columns; column++) this.furthest[row] = Math.max(this.furthest[row], Math.abs(this.beside(row, column)));
    }
    this.range = Math.max(1, this.high / 100, ...this.furthest); // less than a percent is no picture
  }

  at(row, column) {
    return this.peak[row * this.columns + column];
  }

  /** Return how far a cell is above the median of its column, in bytes. */
  beside(row, column) {
    const value = this.at(row, column);
    return value === NONE ? 0 : value - this.median[column];
  }

  /** Return the name of a column's steps. */
  named(column) {
    const first = column * this.width;
    const last = Math.min(this.steps, first + this.width) - 1;
    return first === last ? `step ${formatCount(first)}` : `steps ${formatCount(first)} to ${formatCount(last)}`;
  }
}

/** The picture of all cells: ranks from top to bottom in an order, steps from left to right. */
class HeatMap {
  /** `view` has `cells`, `order` (rows from the top), `colourBy()`, `row`, `column`, `isMarked(row)`, `rank(row)` and `choose(row, column)`. */
  constructor(canvas, view) {
    this.view = view;
    this.plane = new Plane(canvas, {
      bounds: { x0: 0, x1: 1, y0: 0, y1: 1 }, draw: () => this.draw(), describe: (x, y) => this.describe(x, y),
      onPick: (x, y) => this.pick(x, y), onKey: (event) => this.key(event),
    });
  }

  /** Show the cells of another run, or in another order. */
  reset() {
    const { cells, order } = this.view;
    Object.assign(this.plane, { bounds: { x0: 0, x1: cells.columns, y0: 0, y1: order.length } });
    this.plane.canvas.style.height = `${Math.min(640, Math.max(120, order.length * 22)) + TICK_HEIGHT}px`;
    this.place = new Int32Array(order.length);
    order.forEach((row, at) => { this.place[row] = at; });
    // Where several ranks share a pixel, the one that is furthest from the others is seen.
    this.last = Array.from(order).sort((a, b) => cells.furthest[a] - cells.furthest[b]);
    this.plane.view = { ...this.plane.bounds };
    this.plane.draw();
  }

  colour(row, column) {
    const { cells } = this.view;
    const value = cells.at(row, column);
    const { pixels } = theme;
    if (value === NONE) return pixels.card;
    if (this.view.colourBy() === "bytes") return mix(pixels.unused, pixels.accent, cells.high > cells.low ? (value - cells.low) / (cells.high - cells.low) : 0.5);
    const share = cells.beside(row, column) / cells.range;
    return mix(pixels.unused, share > 0 ? pixels.peak : pixels.accent, Math.sqrt(Math.abs(share)));
  }

  draw() {
    const { plane, view } = this;
    const { cells, order } = view;
    const { context, ratio } = plane;
    if (!cells) return; // of a run without steps
    plane.beginRaster(theme.pixels.card);
    const first = Math.max(0, Math.floor(plane.view.x0));
    const end = Math.min(cells.columns, Math.ceil(plane.view.x1));
    for (const row of this.last) {
      const y = this.place[row];
      if (y + 1 < plane.view.y0 || y > plane.view.y1) continue;
      for (let column = first; column < end; column++) plane.rectangle(column, column + 1, y, y + 1, this.colour(row, column), plane.scaleY > 8);
    }
    plane.endRaster();
    plane.axisX((value) => formatCount(value * cells.width), { counts: true });
    this.drawRanks();
    context.strokeStyle = theme.text;
    context.lineWidth = 1.5 * ratio;
    const x = plane.inset + (view.column - plane.view.x0) * plane.scaleX;
    const y = (this.place[view.row] - plane.view.y0) * plane.scaleY;
    context.save();
    context.beginPath();
    context.rect(plane.inset, 0, plane.width, plane.height);
    context.clip();
    context.strokeRect(x, y, Math.max(plane.scaleX, 3 * ratio), Math.max(plane.scaleY, 3 * ratio));
    context.restore();
    if (order.length) plane.outlineSelection();
  }

  /** Write ranks at the left, as many as fit, and mark those that differ. */
  drawRanks() {
    const { plane, view } = this;
    const { context, ratio, scaleY } = plane;
    context.font = `${11 * ratio}px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const taken = [];
    // Those that differ have their names first.
    for (const marked of [true, false]) {
      const first = Math.max(0, Math.floor(plane.view.y0));
      const end = Math.min(view.order.length, Math.ceil(plane.view.y1));
      for (let at = first; at < end; at++) {
        const row = view.order[at];
        if (view.isMarked(row) !== marked) continue;
        const top = (at - plane.view.y0) * scaleY;
        const middle = top + scaleY / 2;
        context.fillStyle = marked ? theme.peak : theme.quiet;
        if (marked) context.fillRect(plane.inset - 6 * ratio, Math.min(top, middle - 2 * ratio), 4 * ratio, Math.max(scaleY - 1, 4 * ratio));
        if (middle < 6 * ratio || middle > plane.height - 4 * ratio || taken.some((y) => Math.abs(y - middle) < 13 * ratio)) continue;
        context.fillText(`rank ${view.rank(row)}`, plane.inset - 10 * ratio, middle);
        taken.push(middle);
      }
    }
  }

  cellAt(x, y) {
    const { cells, order } = this.view;
    const at = Math.min(Math.max(Math.floor(y), 0), order.length - 1);
    return [order[at], Math.min(Math.max(Math.floor(x), 0), cells.columns - 1)];
  }

  describe(x, y) {
    return this.view.words(...this.cellAt(x, y)).join("\n");
  }

  pick(x, y) {
    this.view.choose(...this.cellAt(x, y));
  }

  key(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by || event.shiftKey) return false;
    const [row, column] = this.cellAt(this.view.column + by[1], this.place[this.view.row] + by[0]);
    this.view.choose(row, column);
    this.reveal();
    return true;
  }

  /** Move the window so that the chosen cell is in it. */
  reveal() {
    const { plane, view } = this;
    const window = { ...plane.view };
    for (const [low, high, at] of [["x0", "x1", view.column], ["y0", "y1", this.place[view.row]]]) {
      const by = Math.min(0, at - window[low]) + Math.max(0, at + 1 - window[high]);
      window[low] += by;
      window[high] += by;
    }
    plane.setView(window, false);
  }
}
