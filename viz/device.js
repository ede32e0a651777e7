// One device's memory over time. A row is a moment: the state after an event, until the next one.

const BUCKET = 256; // rows per bucket, used where a pixel covers more rows than that

class DeviceMemory {
  constructor(raw, shared) {
    Object.assign(this, raw, { shared });
    this.hasStacks = raw.sites.stack.some((stack) => stack > 0);
    this.rows = raw.time.length;
    this.blocks = withEnds(raw.blocks);
    this.segments = withEnds(raw.segments);
    this.allocated = this.curve(this.blocks, "freed");
    this.active = this.curve(this.blocks, "end");
    this.reserved = this.curve(this.segments, "end");
    this.layOut();
    this.chain();
  }

  /** Return the bytes after each row from the starts and ends in `table`; rows that are not `visible` do not count. */
  curve(table, end, visible = null) {
    const bytes = new Float64Array(this.rows + 1);
    for (let i = 0; i < table.start.length; i++) {
      if (visible && !visible[i]) continue;
      bytes[table.start[i]] += table.size[i];
      bytes[table[end][i]] -= table.size[i];
    }
    for (let i = 1; i < bytes.length; i++) bytes[i] += bytes[i - 1];
    return bytes.subarray(0, this.rows);
  }

  /** Place every block and segment: all address ranges that were ever used are stacked vertically. */
  layOut() {
    const { blocks, segments } = this;
    const range = (table) => (i) => ({ begin: table.address[i], end: table.address[i] + table.size[i], y: 0 });
    const indices = (table) => Array.from(table.address.keys());
    let regions = merged(indices(segments).map(range(segments)));
    let begins = regions.map((region) => region.begin);
    const isStray = (i) => { // of a segment that the recording does not show
      const region = regions[upperBound(begins, blocks.address[i]) - 1];
      return region === undefined || blocks.address[i] + blocks.size[i] > region.end;
    };
    const strays = [];
    for (let i = 0; i < blocks.count; i++) if (isStray(i)) strays.push(i);
    if (strays.length) {
      regions = merged([...regions, ...strays.map(range(blocks))]);
      begins = regions.map((region) => region.begin);
    }
    this.extent = 0;
    for (const region of regions) {
      region.y = this.extent;
      this.extent += region.end - region.begin;
    }
    for (const table of [segments, blocks]) {
      table.y = new Float64Array(table.count);
      for (let i = 0; i < table.count; i++) {
        const region = regions[upperBound(begins, table.address[i]) - 1];
        table.y[i] = region.y + (table.address[i] - region.begin);
      }
    }
    this.used = 0; // the position of the last byte that was ever allocated
    for (let i = 0; i < blocks.count; i++) this.used = Math.max(this.used, blocks.y[i] + blocks.size[i]);
  }

  /** Note for each row the block that it allocated and the one that it freed (their number + 1, 0 for none). */
  chain() {
    const { blocks } = this;
    this.born = new Uint32Array(this.rows + 1);
    this.gone = new Uint32Array(this.rows + 1);
    for (let i = 0; i < blocks.count; i++) {
      this.born[blocks.start[i]] = i + 1;
      this.gone[blocks.freed[i]] = i + 1;
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

  /** Return the blocks that the program held at a row, in the order of their allocation; with `active`, also pending. */
  liveAt(row, active = false) {
    const { blocks } = this;
    const end = active ? blocks.end : blocks.freed;
    const live = [];
    for (let i = 0; i < blocks.count && blocks.start[i] <= row; i++) if (row < end[i]) live.push(i);
    return live;
  }

  /**
   * Visit the rows `from` to `to` with the bytes that each kind of blocks holds; blocks that are not `visible` do not
   * count. `kinds` is {of: the kind of each block, count}. `visit(row, sums, kind)` is called for the state at `from`
   * (kind -1), then for each row with the kind that changed.
   */
  sweep(from, to, kinds, visible, visit) {
    const { blocks, born, gone } = this;
    const { size } = blocks;
    const kind = kinds.of;
    const sums = new Float64Array(kinds.count);
    for (let i = 0; i < blocks.count && blocks.start[i] <= from; i++) {
      if (from < blocks.freed[i] && (!visible || visible[i])) sums[kind[i]] += size[i];
    }
    visit(from, sums, -1);
    for (let row = from + 1; row <= to; row++) {
      let changed = -1;
      const out = gone[row] - 1;
      if (out >= 0 && (!visible || visible[out])) {
        changed = kind[out];
        sums[changed] -= size[out];
      }
      const added = born[row] - 1;
      if (added >= 0 && (!visible || visible[added])) {
        changed = kind[added];
        sums[changed] += size[added];
      }
      visit(row, sums, changed);
    }
  }

  /** Return the most bytes that each kind of blocks held in a range of rows. */
  highest(from, to, kinds, visible) {
    let most = null;
    this.sweep(from, to, kinds, visible, (_row, sums, kind) => {
      if (most === null) most = sums.slice();
      else if (kind >= 0 && sums[kind] > most[kind]) most[kind] = sums[kind];
    });
    return most;
  }
}

/** Return lifetimes with the rows in which they were freed and ended, in arrays of one type each. */
function withEnds(raw) {
  const count = raw.start.length;
  const table = { ...raw, count, start: Uint32Array.from(raw.start), freed: new Uint32Array(count), end: new Uint32Array(count) };
  for (let i = 0; i < count; i++) table.end[i] = (table.freed[i] = table.start[i] + raw.lived[i]) + raw.waited[i];
  for (const name of ["address", "size", "slack"]) if (raw[name]) table[name] = Float64Array.from(raw[name]);
  return table;
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
