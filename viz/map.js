// The address space over time: each allocation a rectangle that does not move.

class AddressMap {
  constructor(memory) {
    this.memory = memory;
    this.plane = new Plane(byId("map"), {
      bounds: { x0: 0, x1: 1, y0: 0, y1: 1 }, draw: () => this.draw(), describe: (x, y) => this.describe(x, y),
      onView: () => memory.setRange(this.plane.view.x0, this.plane.view.x1),
      onPick: (x, y) => { memory.moveTo(memory.rowAt(x)); memory.pin(this.blockAt(x, y)); },
      onKey: (event) => memory.key(event, () => this.order()),
    });
  }

  show(device) {
    const bounds = { x0: this.memory.x[0], x1: this.memory.x[device.rows], y0: 0, y1: this.extent(device) };
    Object.assign(this.plane, { bounds, view: { ...bounds } });
  }

  /** Return the lower end of the shown addresses: all that were reserved, or up to the last that was used. */
  extent(device) {
    return Math.max(1, this.memory.showsReserved ? device.extent : device.used);
  }

  /** Show all addresses that are to be shown. */
  fit() {
    const { plane } = this;
    plane.bounds.y1 = this.extent(this.memory.device);
    plane.setView({ ...plane.view, y0: 0, y1: plane.bounds.y1 }, false);
  }

  draw() {
    const { memory, plane } = this;
    plane.beginRaster(theme.pixels.card);
    this.drawSegments();
    this.drawBlocks();
    plane.endRaster();
    memory.labelX(plane);
    plane.axisY();
    memory.drawMarks(plane);
    this.outlinePinned();
    plane.outlineSelection();
    memory.drawn("map");
  }

  drawSegments() {
    const { plane } = this;
    const { view } = plane;
    const { device, x } = this.memory;
    const { segments } = device;
    for (let i = 0; i < segments.count; i++) {
      const y = segments.y[i];
      if (y > view.y1 || y + segments.size[i] < view.y0) continue;
      if (x[segments.end[i]] < view.x0 || x[segments.start[i]] > view.x1) continue;
      const hatch = this.memory.isPrivate[segments.pool[i]] ? HATCHED.pool : 0;
      plane.rectangle(x[segments.start[i]], x[segments.end[i]], y, y + segments.size[i], theme.pixels.unused, true, hatch);
    }
  }

  /**
   * Draw the blocks, in time that grows with their number but not with their area. What begins and ends within one
   * column of pixels fills what is still free in that column; what is lower than a pixel fills what is still free in
   * its row; all else is a rectangle of its own. So every pixel is written about once, and a pixel in which there is
   * anything shows one of the blocks in it.
   */
  drawBlocks() {
    const { memory, plane } = this;
    const { view, width, height, scaleX, scaleY, pixels } = plane;
    const { x, visible, colours, hatches } = memory;
    const { blocks, rows } = memory.device;
    const { start, freed, end, y, size, count } = blocks;
    const edge = new Uint32Array(width + 1); // the first row in each column of pixels
    for (let column = 0, at = 0; column <= width; column++) edge[column] = at = firstAtLeast(x, view.x0 + column / scaleX, at, rows);

    const first = firstAtLeast(start, edge[0], 0, count);
    const large = [];
    const low = [];
    let shown = 0;
    const sort = (i) => {
      if (y[i] >= view.y1 || y[i] + size[i] <= view.y0) return;
      shown++;
      (size[i] * scaleY < 1.5 ? low : large).push(i);
    };
    for (let i = 0; i < first; i++) if (end[i] >= edge[0] && (!visible || visible[i])) sort(i);

    let hidden = 0;
    const free = new Int32Array(height + 1); // the next free row of pixels, at or after each
    let i = first;
    for (let column = 0; column < width && i < count; column++) {
      const next = edge[column + 1];
      if (start[i] >= next) continue;
      let fresh = true;
      for (; i < count && start[i] < next; i++) {
        if (visible && !visible[i]) continue;
        if (end[i] >= next) {
          sort(i);
          continue;
        }
        if (y[i] >= view.y1 || y[i] + size[i] <= view.y0) continue;
        if (fresh) for (let row = 0; row <= height; row++) free[row] = row;
        fresh = false;
        shown++;
        const top = Math.max(0, Math.floor((y[i] - view.y0) * scaleY));
        const bottom = Math.min(height, Math.max(top + 1, Math.floor((y[i] + size[i] - view.y0) * scaleY)));
        let row = nextFree(free, top);
        if (row >= bottom) hidden++;
        for (; row < bottom; row = nextFree(free, row)) {
          pixels[row * width + column] = colours[i];
          free[row] = row + 1;
        }
      }
    }

    const filled = new Int32Array(height); // up to which column each row is filled; `low` is in the order of starts
    for (const block of low) {
      const row = Math.min(height - 1, Math.max(0, Math.floor((y[block] - view.y0) * scaleY)));
      const begin = Math.max(0, Math.floor((x[start[block]] - view.x0) * scaleX));
      const left = Math.max(begin, filled[row]);
      const right = Math.min(width, Math.max(begin + 1, Math.floor((x[end[block]] - view.x0) * scaleX)));
      if (right <= left) {
        hidden++;
        continue;
      }
      pixels.fill(colours[block], row * width + left, row * width + right);
      filled[row] = right;
    }
    for (const block of large) {
      const bottom = y[block] + size[block];
      if (freed[block] < end[block]) {
        plane.rectangle(x[freed[block]], x[end[block]], y[block], bottom, mix(colours[block], theme.pixels.card, 0.6), true, hatches[block]);
      }
      plane.rectangle(x[start[block]], x[freed[block]], y[block], bottom, colours[block], true, hatches[block]);
    }
    memory.sayDetail(shown, hidden);
  }

  outlinePinned() {
    const { memory, plane } = this;
    if (memory.pinned === null) return;
    const { blocks } = memory.device;
    const { context, view, ratio, inset } = plane;
    const i = memory.pinned;
    const clip = (value, most) => Math.min(Math.max(value, -2), most + 2);
    const left = clip((memory.x[blocks.start[i]] - view.x0) * plane.scaleX, plane.width);
    const right = clip((memory.x[blocks.end[i]] - view.x0) * plane.scaleX, plane.width);
    const top = clip((blocks.y[i] - view.y0) * plane.scaleY, plane.height);
    const bottom = clip((blocks.y[i] + blocks.size[i] - view.y0) * plane.scaleY, plane.height);
    context.save();
    context.beginPath();
    context.rect(inset, 0, plane.width, plane.height);
    context.clip();
    for (const [colour, wide] of [[theme.card, 4], [theme.text, 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = wide * ratio;
      context.strokeRect(inset + left, top, Math.max(right - left, 2), Math.max(bottom - top, 2));
    }
    context.restore();
  }

  /** Return the visible block at a point of the plane, null if there is none. */
  blockAt(at, y) {
    const { memory } = this;
    const { blocks } = memory.device;
    const row = memory.rowAt(at);
    const near = (i) => !memory.visible || memory.visible[i];
    for (let i = 0; i < blocks.count && blocks.start[i] <= row; i++) {
      if (row < blocks.end[i] && blocks.y[i] <= y && y < blocks.y[i] + blocks.size[i] && near(i)) return i;
    }
    return this.blockInPixel(at, y);
  }

  /** Return the longest visible block within a pixel of a point, so that narrower ones can be hit, too. */
  blockInPixel(at, y) {
    const { memory, plane } = this;
    const { blocks } = memory.device;
    const reach = 1 / plane.scaleX;
    const [from, to] = [memory.rowAt(at - reach), memory.rowAt(at + reach)];
    let found = null;
    for (let i = upperBound(blocks.start, from - 1, 0, blocks.count); i < blocks.count && blocks.start[i] <= to; i++) {
      if (y < blocks.y[i] || y >= blocks.y[i] + blocks.size[i] || (memory.visible && !memory.visible[i])) continue;
      if (found === null || blocks.end[i] - blocks.start[i] > blocks.end[found] - blocks.start[found]) found = i;
    }
    return found;
  }

  /** Return the visible blocks at the cursor from top to bottom. */
  order() {
    const { memory } = this;
    const { blocks } = memory.device;
    return memory.device.liveAt(memory.row, true).filter((i) => !memory.visible || memory.visible[i]).sort((a, b) => blocks.y[a] - blocks.y[b]);
  }

  describe(at, y) {
    const { memory } = this;
    const row = memory.rowAt(at);
    const block = this.blockAt(at, y);
    if (block !== null) return memory.describeBlock(block, row);
    const { segments } = memory.device;
    for (let i = 0; i < segments.count; i++) {
      if (segments.y[i] > y || y >= segments.y[i] + segments.size[i] || row < segments.start[i] || row >= segments.end[i]) continue;
      return `unused\nin a segment of ${formatBytes(segments.size[i])}, ${memory.where(segments, i)}`;
    }
    return null;
  }
}

/** Return the first index from `low` on at which a sorted array is not below `value`. */
function firstAtLeast(array, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return the first free position at or after one, and shorten the path for later calls. */
function nextFree(free, position) {
  while (free[position] !== position) {
    free[position] = free[free[position]];
    position = free[position];
  }
  return position;
}
