// Live bytes at a moment by call stack: callers above, what they called below, widths in bytes.

const LEVEL = 19;

class FlameGraph {
  constructor(shared, memory) {
    Object.assign(this, { shared, memory, boxes: [] });
    this.canvas = byId("flame");
    byId("flame-moment").addEventListener("change", () => this.show());
    byId("flame-whole").addEventListener("click", () => this.zoomTo(this.root));
    this.canvas.addEventListener("pointermove", (event) => {
      const node = this.at(event);
      showTip(node ? this.describe(node) : null, event.clientX, event.clientY);
    });
    this.canvas.addEventListener("pointerleave", () => showTip(null));
    this.canvas.addEventListener("click", (event) => { const node = this.at(event); if (node) this.zoomTo(node); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  show() {
    const { memory } = this;
    const atPeak = byId("flame-moment").value === "peak";
    const row = atPeak ? memory.device.peak.row : memory.row;
    if (this.shown && this.shown[0] === memory.device && this.shown[1] === row) return;
    this.shown = [memory.device, row];
    byId("flame-title").textContent = memory.device.hasStacks ? "Who called" : "By range and size";
    this.root = siteTree(this.shared, memory.device, row);
    this.zoomTo(this.root);
  }

  /** Zoom to one node: it takes the whole width. */
  zoomTo(node) {
    this.top = this.chosen = node;
    this.draw();
    this.say();
  }

  say() {
    byId("flame-text").textContent = this.describe(this.chosen).split("\n").join(", ");
  }

  describe(node) {
    const share = this.root.size ? `, ${formatShare(node.size / this.root.size)}` : "";
    return [node.title, `${formatBytes(node.size)}${share}, ${counted(node.count, "block")}`, node.place, node.code].filter(Boolean).join("\n");
  }

  draw() {
    if (!this.root) return;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(10, canvas.parentElement.clientWidth);
    const path = [];
    for (let node = this.top.parent; node; node = node.parent) path.unshift(node);
    this.boxes = [];
    const place = (node, left, wide, level) => {
      this.boxes.push({ node, left, wide, level });
      let at = left;
      let small = 0;
      for (const child of node.children) {
        const share = (child.size / node.size) * wide;
        if (share < 1) { small += share; continue; }
        place(child, at, share, level + 1);
        at += share;
      }
      if (small >= 1) this.boxes.push({ node: null, left: at, wide: small, level: level + 1 });
    };
    for (const [level, node] of path.entries()) this.boxes.push({ node, left: 0, wide: width, level });
    place(this.top, 0, width, path.length);
    const height = (this.boxes.reduce((most, box) => Math.max(most, box.level), 0) + 1) * LEVEL;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `11.5px ${FONT}`;
    context.textBaseline = "middle";
    for (const { node, left, wide, level } of this.boxes) {
      const y = level * LEVEL;
      context.fillStyle = node ? css(mix(pixel(node.colour), theme.pixels.card, level < path.length ? 0.75 : 0.45)) : theme.other;
      context.fillRect(left, y, Math.max(wide - 1, 0.6), LEVEL - 1);
      if (node && node === this.chosen) {
        context.strokeStyle = theme.text;
        context.lineWidth = 2;
        context.strokeRect(left + 1, y + 1, Math.max(wide - 3, 1), LEVEL - 3);
      }
      if (!node || wide < 34) continue;
      context.save();
      context.beginPath();
      context.rect(left, y, wide - 5, LEVEL);
      context.clip();
      context.fillStyle = theme.text;
      context.fillText(node.title, left + 5, y + LEVEL / 2);
      context.globalAlpha = 0.7;
      let used = left + 5 + context.measureText(node.title).width;
      for (const more of [node.place.replace(/^.*[/\\]/, ""), formatBytes(node.size)].filter(Boolean)) { // those that fit
        const text = `  ${more}`;
        const next = used + context.measureText(text).width;
        if (next + 7 > left + wide) continue;
        context.fillText(text, used, y + LEVEL / 2);
        used = next;
      }
      context.restore();
    }
  }

  at(event) {
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left;
    const level = Math.floor((event.clientY - area.top) / LEVEL);
    const box = this.boxes.find((b) => b.level === level && b.left <= x && x < b.left + b.wide);
    return box ? box.node : null;
  }

  key(event) {
    const { chosen } = this;
    const beside = (step) => {
      const family = chosen.parent ? chosen.parent.children : [chosen];
      return family[family.indexOf(chosen) + step];
    };
    const next = { ArrowUp: () => chosen.parent, ArrowDown: () => chosen.children[0], ArrowLeft: () => beside(-1), ArrowRight: () => beside(1) }[event.key];
    const zoom = { Enter: () => chosen, Escape: () => this.root, 0: () => this.root }[event.key];
    if (!next && !zoom || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (zoom) {
      this.zoomTo(zoom());
      return;
    }
    this.chosen = next() || chosen;
    if (!this.boxes.some((box) => box.node === this.chosen)) this.top = this.chosen.parent || this.root;
    this.draw();
    this.say();
  }
}

/**
 * Return what occupies memory at a row as a tree: by stack, outermost frame first; without any stacks by the range it
 * was allocated in, if there are any, and the requested size. A node is {title, place, code, size, count, parent,
 * children}.
 */
function siteTree(shared, device, row) {
  const { blocks, sites } = device;
  const { hasStacks } = device;
  const live = row < 0 ? [] : device.liveAt(row, true);
  const groups = new Map();
  for (const i of live) {
    const key = hasStacks ? sites.stack[blocks.site[i]] : blocks.site[i] * shared.names.length + blocks.range[i];
    const group = groups.get(key) || { first: i, size: 0, count: 0 };
    group.size += blocks.size[i];
    group.count++;
    groups.set(key, group);
  }
  const node = (title, place, code, parent) => ({ title, place, code, parent, size: 0, count: 0, children: [], byKey: new Map(), colour: frameColour(place || title) });
  const root = node("all live memory", "", "", null);
  for (const { first, size, count } of groups.values()) {
    const site = blocks.site[first];
    const path = hasStacks ? shared.stacks.path(sites.stack[site]) : [...(blocks.range[first] ? [[shared.names[blocks.range[first]], "", ""]] : []), [sites.label[site], "", ""]];
    let at = root;
    at.size += size;
    at.count += count;
    for (const [title, place, code] of path) {
      const key = `${title}\n${place}`;
      let next = at.byKey.get(key);
      if (!next) {
        next = node(title, place, code, at);
        at.byKey.set(key, next);
        at.children.push(next);
      }
      at = next;
      at.size += size;
      at.count += count;
    }
  }
  const sort = (at) => { at.children.sort((a, b) => b.size - a.size); at.children.forEach(sort); };
  sort(root);
  return root;
}

/** Return a colour for a file, so that one file's frames look alike. */
function frameColour(text) {
  const file = text.replace(/:\d+$/, "");
  let hash = 7;
  for (let i = 0; i < file.length; i++) hash = (hash * 31 + file.charCodeAt(i)) | 0;
  return paletteColour(Math.abs(hash));
}
