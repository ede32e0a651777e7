// Named ranges over the same time as the drawings below: what the program was doing.

const RANGE_LANE = 18;
const RANGE_LANES = 8; // deeper ones are not drawn

class RangeBand {
  constructor(memory) {
    this.memory = memory;
    this.box = byId("ranges-box");
    this.plane = new Plane(byId("ranges"), {
      bounds: { x0: 0, x1: 1, y0: 0, y1: 1 }, draw: () => this.draw(), describe: (x, y) => this.describe(x, y), axis: 0,
      onView: () => memory.setRange(this.plane.view.x0, this.plane.view.x1),
      onPick: (x, y) => this.pick(x, y),
      onKey: (event) => memory.key(event, () => []),
    });
  }

  show(device) {
    const { memory, plane } = this;
    const { ranges } = device;
    const { length } = ranges.name;
    this.box.hidden = !length;
    const inTime = byId("axis").value === "time";
    const after = memory.x[device.rows];
    this.begin = inTime ? ranges.time : Float64Array.from(ranges.start);
    this.end = Float64Array.from(ranges.end, (row, i) => (row >= device.rows ? after : inTime ? ranges.until[i] : row));
    const depth = ranges.lane.reduce((most, lane) => Math.max(most, lane + 1), 1);
    const lanes = Math.min(depth, RANGE_LANES);
    const deeper = depth > lanes ? ranges.lane.reduce((count, lane) => count + (lane >= lanes), 0) : 0;
    byId("ranges-deeper").textContent = deeper ? `${counted(deeper, "range")} deeper inside not drawn` : "";
    plane.canvas.style.height = `${lanes * RANGE_LANE}px`;
    const bounds = { x0: memory.x[0], x1: after, y0: 0, y1: lanes };
    Object.assign(plane, { bounds, view: { ...bounds } });
    this.ranges = ranges;
    this.rank();
  }

  /** Choose the colours: one for names that differ only in numbers, a shade darker every other time. */
  rank() {
    const { names } = this.memory.shared;
    const before = [];
    this.colours = Array.from(this.ranges.name, (name, i) => {
      const lane = this.ranges.lane[i];
      before[lane] = !before[lane];
      const colour = pixel(frameColour(names[name].replace(/\d+/g, "N")));
      return mix(colour, theme.pixels.card, before[lane] ? 0.45 : 0.6);
    });
    this.plane.draw();
  }

  draw() {
    const { plane, ranges, memory } = this;
    if (!ranges) return;
    const { view, ratio, context } = plane;
    plane.beginRaster(theme.pixels.card);
    const texts = [];
    for (let i = 0; i < ranges.name.length; i++) {
      const lane = ranges.lane[i];
      if (this.begin[i] > view.x1 || this.end[i] < view.x0 || lane >= plane.bounds.y1) continue;
      plane.rectangle(this.begin[i], this.end[i], lane, lane + 1, this.colours[i], true);
      const left = Math.max(this.begin[i], view.x0);
      const wide = (Math.min(this.end[i], view.x1) - left) * plane.scaleX;
      if (wide > 24 * ratio && texts.length < 400) texts.push([i, left, wide]);
    }
    plane.endRaster();
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = `${11 * ratio}px ${FONT}`;
    context.fillStyle = theme.text;
    for (const [i, left, wide] of texts) {
      const x = plane.inset + (left - view.x0) * plane.scaleX;
      context.save();
      context.beginPath();
      context.rect(x, 0, wide - 4 * ratio, plane.height);
      context.clip();
      context.fillText(memory.shared.names[ranges.name[i]], x + 4 * ratio, (ranges.lane[i] + 0.5 - view.y0) * plane.scaleY);
      context.restore();
    }
  }

  /** Return the range at a point, the last to begin of those that share a pixel. */
  at(x, y) {
    const reach = 1.5 / this.plane.scaleX;
    const lane = Math.floor(y);
    for (let i = this.ranges.name.length - 1; i >= 0; i--) {
      if (this.ranges.lane[i] === lane && this.begin[i] - reach <= x && x <= this.end[i] + reach) return i;
    }
    return -1;
  }

  describe(x, y) {
    const i = this.at(x, y);
    if (i < 0) return null;
    const { memory } = this;
    const spent = byId("axis").value === "time" ? formatTime(this.end[i] - this.begin[i]) : counted(this.end[i] - this.begin[i], "event");
    return `${memory.shared.names[this.ranges.name[i]]}\n${spent}, from ${memory.formatX(this.begin[i])}; a click shows it alone`;
  }

  /** Let a range take the whole width. */
  pick(x, y) {
    const i = this.at(x, y);
    if (i < 0) return;
    const { x0, x1 } = this.plane.bounds;
    const from = Math.max(this.begin[i], x0);
    this.memory.setRange(from, Math.max(Math.min(this.end[i], x1), from + (x1 - x0) * 1e-6));
  }
}
