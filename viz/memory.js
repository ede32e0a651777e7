// One device's memory over time: the curves (plotly) and the address space (canvas).

const MAX_POINTS = 3000; // of each curve: plotly gets no more, and zooming in brings the rest

class DeviceMemory {
  constructor(raw, shared) {
    Object.assign(this, raw, { shared });
    this.time = decodeColumn(raw.time);
    this.blocks = decodeColumns(raw.blocks);
    this.segments = decodeColumns(raw.segments);
    this.oomRows = decodeColumn(raw.oom_rows);
    this.rows = this.time.length;
    this.allocated = this.curve(this.blocks, "freed");
    this.active = this.curve(this.blocks, "end");
    this.reserved = this.curve(this.segments, "end");
    this.layOut();
  }

  /** Return bytes after each row, as the rows of `table` come and go. */
  curve(table, end) {
    const bytes = new Float64Array(this.rows + 1);
    for (let i = 0; i < table.start.length; i++) {
      bytes[table.start[i]] += table.size[i];
      bytes[table[end][i]] -= table.size[i];
    }
    for (let i = 1; i < bytes.length; i++) bytes[i] += bytes[i - 1];
    return bytes.subarray(0, this.rows);
  }

  /** Give every block and segment its place: address ranges that were ever used lie below one another. */
  layOut() {
    const range = (table, i) => ({ begin: table.address[i], end: table.address[i] + table.size[i], y: 0 });
    const indices = (table) => Array.from(table.address.keys());
    const inside = (regions, begins) => (i) => {
      const region = regions[upperBound(begins, this.blocks.address[i]) - 1];
      return region !== undefined && this.blocks.address[i] + this.blocks.size[i] <= region.end;
    };
    let regions = merged(indices(this.segments).map((i) => range(this.segments, i)));
    let begins = regions.map((region) => region.begin);
    const known = inside(regions, begins);
    const strays = indices(this.blocks).filter((i) => !known(i)); // of segments that the recording does not show
    if (strays.length) {
      regions = merged([...regions, ...strays.map((i) => range(this.blocks, i))]);
      begins = regions.map((region) => region.begin);
    }
    this.extent = 0;
    for (const region of regions) {
      region.y = this.extent;
      this.extent += region.end - region.begin;
    }
    for (const table of [this.segments, this.blocks]) {
      table.y = Float64Array.from(table.address, (address) => {
        const region = regions[upperBound(begins, address) - 1];
        return region.y + (address - region.begin);
      });
    }
  }

  /** Return the position of each row on the horizontal axis, with one more for "after the end". */
  axis(kind) {
    const x = new Float64Array(this.rows + 1);
    let latest = 0;
    for (let i = 0; i < this.rows; i++) x[i] = latest = kind === "time" ? Math.max(latest, this.time[i]) : i;
    x[this.rows] = latest + Math.max(1, latest * 0.004);
    return x;
  }

}

/** Return the union of ranges as ranges that do not touch, by address. */
function merged(ranges) {
  const result = [];
  for (const range of ranges.sort((a, b) => a.begin - b.begin)) {
    const last = result[result.length - 1];
    if (last && range.begin <= last.end) last.end = Math.max(last.end, range.end);
    else result.push(range);
  }
  return result;
}

/** Return points of a step curve that look the same as all of them: first, least, most and last of each pixel. */
function decimate(x, y, rows, from, to) {
  const begin = Math.max(0, upperBound(x, from, rows) - 1);
  const end = Math.min(rows - 1, upperBound(x, to, rows));
  const keep = [];
  const step = Math.max(1, Math.ceil((end - begin + 1) / (MAX_POINTS / 4)));
  for (let bucket = begin; bucket <= end; bucket += step) {
    const last = Math.min(bucket + step - 1, end);
    let low = bucket;
    let high = bucket;
    for (let i = bucket; i <= last; i++) {
      if (y[i] < y[low]) low = i;
      if (y[i] > y[high]) high = i;
    }
    keep.push(...new Set([bucket, low, high, last].sort((a, b) => a - b)));
  }
  return keep;
}

class MemoryView {
  constructor(shared) {
    this.shared = shared;
    this.plot = byId("timeline");
    this.moment = new MomentView(shared, this);
    byId("axis").addEventListener("change", () => this.show(this.device, this.row));
    byId("whole").addEventListener("click", () => this.setRange(this.x[0], this.x[this.device.rows]));
    byId("colour").addEventListener("change", () => { this.recolour(); this.redraw(); });
    byId("search").addEventListener("input", () => { this.find(); this.recolour(); this.redraw(); });
    dark.addEventListener("change", () => { this.recolour(); this.redraw(); this.drawTimeline(); });
  }

  show(device, row = device.peak.row) {
    this.device = device;
    this.x = device.axis(byId("axis").value);
    this.from = this.x[0];
    this.to = this.x[device.rows];
    this.row = row;
    const bounds = { x0: this.from, x1: this.to, y0: 0, y1: device.extent };
    if (this.map) Object.assign(this.map, { bounds, view: { ...bounds } });
    else {
      this.map = new Plane(byId("map"), {
        bounds, left: PLOT_LEFT, right: PLOT_RIGHT, draw: (plane) => this.drawMap(plane), describe: (x, y) => this.describe(x, y),
        onView: () => this.setRange(this.map.view.x0, this.map.view.x1), onPick: (x) => this.pick(this.rowAt(x)),
      });
    }
    this.find();
    this.recolour();
    this.moment.show(device, this.x, row);
    this.map.draw();
    this.drawTimeline();
  }

  /** Return the row whose state holds at a position of the horizontal axis. */
  rowAt(position) {
    return Math.max(0, upperBound(this.x, position, this.device.rows) - 1);
  }

  formatX(value) {
    return byId("axis").value === "time" ? formatTime(value) : formatCount(Math.round(value));
  }

  /** Look at one moment; everything follows. */
  pick(row) {
    this.row = row;
    this.map.draw();
    this.moment.show(this.device, this.x, row);
    if (window.Plotly) Plotly.relayout(this.plot, { shapes: this.shapes() });
  }

  /** Show a part of the recording in the curves and in the map. */
  setRange(from, to) {
    this.from = from;
    this.to = to;
    this.map.setView({ ...this.map.view, x0: from, x1: to }, false);
    clearTimeout(this.later); // the map follows at once, plotly when the hand rests
    this.later = setTimeout(() => this.drawTimeline(), 60);
  }

  shapes() {
    const at = this.x[this.row];
    const line = { type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: styleOf("--text"), width: 1, dash: "dot" } };
    const ooms = Array.from(this.device.oomRows.slice(0, 200), (row) => (
      { type: "line", x0: this.x[row], x1: this.x[row], yref: "paper", y0: 0.93, y1: 1, line: { color: styleOf("--peak"), width: 2 } }));
    return [line, ...ooms];
  }

  drawTimeline() {
    if (!window.Plotly) return; // it has yet to start (page.js)
    const { device, x } = this;
    const trace = (name, y, extra) => {
      const keep = decimate(x, y, device.rows, this.from, this.to);
      const size = keep.map((i) => y[i]);
      const px = keep.map((i) => x[i]);
      if (keep.length && keep[keep.length - 1] === device.rows - 1) { // the last state holds to the end
        px.push(x[device.rows]);
        size.push(y[device.rows - 1]);
      }
      const text = size.map((bytes, i) => `${name} ${formatBytes(bytes)}, ${this.formatX(px[i])}`);
      return { type: "scatter", mode: "lines", name, x: px, y: size, text, hoverinfo: "text", ...extra,
        line: { shape: "hv", width: 1.5, ...extra.line } };
    };
    const accent = styleOf("--accent");
    const traces = [
      trace("reserved", device.reserved, { line: { color: styleOf("--reserved") } }),
      trace("active", device.active, { line: { color: accent, dash: "dot" } }),
      trace("allocated", device.allocated, { line: { color: accent }, fill: "tozeroy", fillcolor: `${accent}33` }),
    ];
    const { row } = device.peak;
    if (row >= 0) {
      traces.push({ type: "scatter", mode: "markers+text", name: "peak", x: [x[row]], y: [device.allocated[row]],
        text: [`peak ${formatBytes(device.allocated[row])}`], textposition: x[row] > (this.from + this.to) / 2 ? "top left" : "top right",
        hoverinfo: "text", marker: { color: styleOf("--peak"), size: 9 }, textfont: { color: styleOf("--peak") }, cliponaxis: false });
    }
    const top = Math.max(device.peak_reserved, 1) * 1.12;
    const yTicks = ticks(0, top, 6, 2);
    const xTicks = ticks(this.from, this.to, (this.plot.clientWidth - PLOT_LEFT - PLOT_RIGHT) / TICK_WIDTH);
    const grid = styleOf("--line");
    const axis = { gridcolor: grid, zeroline: false, linecolor: grid };
    const layout = {
      margin: { l: PLOT_LEFT, r: PLOT_RIGHT, t: 30, b: 30, autoexpand: false }, showlegend: true, hovermode: "closest", dragmode: "zoom",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: styleOf("--text"), size: 12 },
      xaxis: { ...axis, range: [this.from, this.to], tickvals: xTicks, ticktext: xTicks.map((v) => this.formatX(v)) },
      yaxis: { ...axis, range: [0, top], fixedrange: true, tickvals: yTicks, ticktext: yTicks.map(formatBytes) },
      shapes: this.shapes(),
    };
    const first = !this.plot.classList.contains("js-plotly-plot");
    Plotly.react(this.plot, traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
    if (!first) return;
    this.plot.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) this.setRange(change["xaxis.range[0]"], change["xaxis.range[1]"]);
    });
    this.plot.on("plotly_doubleclick", () => this.setRange(this.x[0], this.x[this.device.rows]));
    this.plot.addEventListener("click", (event) => { // anywhere in the plot, not only on a curve
      const { xaxis } = this.plot._fullLayout;
      const at = event.clientX - this.plot.getBoundingClientRect().left - xaxis._offset;
      if (at >= 0 && at <= xaxis._length) this.pick(this.rowAt(xaxis.p2d(at)));
    });
  }

  redraw() {
    this.map.draw();
    this.moment.draw();
  }

  /** Choose a colour for each block. */
  recolour() {
    const { blocks } = this.device;
    const by = byId("colour").value;
    const column = { site: blocks.stack, stream: blocks.stream, pool: blocks.pool, size: null }[by];
    const page = pixel(styleOf("--card"));
    this.unused = pixel(styleOf("--unused"));
    this.full = new Uint32Array(blocks.size.length);
    this.pale = new Uint32Array(blocks.size.length);
    const made = new Map();
    for (let i = 0; i < this.full.length; i++) {
      const key = column ? column[i] : Math.floor(4 * Math.log2(Math.max(1, blocks.size[i])));
      const faded = this.match && !this.match[blocks.stack[i]];
      const name = faded ? -1 - key : key;
      let pair = made.get(name);
      if (!pair) {
        let colour = column ? pixel(paletteColour(key)) : sizeColour(key / 4);
        if (faded) colour = mix(colour, page, 0.85);
        pair = [colour, mix(colour, page, 0.55)];
        made.set(name, pair);
      }
      this.full[i] = pair[0];
      this.pale[i] = pair[1];
    }
  }

  css(block) {
    const value = this.full[block];
    return `rgb(${value & 255},${(value >> 8) & 255},${(value >> 16) & 255})`;
  }

  /** Fade every block whose stack does not contain what is searched for. */
  find() {
    const wanted = byId("search").value.trim().toLowerCase();
    this.match = null;
    byId("found").textContent = "";
    if (wanted) {
      const { stacks } = this.shared;
      this.match = Uint8Array.from({ length: stacks.length }, (_, i) => stacks.text(i).toLowerCase().includes(wanted));
      let count = 0;
      for (const stack of this.device.blocks.stack) count += this.match[stack];
      byId("found").textContent = `${formatCount(count)} allocations`;
    }
  }

  drawMap(plane) {
    const { device, x } = this;
    const { view } = plane;
    plane.beginRaster(pixel(styleOf("--card")));
    const { segments, blocks } = device;
    for (let i = 0; i < segments.start.length; i++) {
      const y = segments.y[i];
      if (y > view.y1 || y + segments.size[i] < view.y0) continue;
      if (x[segments.end[i]] < view.x0 || x[segments.start[i]] > view.x1) continue;
      plane.rectangle(x[segments.start[i]], x[segments.end[i]], y, y + segments.size[i], this.unused, true);
    }
    // Blocks are sorted by start. Those smaller than a pixel come first: a large one is never hidden by them.
    const wide = 1.5 / plane.scaleX;
    const high = 1.5 / plane.scaleY;
    for (const small of [true, false]) {
      for (let i = 0; i < blocks.start.length; i++) {
        const begin = x[blocks.start[i]];
        if (begin > view.x1) break;
        const end = x[blocks.end[i]];
        const y = blocks.y[i];
        const size = blocks.size[i];
        if (end < view.x0 || y > view.y1 || y + size < view.y0) continue;
        if ((end - begin < wide || size < high) !== small) continue;
        const freed = x[blocks.freed[i]];
        if (freed < end) plane.rectangle(freed, end, y, y + size, this.pale[i], true);
        plane.rectangle(begin, freed, y, y + size, this.full[i], true);
      }
    }
    plane.endRaster();
    const { context, ratio } = plane;
    plane.axis((value) => this.formatX(value));
    context.textAlign = "right";
    for (const value of ticks(view.y0, view.y1, plane.height / (60 * ratio), 2)) {
      const at = (value - view.y0) * plane.scaleY;
      if (at > 6 * ratio && at < plane.height - 6 * ratio) context.fillText(formatBytes(value), plane.inset - 5 * ratio, at);
    }
    const line = (row, colour, dash) => {
      const at = plane.inset + (x[row] - view.x0) * plane.scaleX;
      context.strokeStyle = colour;
      context.lineWidth = ratio;
      context.setLineDash(dash.map((d) => d * ratio));
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, plane.height);
      context.stroke();
      context.setLineDash([]);
    };
    if (device.peak.row >= 0) line(device.peak.row, styleOf("--peak"), []);
    line(this.row, styleOf("--text"), [3, 3]);
  }

  describe(at, y) {
    const { device, x } = this;
    const { blocks, segments } = device;
    const last = this.rowAt(at);
    for (let i = 0; i < blocks.start.length && blocks.start[i] <= last; i++) {
      if (blocks.y[i] <= y && y < blocks.y[i] + blocks.size[i] && last < blocks.end[i]) return this.describeBlock(i, last);
    }
    for (let i = 0; i < segments.start.length; i++) {
      if (segments.y[i] <= y && y < segments.y[i] + segments.size[i] && segments.start[i] <= last && last < segments.end[i]) {
        return `unused\nin a segment of ${formatBytes(segments.size[i])}, ${this.shared.streamName(segments.stream[i])}`;
      }
    }
    return null;
  }

  describeBlock(i, row) {
    const { device, x } = this;
    const { blocks } = device;
    const freed = blocks.freed[i];
    const lines = [
      `${formatBytes(blocks.size[i])}${blocks.requested[i] === blocks.size[i] ? "" : ` (requested ${formatBytes(blocks.requested[i])})`}`
        + `${row >= freed ? ", freed, but a stream still holds it" : ""}`,
      `address 0x${blocks.address[i].toString(16)}, ${this.shared.streamName(blocks.stream[i])}${this.shared.poolName(blocks.pool[i])}`,
      `allocated ${this.formatX(x[blocks.start[i]])}, ${freed >= device.rows ? "never freed" : `freed ${this.formatX(x[freed])}`}`,
    ];
    const frames = this.shared.stacks.lines(blocks.stack[i]);
    lines.push(...frames.slice(0, 8));
    if (frames.length > 8) lines.push(`... ${frames.length - 8} more frames`);
    return lines.join("\n");
  }
}

// One colour every four doublings, from 512 B to 32 GiB; what lies between is mixed.
const SIZE_COLOURS = ["#9ccc65", "#26a69a", "#29b6f6", "#5c6bc0", "#ab47bc", "#ff8a65", "#fdd835"].map(pixel);

/** Return the pixel for a block of 2 ** `log2` bytes. */
function sizeColour(log2) {
  const at = Math.max(0, Math.min((log2 - 9) / 4, SIZE_COLOURS.length - 1.001));
  return mix(SIZE_COLOURS[Math.floor(at)], SIZE_COLOURS[Math.floor(at) + 1], at % 1);
}
