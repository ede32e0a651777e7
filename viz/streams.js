// Streams over time, with their operations.

const LANE = 34;
const COPY = 41, FILL = 42; // Kind.MEMCPY, Kind.MEMSET

class StreamsView {
  constructor(shared, data) {
    this.shared = shared;
    const ran = data.operations;
    this.ran = ran;
    this.names = data.names;
    this.marks = []; // highlighted operations
    const used = new Set(ran.stream);
    this.streams = data.streams.filter((stream) => used.has(stream.id));
    const known = new Set(this.streams.map((stream) => stream.id));
    for (const id of used) if (!known.has(id)) this.streams.push({ id, label: `stream ${id}`, busy: 0, device: 0 });
    const lane = this.lane = new Map(this.streams.map((stream, row) => [stream.id, row]));
    this.lanes = this.streams.map(() => []);
    for (let i = 0; i < ran.start.length; i++) this.lanes[lane.get(ran.stream[i])].push(i); // each sorted by start
    this.end = ran.end.reduce((latest, end) => Math.max(latest, end), 1);
    const canvas = byId("streams");
    canvas.style.height = `${this.streams.length * LANE + TICK_HEIGHT}px`;
    const bounds = { x0: 0, x1: this.end, y0: 0, y1: this.streams.length };
    this.plane = new Plane(canvas, { bounds, left: 150, right: 0, draw: (plane) => this.draw(plane), describe: (x, y) => this.describe(x, y) });
    byId("streams-whole").addEventListener("click", () => this.plane.setView(bounds));
    if (!ran.timed) byId("streams-clock").textContent = "Each operation at the host's time of its call: when the device ran it was not recorded";
    theme.listeners.push(() => this.plane.draw());
  }

  /** Highlight operations with a letter each, and show them with the operations around them. */
  mark(marks) {
    this.marks = marks;
    const { ran, plane } = this;
    if (!marks.length) {
      plane.draw();
      return;
    }
    const from = Math.min(...marks.map(({ operation }) => ran.start[operation]));
    const to = Math.max(...marks.map(({ operation }) => ran.end[operation]));
    const margin = Math.max((to - from) * 0.6, this.end * 1e-6);
    plane.setView({ ...plane.bounds, x0: from - margin, x1: to + margin });
  }

  /** Outline the highlighted operations, each with its letter, and join them. */
  drawMarks(plane) {
    const { context, ratio, view } = plane;
    const points = this.marks.map(({ operation: i }) => {
      const row = this.lane.get(this.ran.stream[i]);
      const left = plane.inset + (this.ran.start[i] - view.x0) * plane.scaleX;
      const right = Math.max(plane.inset + (this.ran.end[i] - view.x0) * plane.scaleX, left + 3 * ratio);
      return { left, right, top: (row + 0.08 - view.y0) * plane.scaleY, bottom: (row + 0.92 - view.y0) * plane.scaleY };
    });
    context.save();
    context.beginPath();
    context.rect(plane.inset, 0, plane.width, plane.height);
    context.clip();
    context.strokeStyle = context.fillStyle = theme.peak;
    context.lineWidth = 2.5 * ratio;
    for (const { left, right, top, bottom } of points) context.strokeRect(left, top, right - left, bottom - top);
    const middle = ({ left, right, top, bottom }) => [(left + right) / 2, (top + bottom) / 2];
    if (points.length === 2) {
      context.setLineDash([5 * ratio, 4 * ratio]);
      context.beginPath();
      context.moveTo(...middle(points[0]));
      context.lineTo(...middle(points[1]));
      context.stroke();
      context.setLineDash([]);
    }
    context.font = `bold ${12 * ratio}px ${FONT}`;
    context.textAlign = "center";
    points.forEach((point, i) => {
      const [x, y] = middle(point);
      context.fillStyle = theme.peak;
      context.beginPath();
      context.arc(x, y, 9 * ratio, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = "#ffffff";
      context.fillText(this.marks[i].letter, x, y);
    });
    context.restore();
  }

  colour(i) {
    const kind = this.ran.kind[i];
    if (kind === COPY) return "#f28e2b";
    if (kind === FILL) return "#edc948";
    return ["#4e79a7", "#59a14f", "#b07aa1", "#76b7b2", "#5b8ff9", "#9c755f", "#8c6bb1", "#86bc4b"][this.ran.name[i] % 8];
  }

  draw(plane) {
    const { ran } = this;
    const { view, ratio } = plane;
    plane.beginRaster(theme.pixels.card);
    const lane = theme.pixels.unused;
    const texts = [];
    this.lanes.forEach((operations, row) => {
      plane.rectangle(view.x0, view.x1, row + 0.12, row + 0.88, mix(lane, theme.pixels.card, 0.5), false);
      for (const i of operations) {
        if (ran.start[i] > view.x1) break;
        if (ran.end[i] < view.x0) continue;
        plane.rectangle(ran.start[i], ran.end[i], row + 0.12, row + 0.88, pixel(this.colour(i)), true);
        const wide = (Math.min(ran.end[i], view.x1) - Math.max(ran.start[i], view.x0)) * plane.scaleX;
        if (wide > 46 * ratio && texts.length < 400) texts.push([i, row, wide]);
      }
    });
    plane.endRaster();
    const { context } = plane;
    plane.axisX((value, step) => formatTick(value, step, "time"));
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = "#ffffff";
    for (const [i, row, wide] of texts) {
      const x = plane.inset + (Math.max(ran.start[i], view.x0) - view.x0) * plane.scaleX + 5 * ratio;
      const y = (row + 0.5 - view.y0) * plane.scaleY;
      let name = this.names[ran.name[i]] || "operation";
      const fits = Math.floor((wide - 8 * ratio) / (6.2 * ratio));
      if (name.length > fits) name = `${name.slice(0, Math.max(1, fits - 1))}…`;
      context.fillText(name, x, y);
    }
    this.drawMarks(plane);
    context.textAlign = "left";
    context.fillStyle = theme.text;
    this.streams.forEach((stream, row) => {
      const y = (row + 0.5 - view.y0) * plane.scaleY;
      if (y > 0 && y < plane.height) context.fillText(stream.label.slice(0, 22), 2 * ratio, y, plane.inset - 8 * ratio);
    });
  }

  describe(x, y) {
    const row = Math.floor(y);
    if (!this.lanes[row]) return null;
    const { ran } = this;
    const reach = 1.5 / this.plane.scaleX; // operations thinner than a pixel can be hit, too
    const found = this.lanes[row].find((i) => ran.start[i] - reach <= x && x < ran.end[i] + reach);
    if (found === undefined) return this.streams[row].label;
    const size = ran.size[found] ? `, ${formatBytes(ran.size[found])}` : "";
    return [
      `${this.names[ran.name[found]] || "operation"}${size}`,
      `${ran.timed ? `${formatTime(ran.end[found] - ran.start[found])}, from` : "called at"} ${formatTime(ran.start[found])}, ${this.streams[row].label}`,
      ...this.shared.stacks.lines(ran.stack[found]).slice(0, 8),
    ].join("\n");
  }
}
