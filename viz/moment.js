// What is in memory at one moment: segments and their blocks, call sites, the largest allocations.

const ROW_HEIGHT = 20;
const MAX_SEGMENTS = 1000;
const MAX_TABLE = 200;

class MomentView {
  constructor(shared, memory) {
    Object.assign(this, { shared, memory });
    this.canvas = byId("segments");
    this.boxes = [];
    byId("slider").addEventListener("input", (event) => memory.pick(Number(event.target.value)));
    byId("to-peak").addEventListener("click", () => memory.pick(Math.max(0, this.device.peak.row)));
    byId("to-end").addEventListener("click", () => memory.pick(this.device.rows - 1));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => showTip(null));
    new ResizeObserver(() => this.drawSegments()).observe(this.canvas.parentElement);
  }

  show(device, x, row) {
    Object.assign(this, { device, x, row });
    const slider = byId("slider");
    slider.max = Math.max(0, device.rows - 1);
    slider.value = row;
    const { allocated, active, reserved } = device;
    byId("moment-time").textContent = `${this.memory.formatX(x[row])}${row === device.peak.row ? ", the peak" : ""}`;
    const waiting = active[row] - allocated[row];
    byId("moment-facts").textContent = [
      `${formatBytes(allocated[row])} allocated`,
      waiting ? `${formatBytes(waiting)} held by streams` : null,
      `${formatBytes(reserved[row])} reserved`,
      reserved[row] ? `${formatShare(1 - active[row] / reserved[row])} unused` : null,
    ].filter(Boolean).join(", ");
    this.collect();
    this.draw();
  }

  /** Find the blocks and segments of the moment. */
  collect() {
    const { row } = this;
    const { blocks, segments } = this.device;
    this.live = [];
    for (let i = 0; i < blocks.start.length && blocks.start[i] <= row; i++) if (row < blocks.end[i]) this.live.push(i);
    this.bars = [];
    const order = Array.from(segments.start.keys()).filter((i) => segments.start[i] <= row && row < segments.end[i]);
    order.sort((a, b) => segments.address[a] - segments.address[b]);
    for (const i of order) {
      const last = this.bars[this.bars.length - 1];
      if (last && segments.expandable[i] && last.expandable && last.address + last.size === segments.address[i]) last.size += segments.size[i];
      else {
        this.bars.push({ address: segments.address[i], size: segments.size[i], expandable: segments.expandable[i], small: segments.small[i],
          stream: segments.stream[i], pool: segments.pool[i], blocks: [], used: 0 });
      }
    }
    const begins = this.bars.map((bar) => bar.address);
    for (const i of this.live) {
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
    const shown = this.bars.slice(0, MAX_SEGMENTS);
    byId("segment-count").textContent = `${formatCount(this.bars.length)}${shown.length < this.bars.length ? `, the largest ${MAX_SEGMENTS} shown` : ""}`;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth;
    canvas.style.height = `${shown.length * ROW_HEIGHT + 6}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((shown.length * ROW_HEIGHT + 6) * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    const left = 158;
    const right = 52;
    const span = Math.max(10, width - left - right);
    const { blocks } = this.device;
    this.boxes = [];
    shown.forEach((bar, row) => {
      const top = row * ROW_HEIGHT + 5;
      const high = ROW_HEIGHT - 6;
      context.fillStyle = styleOf("--text");
      context.textAlign = "right";
      context.fillText(formatBytes(bar.size), 70, top + high / 2);
      context.fillStyle = styleOf("--quiet");
      context.textAlign = "left";
      const kind = `${bar.expandable ? "expandable" : bar.small ? "small" : "large"}${bar.pool ? ", pool" : ""}`;
      context.fillText(kind, 78, top + high / 2, left - 84);
      context.fillText(formatShare(bar.used / bar.size), width - right + 6, top + high / 2, right - 8);
      context.fillStyle = styleOf("--unused");
      context.fillRect(left, top, span, high);
      for (const i of bar.blocks) {
        const x = left + ((blocks.address[i] - bar.address) / bar.size) * span;
        const wide = (blocks.size[i] / bar.size) * span;
        context.globalAlpha = this.row < blocks.freed[i] ? 1 : 0.45;
        context.fillStyle = this.memory.css(i);
        context.fillRect(x, top, Math.max(wide - (wide > 3 ? 0.8 : 0), 0.7), high);
        context.globalAlpha = 1;
      }
      this.boxes.push({ top, bottom: top + high, left, span, bar });
    });
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const at = this.boxes.find((b) => y >= b.top && y <= b.bottom);
    if (!at) return showTip(null);
    const { bar } = at;
    const { blocks } = this.device;
    const address = bar.address + ((x - at.left) / at.span) * bar.size;
    const block = bar.blocks.find((i) => blocks.address[i] <= address && address < blocks.address[i] + blocks.size[i]);
    const segment = `segment 0x${bar.address.toString(16)} of ${formatBytes(bar.size)}, ${this.shared.streamName(bar.stream)}${this.shared.poolName(bar.pool)}`;
    const inside = block === undefined ? "unused" : this.memory.describeBlock(block, this.row);
    showTip(x < at.left ? segment : `${inside}\n\n${segment}`, event.clientX, event.clientY);
  }

  drawTables() {
    const { blocks } = this.device;
    const held = this.live.filter((i) => this.row < blocks.freed[i]);
    const { shared } = this;
    const hasStacks = shared.stacks.length > 1; // else requests of one size are most likely to be of one kind
    const key = hasStacks ? blocks.stack : blocks.requested;
    const groups = new Map();
    for (const i of held) {
      const group = groups.get(key[i]) || { first: i, size: 0, count: 0 };
      group.size += blocks.size[i];
      group.count++;
      groups.set(key[i], group);
    }
    const sorted = Array.from(groups.values()).sort((a, b) => b.size - a.size);
    const coloured = byId("colour").value === (hasStacks ? "site" : "size");
    byId("site-title").textContent = hasStacks ? "By call site" : "By requested size";
    const count = (number) => `${formatCount(number)} ${number === 1 ? "block" : "blocks"}`;
    fill(byId("sites"), byId("site-count"), sorted, ({ first, size, count: number }) => shared.row({
      name: hasStacks ? shared.sites[blocks.stack[first]] : formatBytes(blocks.requested[first]),
      detail: count(number), numbers: formatBytes(size), stack: blocks.stack[first],
      colour: coloured ? this.memory.css(first) : "transparent" }));
    held.sort((a, b) => blocks.size[b] - blocks.size[a] || blocks.start[b] - blocks.start[a]);
    fill(byId("blocks"), byId("block-count"), held, (i) => shared.row({
      name: hasStacks ? shared.sites[blocks.stack[i]] : `at 0x${blocks.address[i].toString(16)}`,
      detail: `since ${this.memory.formatX(this.x[blocks.start[i]])}`,
      numbers: formatBytes(blocks.size[i]), stack: blocks.stack[i], colour: this.memory.css(i) }));
  }
}

/** Fill a table with the first rows of `items`, and say how many there are. */
function fill(table, count, items, row) {
  const dropped = items.length > MAX_TABLE ? `, the first ${MAX_TABLE} shown` : "";
  if (count) count.textContent = `${formatCount(items.length)}${dropped}`;
  table.replaceChildren(...items.slice(0, MAX_TABLE).map(row));
  if (!items.length) table.append(element("p", { className: "empty" }, "none"));
}
