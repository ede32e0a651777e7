// Live bytes over time, stacked by call site (or by the kinds that colours show); on request, also reserved bytes.

const LEADERS = 64; // kinds of blocks that are shown separately; the rest is one band
const DIRECT_ROWS = 1 << 17; // up to this many rows are summed in each frame; more use buckets
const HEADROOM = 1.06;
const STRIPS = 3e6; // up to this many pieces of columns, single allocations are drawn

class Timeline {
  constructor(memory) {
    this.memory = memory;
    this.plane = new Plane(byId("timeline"), {
      bounds: { x0: 0, x1: 1, y0: -1, y1: 0 }, draw: () => this.draw(), describe: (x, y) => this.describe(x, -y),
      onView: () => this.viewed(), holdsY: () => this.isFitted,
      onPick: (x, y) => { memory.moveTo(memory.rowAt(x)); memory.pin(this.blockAt(memory.row, -y)); },
      onKey: (event) => memory.key(event, () => this.order(memory.row).flat().reverse()),
    });
  }

  show(device) {
    const bounds = { x0: this.memory.x[0], x1: this.memory.x[device.rows], y0: -this.tallest(0, device.rows - 1), y1: 0 }; // bytes grow upwards
    Object.assign(this.plane, { bounds, view: { ...bounds } });
    this.isFitted = true; // until the user chooses the heights
  }

  /** Return the height that shows all that is drawn in a range of rows, with some space above. */
  tallest(first, last) {
    const { live, showsReserved, device } = this.memory;
    const most = live[highest(live, first, last + 1)];
    return HEADROOM * Math.max(1, most, showsReserved ? device.reserved[highest(device.reserved, first, last + 1)] : 0);
  }

  /** Fit the height to the shown range, unless the user has chosen another. */
  fit() {
    const { plane, memory } = this;
    plane.bounds.y0 = -this.tallest(0, memory.device.rows - 1);
    if (this.isFitted) Object.assign(plane.view, { y0: -this.tallest(...memory.shownRows()), y1: 0 });
    plane.setView(plane.view, false);
    this.fitted = plane.view.y0;
  }

  /** Keep the user's own zoom. */
  viewed() {
    const { view } = this.plane;
    if (view.y0 !== this.fitted || view.y1 !== 0) this.isFitted = false;
    this.memory.setRange(view.x0, view.x1);
  }

  /** Choose the kinds of blocks that are shown separately, the largest in a range of rows; return all kinds. */
  rank(from, to) {
    const { memory } = this;
    const { kinds } = memory;
    const most = memory.device.highest(from, to, kinds, memory.visible);
    const ranked = Array.from(most.keys()).filter((kind) => most[kind] > 0).sort((a, b) => most[b] - most[a] || a - b);
    this.leaders = ranked.slice(0, LEADERS);
    this.place = new Uint8Array(kinds.count).fill(LEADERS); // in the stack
    this.leaders.forEach((kind, place) => { this.place[kind] = place; });
    this.sumBuckets();
    return ranked;
  }

  /** Represent each bucket of rows by its moment with the most bytes. */
  sumBuckets() {
    const { memory, leaders } = this;
    const { device, live } = memory;
    const { rows } = device;
    const count = Math.ceil(rows / BUCKET);
    this.bucketRow = new Uint32Array(count);
    for (let bucket = 0; bucket < count; bucket++) this.bucketRow[bucket] = highest(live, bucket * BUCKET, Math.min(rows, (bucket + 1) * BUCKET));
    this.bucketSums = this.sumsAt(this.bucketRow);
    this.stride = leaders.length + 1;
  }

  /** Return what each leader, and then the rest, holds at ascending rows: one run of numbers for each row. */
  sumsAt(wanted) {
    const { memory, leaders } = this;
    const stride = leaders.length + 1;
    const result = new Float64Array(wanted.length * stride);
    if (!wanted.length) return result;
    let next = 0;
    let total = 0;
    const { size } = memory.device.blocks;
    const { born, gone } = memory.device;
    const { visible } = memory;
    memory.device.sweep(wanted[0], wanted[wanted.length - 1], memory.kinds, visible, (row, sums, kind) => {
      if (row === wanted[0]) for (const bytes of sums) total += bytes;
      else if (kind >= 0) {
        const [added, out] = [born[row] - 1, gone[row] - 1];
        if (added >= 0 && (!visible || visible[added])) total += size[added];
        if (out >= 0 && (!visible || visible[out])) total -= size[out];
      }
      for (; next < wanted.length && wanted[next] === row; next++) {
        let rest = total;
        for (let place = 0; place < leaders.length; place++) rest -= result[next * stride + place] = sums[leaders[place]];
        result[next * stride + leaders.length] = rest;
      }
    });
    return result;
  }

  /** Find the moment that each column of pixels shows: the one with the most bytes. */
  moments() {
    const { memory, plane } = this;
    const { x, live } = memory;
    const { rows } = memory.device;
    const { view, width, scaleX } = plane;
    const first = memory.rowAt(view.x0);
    const last = memory.rowAt(view.x1);
    this.bucketed = last - first > DIRECT_ROWS;
    const moments = new Uint32Array(width); // rows, or buckets
    const of = this.bucketed ? (row) => this.bucketRow[row] : (row) => row;
    const scale = this.bucketed ? BUCKET : 1;
    const count = Math.ceil(rows / scale);
    let at = Math.floor(first / scale);
    for (let column = 0; column < width; column++) {
      const end = view.x0 + (column + 1) / scaleX;
      let best = at; // the state when the column begins
      while (at + 1 < count && x[(at + 1) * scale] < end) {
        at++;
        if (live[of(at)] > live[of(best)]) best = at;
      }
      moments[column] = best;
    }
    return moments;
  }

  draw() {
    const { memory, plane } = this;
    plane.beginRaster(theme.pixels.card);
    const moments = this.moments();
    const [first, last] = [memory.rowAt(plane.view.x0), memory.rowAt(plane.view.x1)];
    const changes = Math.min(plane.width, last - first + 1);
    const live = this.bucketed ? Infinity : this.liveCount(first, last);
    if (changes * live <= STRIPS) this.drawSingle(moments);
    else this.drawBands(moments);
    plane.endRaster();
    this.drawLines(moments);
    plane.axisY(true);
    memory.labelX(plane);
    memory.drawMarks(plane, true);
    plane.outlineSelection();
    memory.drawn("timeline");
  }

  /** Return an upper bound of the number of blocks that are live at once in a range of rows. */
  liveCount(first, last) {
    const { blocks } = this.memory.device;
    let live = 0;
    for (let i = 0; i < blocks.count && blocks.start[i] <= first; i++) if (blocks.freed[i] > first) live++;
    return live + (last - first) / 2;
  }

  /** Fill column by column; those that show the same moment as the one before are copied. `pieces(column, fill)`. */
  columns(moments, pieces) {
    const { plane, memory } = this;
    const { view, width, height, scaleY, pixels } = plane;
    const { active, allocated, reserved } = memory.device;
    const pending = theme.pixels.pending;
    let column = 0;
    let bottom = height;
    let bytes = 0;
    const fill = (size, colour, split) => {
      bytes += size;
      let top = Math.round((-bytes - view.y0) * scaleY);
      if (top < 0) top = 0;
      const free = split && bottom - top > 3 ? top + 1 : top;
      for (let row = Math.min(bottom, height) - 1; row >= free; row--) pixels[row * width + column] = colour;
      if (top < bottom) bottom = top;
    };
    for (; column < width; column++) {
      if (column > 0 && moments[column] === moments[column - 1]) {
        for (let at = column; at < pixels.length; at += width) pixels[at] = pixels[at - 1];
        continue;
      }
      bytes = 0;
      bottom = Math.round(-view.y0 * scaleY);
      const row = pieces(column, fill);
      if (memory.visible) continue;
      fill(active[row] - allocated[row], pending, false);
      if (memory.showsReserved && bytes < reserved[row]) fill(reserved[row] - bytes, theme.pixels.unused, false);
    }
  }

  drawBands(moments) {
    const { leaders, memory } = this;
    const sums = this.bucketed ? this.bucketSums : this.sumsAt(moments);
    const stride = leaders.length + 1;
    const colours = [...leaders.map((kind) => memory.kindColours[kind]), theme.pixels.other];
    this.columns(moments, (column, fill) => {
      const at = (this.bucketed ? moments[column] : column) * stride;
      for (let place = 0; place < stride; place++) if (sums[at + place]) fill(sums[at + place], colours[place], false);
      return this.bucketed ? this.bucketRow[moments[column]] : moments[column];
    });
  }

  /** Draw every allocation as a strip of its own. */
  drawSingle(moments) {
    const { memory } = this;
    const { born, gone, blocks } = memory.device;
    const kind = memory.kinds.of;
    const groups = this.order(moments[0]);
    let row = moments[0];
    const { visible } = memory;
    this.columns(moments, (column, fill) => {
      while (row < moments[column]) {
        row++;
        const out = gone[row] - 1;
        if (out >= 0 && (!visible || visible[out])) {
          const group = groups[this.place[kind[out]]];
          group.splice(group.indexOf(out), 1);
        }
        const added = born[row] - 1;
        if (added >= 0 && (!visible || visible[added])) groups[this.place[kind[added]]].push(added);
      }
      for (const group of groups) for (const i of group) fill(blocks.size[i], memory.colours[i], true);
      return row;
    });
  }

  /** Return the blocks held at a row as they are stacked: by leader, and then the rest; each by its allocation. */
  order(row) {
    const { memory } = this;
    const kind = memory.kinds.of;
    const groups = Array.from({ length: LEADERS + 1 }, () => []);
    for (const i of memory.device.liveAt(row)) if (!memory.visible || memory.visible[i]) groups[this.place[kind[i]]].push(i);
    return groups;
  }

  drawLines(moments) {
    const { plane, memory } = this;
    const { context, ratio, view } = plane;
    const { reserved, active } = memory.device;
    const draw = (values, colour, wide) => {
      context.strokeStyle = colour;
      context.lineWidth = wide * ratio;
      context.beginPath();
      let before = null;
      for (let column = 0; column < moments.length; column++) {
        const row = this.bucketed ? this.bucketRow[moments[column]] : moments[column];
        const y = (-values[row] - view.y0) * plane.scaleY;
        if (y === before) continue;
        if (before === null) context.moveTo(plane.inset, y);
        else {
          context.lineTo(plane.inset + column, before);
          context.lineTo(plane.inset + column, y);
        }
        before = y;
      }
      if (before !== null) context.lineTo(plane.inset + plane.width, before);
      context.stroke();
    };
    context.save();
    context.beginPath();
    context.rect(plane.inset, 0, plane.width, plane.height);
    context.clip();
    if (memory.showsReserved) draw(reserved, theme.reserved, 1.5);
    if (memory.visible) draw(active, theme.accent, 1.2);
    context.restore();
  }

  /** Return the block at a height of the stack, null if there is none. */
  blockAt(row, bytes) {
    const { blocks } = this.memory.device;
    let below = 0;
    for (const group of this.order(row)) {
      for (const i of group) {
        below += blocks.size[i];
        if (bytes < below) return bytes >= 0 ? i : null;
      }
    }
    return null;
  }

  describe(at, bytes) {
    const { memory, plane } = this;
    const { device } = memory;
    let row = memory.rowAt(at);
    const column = Math.floor((at - plane.view.x0) * plane.scaleX);
    const to = memory.rowAt(plane.view.x0 + (column + 1) / plane.scaleX);
    if (to > row) row = highest(memory.live, row, to + 1); // the moment that the column shows
    const block = this.blockAt(row, bytes);
    if (block !== null) return memory.describeBlock(block, row);
    const facts = `${memory.formatX(memory.x[row])}\n${formatBytes(device.allocated[row])} allocated, ${formatBytes(device.peak_reserved === null ? null : device.reserved[row])} reserved`;
    if (bytes < device.active[row]) return `freed, held by streams: ${formatBytes(device.active[row] - device.allocated[row])}\n${facts}`;
    return bytes < device.reserved[row] ? `reserved and unused: ${formatBytes(device.reserved[row] - device.active[row])}\n${facts}` : facts;
  }
}
