// What is in memory at the cursor: segments and their blocks, call sites, the largest allocations.

const ROW_HEIGHT = 20;
const MAX_SEGMENTS = 1000;
const MAX_TABLE = 200;

class MomentView {
  constructor(shared, memory) {
    Object.assign(this, { shared, memory });
    this.canvas = byId("segments");
    this.boxes = [];
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => showTip(null));
    this.canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found) memory.pin(found.block);
    });
    this.canvas.addEventListener("keydown", (event) => {
      const handled = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Escape"].includes(event.key)
        && memory.key(event, () => this.bars.flatMap((bar) => bar.blocks));
      if (handled) event.preventDefault();
    });
    byId("tables").addEventListener("change", () => this.drawTables());
    new ResizeObserver(() => this.drawSegments()).observe(this.canvas.parentElement);
  }

  show(device, row) {
    Object.assign(this, { device, row });
    const slider = byId("slider");
    slider.max = Math.max(0, device.rows - 1);
    slider.value = row;
    const { allocated, active, reserved } = device;
    const when = this.memory.formatX(this.memory.x[row]);
    slider.setAttribute("aria-valuetext", when);
    byId("moment-time").textContent = `${when}${row === device.peak.row ? ", the peak" : ""}`;
    const waiting = active[row] - allocated[row];
    byId("moment-facts").textContent = [
      `${formatBytes(allocated[row])} allocated`,
      waiting ? `${formatBytes(waiting)} freed, but held by streams` : null,
      device.peak_reserved === null ? null : `${formatBytes(reserved[row])} reserved`,
      reserved[row] ? `${formatBytes(reserved[row] - active[row])} (${formatShare(1 - active[row] / reserved[row])}) of it free` : null,
      device.ooms.some((oom) => oom.row === row) ? "out of memory here" : null,
    ].filter(Boolean).join(", ");
    this.collect();
    this.draw();
  }

  /** Find the blocks and segments of the moment. */
  collect() {
    const { row, memory } = this;
    const { blocks, segments } = this.device;
    this.live = this.device.liveAt(row, true);
    this.bars = [];
    const order = Array.from(segments.start.keys()).filter((i) => segments.start[i] <= row && row < segments.end[i]);
    order.sort((a, b) => segments.address[a] - segments.address[b]);
    for (const i of order) {
      const last = this.bars[this.bars.length - 1];
      // The parts of an expandable segment are of one stream and one pool; another one may lie next to it.
      const joins = last && segments.expandable[i] && last.expandable && last.address + last.size === segments.address[i]
        && ["stream", "pool", "small"].every((column) => segments[column][last.first] === segments[column][i]);
      if (joins) last.size += segments.size[i];
      else {
        this.bars.push({ first: i, address: segments.address[i], size: segments.size[i], expandable: segments.expandable[i], small: segments.small[i],
          where: memory.where(segments, i), isPrivate: memory.isPrivate[segments.pool[i]], blocks: [], used: 0 });
      }
    }
    const begins = this.bars.map((bar) => bar.address);
    for (const i of this.live.slice().sort((a, b) => blocks.address[a] - blocks.address[b])) {
      const bar = this.bars[upperBound(begins, blocks.address[i]) - 1];
      if (!bar || blocks.address[i] >= bar.address + bar.size) continue;
      bar.blocks.push(i);
      bar.used += blocks.size[i];
    }
    this.bars.sort((a, b) => b.size - a.size || a.address - b.address);
  }

  draw() {
    this.drawSegments();
    this.drawTables();
  }

  drawSegments() {
    if (!this.bars) return; // the observer may come first
    const { memory } = this;
    const shown = this.bars.slice(0, MAX_SEGMENTS);
    byId("segment-count").textContent = `${formatCount(this.bars.length)}${shown.length < this.bars.length ? `, the largest ${formatCount(MAX_SEGMENTS)} shown` : ""}`;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth;
    canvas.style.height = `${shown.length * ROW_HEIGHT + 6}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((shown.length * ROW_HEIGHT + 6) * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    const left = 150;
    const right = 56;
    const span = Math.max(10, width - left - right);
    const { blocks } = this.device;
    this.boxes = [];
    shown.forEach((bar, row) => {
      const top = row * ROW_HEIGHT + 5;
      const high = ROW_HEIGHT - 6;
      context.fillStyle = theme.text;
      context.textAlign = "right";
      context.fillText(formatBytes(bar.size), 66, top + high / 2);
      context.fillText(formatShare(bar.used / bar.size), width - 8, top + high / 2, right - 10);
      context.fillStyle = theme.quiet;
      context.textAlign = "left";
      const kind = bar.expandable ? "expandable" : bar.small ? "small" : "large";
      context.fillText(`${kind}${bar.isPrivate ? ", pool" : ""}`, 74, top + high / 2, left - 80);
      context.fillStyle = theme.unused;
      context.fillRect(left, top, span, high);
      for (const i of bar.blocks) {
        const x = left + ((blocks.address[i] - bar.address) / bar.size) * span;
        const wide = (blocks.size[i] / bar.size) * span;
        const visible = !memory.visible || memory.visible[i];
        context.globalAlpha = !visible ? 0.15 : this.row < blocks.freed[i] ? 1 : 0.4;
        context.fillStyle = visible ? memory.css(i) : theme.other;
        context.fillRect(x, top, Math.max(wide - (wide > 3 ? 0.8 : 0), 0.7), high);
        context.globalAlpha = 1;
        if (i !== memory.pinned) continue;
        context.strokeStyle = theme.text;
        context.lineWidth = 2;
        context.strokeRect(x, top - 1, Math.max(wide, 2), high + 2);
      }
      this.boxes.push({ top, bottom: top + high, left, span, bar });
    });
  }

  /** Return the segment and the block at a pointer, null where no segment is. */
  at(event) {
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left;
    const y = event.clientY - area.top;
    const box = this.boxes.find((b) => y >= b.top && y <= b.bottom);
    if (!box) return null;
    const { bar } = box;
    const { blocks } = this.device;
    const address = bar.address + ((x - box.left) / box.span) * bar.size;
    const block = bar.blocks.find((i) => blocks.address[i] <= address && address < blocks.address[i] + blocks.size[i]);
    return { bar, block: block === undefined ? null : block, isLabel: x < box.left };
  }

  hover(event) {
    const found = this.at(event);
    if (!found) return showTip(null);
    const { bar, block, isLabel } = found;
    const segment = [
      `segment 0x${bar.address.toString(16)}, ${bar.where}`,
      `${formatBytes(bar.size)} reserved, ${formatBytes(bar.used)} in ${counted(bar.blocks.length, "block")}, ${formatBytes(bar.size - bar.used)} free`,
    ].join("\n");
    const inside = block === null ? "free" : this.memory.describeBlock(block, this.row);
    return showTip(isLabel ? segment : `${inside}\n\n${segment}`, event.clientX, event.clientY);
  }

  /** Return the blocks that the tables are about, and what a block adds to its call site's bytes. */
  chosen() {
    const { memory, device } = this;
    const { blocks } = device;
    const shows = (i) => !memory.visible || memory.visible[i];
    if (byId("tables").value === "cursor") return this.live.filter((i) => this.row < blocks.freed[i] && shows(i));
    const [first, last] = memory.shownRows();
    const chosen = [];
    for (let i = 0; i < blocks.count && blocks.start[i] <= last; i++) if (blocks.freed[i] > first && shows(i)) chosen.push(i);
    return chosen;
  }

  drawTables() {
    if (!this.bars) return;
    const { shared, memory, device } = this;
    const { blocks, sites } = device;
    const chosen = this.chosen();
    const inRange = byId("tables").value === "range";
    const groups = new Map();
    for (const i of chosen) {
      const group = groups.get(blocks.site[i]) || { site: blocks.site[i], first: i, size: 0, count: 0 };
      group.size += blocks.size[i];
      group.count++;
      groups.set(blocks.site[i], group);
    }
    const bySite = { of: blocks.site, count: sites.label.length };
    const most = inRange ? device.highest(...memory.shownRows(), bySite, memory.visible) : null;
    const bytes = (group) => (inRange ? most[group.site] : group.size);
    const sorted = Array.from(groups.values()).sort((a, b) => bytes(b) - bytes(a));
    const coloured = byId("colour").value === "site";
    byId("site-title").textContent = device.hasStacks ? "By call site" : "By requested size";
    fill(byId("sites"), byId("site-count"), sorted, sorted.length, (group) => shared.row({
      name: sites.label[group.site],
      detail: inRange ? `${counted(group.count, "block")}, ${formatBytes(group.size)} in all; at most` : counted(group.count, "block"),
      numbers: formatBytes(bytes(group)), stack: sites.stack[group.site], colour: coloured ? memory.css(group.first) : "transparent" }));
    fill(byId("blocks"), byId("block-count"), largest(chosen, blocks.size, MAX_TABLE), chosen.length, (i) => {
      const button = element("button", { type: "button", className: "block-row" },
        swatch(memory.css(i)), element("span", { className: "name" }, sites.label[blocks.site[i]], " ",
          element("small", {}, `since ${memory.formatX(memory.x[blocks.start[i]])}`)),
        element("span", { className: "numbers" }, formatBytes(blocks.size[i])));
      button.addEventListener("click", () => memory.pin(i));
      return button;
    });
  }
}

/** Return the `count` items with the highest values, the highest first; of equal ones the latest. */
function largest(items, values, count) {
  const best = []; // ascending
  for (const item of items) {
    if (best.length === count && values[item] < values[best[0]]) continue;
    let low = 0;
    let high = best.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[best[middle]] > values[item]) high = middle; else low = middle + 1;
    }
    best.splice(low, 0, item);
    if (best.length > count) best.shift();
  }
  return best.reverse();
}

/** Fill a table with the first of `total` items, and say how many there are. */
function fill(table, count, items, total, row) {
  const shown = items.slice(0, MAX_TABLE);
  if (count) count.textContent = `${formatCount(total)}${total > shown.length ? `, the first ${formatCount(shown.length)} shown` : ""}`;
  table.replaceChildren(...shown.map(row));
  if (!total) table.append(element("p", { className: "empty" }, "none"));
}
