// What the user is viewing (a moment, a range, a search, an allocation), and what must be updated when that changes.

const IDLE = 0.5; // from this idle share on, the axis of events shows more

class MemoryView {
  constructor(shared) {
    this.shared = shared;
    this.pinned = null;
    this.hidden = { sites: new Set(), purposes: new Set(), streams: new Set(), pools: new Set() };
    this.showsReserved = false;
    this.keeper = new StateKeeper(this);
    this.slots = new Map();
    this.frames = {};
    this.painted = new Promise((done) => { this.onPainted = done; });
    this.map = new AddressMap(this);
    this.timeline = new Timeline(this);
    this.ranges = new RangeBand(this);
    this.overview = new Overview(this);
    this.moment = new MomentView(shared, this);
    this.flame = new FlameGraph(shared, this);
    this.legend = new Legend(this);
    this.selection = new Selection(shared, this);
    this.listen();
  }

  listen() {
    const on = (id, event, action) => byId(id).addEventListener(event, action);
    on("axis", "change", () => this.chooseAxis());
    on("reserved", "change", () => this.fit());
    on("show-hidden", "click", () => { this.showHidden(); byId("search").focus(); });
    on("colour", "change", () => this.rank());
    on("search", "input", () => this.find());
    on("only", "change", () => this.filter());
    on("whole", "click", () => this.showAll());
    on("zoom-in", "click", () => this.zoom(0.5));
    on("zoom-out", "click", () => this.zoom(2));
    on("to-peak", "click", () => this.moveTo(this.peakInRange(), true));
    on("slider", "input", (event) => this.moveTo(Number(event.target.value), true));
    theme.listeners.push(() => { this.rank(); this.overview.draw(); this.flame.draw(); });
    new ResizeObserver(() => this.placeCursor()).observe(this.map.plane.canvas);
  }

  show(device, row = Math.max(0, device.peak.row)) {
    const isNew = device !== this.device;
    if (isNew && !byId("axis").disabled) byId("axis").value = device.idle > IDLE ? "event" : "time";
    Object.assign(this, { device, row, x: device.axis(byId("axis").value) });
    this.from = this.x[0];
    this.to = this.x[device.rows];
    if (isNew) {
      this.live = device.active;
      this.isSide = device.is_side;
      this.isPrivate = device.is_private;
      this.hatches = Uint8Array.from({ length: device.blocks.count }, (_, i) => (
        (this.isPrivate[device.blocks.pool[i]] ? HATCHED.pool : 0) | (this.isSide[device.blocks.stream[i]] ? HATCHED.stream : 0)));
      this.colours = new Uint32Array(device.blocks.count);
      this.pinned = this.visible = this.matched = this.matchedSites = null;
      for (const hidden of Object.values(this.hidden)) hidden.clear();
      this.slots.clear();
      this.selection.show();
      this.match();
      byId("by-site").textContent = device.hasStacks ? "call site" : "requested size";
      byId("colour").value = this.defaultColour();
    }
    this.map.show(device);
    this.timeline.show(device);
    this.ranges.show(device);
    this.overview.show(device);
    this.timeline.fit();
    this.rank();
    this.placeCursor();
    this.sayRange();
    this.painted.then(() => this.tellMoment());
  }

  /** Use the other axis, for the same part of the recording. */
  chooseAxis() {
    const [first, last] = this.shownRows();
    const isWhole = this.isWhole();
    this.show(this.device, this.row);
    if (!isWhole) this.setRange(this.x[first], this.x[last + 1]);
  }

  /** Fit the drawings to what is live, or to what is reserved. */
  fit() {
    this.showsReserved = byId("reserved").checked;
    this.timeline.isFitted = true;
    this.timeline.fit();
    this.map.fit();
    this.overview.draw();
    this.keeper.changed();
  }

  /** Choose the kinds that colours and the stack distinguish in the shown range, and redraw all that use them. */
  rank() {
    this.kinds = this.colouring();
    this.ranked = this.timeline.rank(...this.shownRows());
    // Hidden kinds keep their colours, so that the legend can show them again.
    if (byId("colour").value === "site") this.giveColours([...new Set([...this.hidden.sites, ...this.ranked])].slice(0, PALETTE.length));
    this.colourBlocks();
    this.map.plane.draw();
    this.timeline.plane.draw();
    this.ranges.rank();
    this.moment.draw();
    this.legend.draw();
    this.keeper.changed();
  }

  /** Return the row whose state holds at a position of the horizontal axis. */
  rowAt(position) {
    return Math.max(0, upperBound(this.x, position, 0, this.device.rows) - 1);
  }

  formatX(value) {
    return byId("axis").value === "time" ? formatMoment(value) : `event ${formatCount(Math.round(value))}`;
  }

  formatTick(value, step) {
    return formatTick(value, step, byId("axis").value);
  }

  /** Write the labels of a plane's horizontal axis. */
  labelX(plane) {
    plane.axisX((value, step) => this.formatTick(value, step), { counts: byId("axis").value === "event" });
  }

  // The moment: the cursor.

  /** Move the cursor to one moment and update everything. `reveal` moves the window there if it is outside. */
  moveTo(row, reveal = false) {
    this.row = Math.min(Math.max(row, 0), this.device.rows - 1);
    const at = this.x[this.row];
    if (reveal && (at < this.from || at > this.to)) {
      const span = this.to - this.from;
      this.setRange(at - span / 2, at + span / 2);
    }
    this.placeCursor();
    clearTimeout(this.momentLater); // the line follows at once, tables and pictures when the pointer stops
    this.momentLater = setTimeout(() => this.tellMoment(), 30);
  }

  tellMoment() {
    this.moment.show(this.device, this.row);
    this.flame.show();
    this.tellFound();
    this.keeper.changed();
  }

  placeCursor() {
    if (!this.device) return;
    const share = (this.x[this.row] - this.from) / (this.to - this.from);
    for (const line of document.querySelectorAll(".cursor")) {
      line.hidden = share < 0 || share > 1;
      line.style.left = `calc(${LEFT}px + (100% - ${LEFT + RIGHT}px) * ${share})`;
    }
    this.overview.placeCursor();
  }

  // The range: what part of the recording is shown.

  setRange(from, to) {
    const { bounds } = this.map.plane;
    const span = Math.min(to - from, bounds.x1 - bounds.x0);
    this.from = Math.min(Math.max(from, bounds.x0), bounds.x1 - span);
    this.to = this.from + span;
    for (const { plane } of [this.map, this.timeline, this.ranges]) plane.setView({ ...plane.view, x0: this.from, x1: this.to }, false);
    this.timeline.fit();
    this.placeCursor();
    clearTimeout(this.rangeLater);
    this.rangeLater = setTimeout(() => this.tellRange(), 250);
  }

  tellRange() {
    this.rank();
    this.moment.drawTables();
    this.sayRange();
  }

  isWhole() {
    return this.from <= this.x[0] && this.to >= this.x[this.device.rows];
  }

  sayRange() {
    const inTime = byId("axis").value === "time";
    const idle = `${formatShare(this.device.idle)} of the time is idle`;
    byId("axis-note").textContent = inTime ? "Host time" : `Order of events${this.device.idle > IDLE ? `: ${idle}` : ""}`;
    byId("range").textContent = this.isWhole() ? "whole recording" : [this.from, this.to].map((x) => this.formatTick(x, (this.to - this.from) / 100)).join(" to ");
  }

  /** Return the first and last row of the range. */
  shownRows() {
    return [this.rowAt(this.from), this.rowAt(this.to)];
  }

  peakInRange() {
    const [first, last] = this.shownRows();
    return highest(this.live, first, last + 1);
  }

  zoom(factor) {
    const { plane } = this.map;
    const at = this.x[this.row];
    const inside = at >= this.from && at <= this.to;
    plane.zoom(factor, false, inside ? (at - this.from) / (this.to - this.from) : 0.5);
  }

  showAll() {
    for (const { plane } of [this.map, this.timeline]) plane.setView(plane.bounds, false);
    this.timeline.isFitted = true;
    this.setRange(this.x[0], this.x[this.device.rows]);
  }

  /** Do the action of a key in both drawings; `order()` returns the blocks at the cursor from top to bottom. */
  key(event, order) {
    const step = (direction) => {
      const by = (this.to - this.from) / this.map.plane.width;
      const next = this.rowAt(this.x[this.row] + direction * by);
      this.moveTo(next === this.row ? this.row + direction : next, true);
    };
    const choose = (direction) => {
      const blocks = order();
      const at = blocks.indexOf(this.pinned);
      if (blocks.length) this.pin(blocks[at < 0 ? 0 : Math.min(Math.max(at + direction, 0), blocks.length - 1)]);
    };
    const actions = {
      ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => choose(-1), ArrowDown: () => choose(1),
      Home: () => this.moveTo(this.shownRows()[0]), End: () => this.moveTo(this.shownRows()[1]),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), 0: () => this.showAll(),
      Escape: () => this.pin(null),
    };
    if (event.shiftKey && event.key.startsWith("Arrow") || !actions[event.key]) return false;
    actions[event.key]();
    return true;
  }

  // The allocation that is pinned.

  pin(block) {
    this.pinned = block;
    this.selection.show();
    this.map.plane.draw();
    this.moment.drawSegments();
    this.keeper.changed();
  }

  // What is searched for and what is shown at all.

  find() {
    this.match();
    this.filter();
  }

  /** Find the blocks whose stack, call site or range contains the searched text. */
  match() {
    const wanted = byId("search").value.trim().toLowerCase();
    this.matched = this.matchedSites = null;
    if (!wanted) return;
    const { device, shared } = this;
    const { blocks, sites } = device;
    const has = (text) => text.toLowerCase().includes(wanted);
    const bySite = Uint8Array.from(sites.label, (label, site) => has(label) || has(shared.stacks.text(sites.stack[site])));
    const byRange = Uint8Array.from(shared.names, has);
    this.matched = new Uint8Array(blocks.count);
    this.matchedSites = new Uint8Array(sites.label.length);
    for (let i = 0; i < blocks.count; i++) {
      if (bySite[blocks.site[i]] || byRange[blocks.range[i]]) this.matched[i] = this.matchedSites[blocks.site[i]] = 1;
    }
  }

  /** Show how much was found: in total, at the cursor and at the peak. */
  tellFound() {
    byId("found").textContent = "";
    if (!this.matched) return;
    const { blocks, peak } = this.device;
    let count = 0;
    let now = 0;
    let then = 0;
    for (let i = 0; i < blocks.count; i++) {
      if (!this.matched[i]) continue;
      count++;
      if (blocks.start[i] <= this.row && this.row < blocks.freed[i]) now += blocks.size[i];
      if (blocks.start[i] <= peak.row && peak.row < blocks.freed[i]) then += blocks.size[i];
    }
    const sites = this.matchedSites.reduce((sum, one) => sum + one, 0);
    byId("found").textContent = count
      ? `${counted(count, "allocation")}, ${counted(sites, "call site")}: ${formatBytes(now)} at the cursor, ${formatBytes(then)} at the peak`
      : "nothing found";
  }

  /** Hide what is switched off in the legend or, if only matches are wanted, what does not match. */
  filter() {
    const { device, shared } = this;
    const { blocks } = device;
    const { sites, purposes, streams, pools } = this.hidden;
    const only = byId("only").checked ? this.matched : null;
    this.visible = null;
    this.live = device.active;
    if (only || Object.values(this.hidden).some((hidden) => hidden.size)) {
      const isHidden = shared.rules.map((rule) => purposes.has(shared.categories.indexOf(rule.category)));
      this.visible = new Uint8Array(blocks.count);
      for (let i = 0; i < blocks.count; i++) {
        this.visible[i] = !streams.has(blocks.stream[i]) && !pools.has(blocks.pool[i]) && !sites.has(blocks.site[i])
          && !isHidden[blocks.rule[i]] && (!only || only[i]) ? 1 : 0;
      }
      this.live = device.curve(blocks, "freed", this.visible);
    }
    this.timeline.fit();
    this.tellFound();
    this.tellRange();
  }

  showHidden() {
    for (const hidden of Object.values(this.hidden)) hidden.clear();
    this.filter();
  }

  // What a link restores.

  /** Return what differs from the page as it opens, as texts. */
  state() {
    const { device, row, pinned, timeline, hidden } = this;
    const { view } = timeline.plane;
    const axis = byId("axis").value;
    const list = (items) => Array.from(items).sort((a, b) => a - b).join();
    return {
      device: device.device === Number(byId("device").options[0].textContent) ? "" : device.device,
      axis: byId("axis").disabled || axis === (device.idle > IDLE ? "event" : "time") ? "" : axis,
      colour: byId("colour").value === this.defaultColour() ? "" : byId("colour").value,
      shown: this.isWhole() ? "" : `${this.from},${this.to}`,
      bytes: timeline.isFitted ? "" : `${-view.y1},${-view.y0}`,
      at: row === Math.max(0, device.peak.row) ? "" : row,
      pin: pinned,
      find: byId("search").value,
      only: byId("only").checked ? 1 : "",
      reserved: this.showsReserved ? 1 : "",
      ...Object.fromEntries(Object.entries(hidden).map(([name, items]) => [`hide-${name}`, list(items)])),
    };
  }

  /** Restore the state that such texts describe; what they do not name is as when the page opens. */
  restore(state) {
    const { device } = this;
    const choose = (id, value, usual) => {
      const values = Array.from(byId(id).options, (option) => option.value);
      byId(id).value = values.includes(value) ? value : usual;
    };
    const inside = (text, count) => stateNumbers(text).filter((i) => Number.isInteger(i) && i >= 0 && i < count);
    if (!byId("axis").disabled) choose("axis", state.axis, device.idle > IDLE ? "event" : "time");
    choose("colour", state.colour, this.defaultColour());
    byId("search").value = state.find || "";
    byId("only").checked = Boolean(state.only);
    byId("reserved").checked = Boolean(state.reserved);
    const counts = { sites: device.sites.label.length, purposes: this.shared.categories.length, streams: device.streams.length, pools: device.pools.length };
    for (const [name, items] of Object.entries(this.hidden)) {
      items.clear();
      for (const item of inside(state[`hide-${name}`], counts[name])) items.add(item);
    }
    const [row = Math.max(0, device.peak.row)] = inside(state.at, device.rows);
    this.show(device, row);
    this.fit();
    this.find();
    const [from, to] = stateNumbers(state.shown);
    if (to > from) this.setRange(from, to);
    const [low, high] = stateNumbers(state.bytes);
    if (high > low) {
      this.timeline.isFitted = false;
      this.timeline.plane.setView({ ...this.timeline.plane.view, y0: -high, y1: -low }, false);
    }
    const [pinned = null] = inside(state.pin, device.blocks.count);
    this.pin(pinned);
  }

  // Colours.

  /** Return the most informative meaning of the colours, which is used when the page opens. */
  defaultColour() {
    const { device } = this;
    const known = device.diagnosis.categories.at_peak.some((share) => share.category !== "unknown");
    return device.hasStacks ? "site" : known ? "purpose" : "size";
  }

  /** Assign colours to call sites; those that have one keep it. */
  giveColours(sites) {
    const kept = new Map(sites.filter((site) => this.slots.has(site)).map((site) => [site, this.slots.get(site)]));
    const taken = new Set(kept.values());
    let slot = 0;
    for (const site of sites) {
      if (kept.has(site)) continue;
      while (taken.has(slot)) slot++;
      kept.set(site, slot);
      taken.add(slot);
    }
    this.slots = kept;
  }

  /** Return the meaning of the colours: the kind of each block, the number of kinds, and the pixel of a kind. */
  colouring() {
    const { device } = this;
    const { blocks } = device;
    const { rules, categories } = this.shared;
    const plain = (index) => pixel(paletteColour(index));
    const { other } = theme.pixels;
    return {
      site: () => ({ of: blocks.site, count: device.sites.label.length, colour: (site) => (this.slots.has(site) ? plain(this.slots.get(site)) : other) }),
      purpose: () => ({ of: blocks.rule, count: rules.length,
        colour: (rule) => (rules[rule].category === "unknown" ? other : plain(categories.indexOf(rules[rule].category))) }),
      stream: () => ({ of: blocks.stream, count: device.streams.length, colour: plain }),
      pool: () => ({ of: blocks.pool, count: device.pools.length, colour: plain }),
      size: () => ({ of: Uint8Array.from(blocks.size, (size) => 4 * Math.log2(Math.max(1, size))), count: 256, colour: (kind) => sizeColour(kind / 4) }),
    }[byId("colour").value]();
  }

  /** Choose a colour for each block and each kind: what does not match is faded. */
  colourBlocks() {
    const { kinds, matched, colours } = this;
    const full = Uint32Array.from({ length: kinds.count }, (_, kind) => kinds.colour(kind));
    const faded = full.map((colour) => mix(colour, theme.pixels.card, 0.82));
    this.kindColours = matched ? faded.slice() : full;
    for (let i = 0; i < colours.length; i++) {
      const kind = kinds.of[i];
      if (!matched || matched[i]) this.kindColours[kind] = colours[i] = full[kind];
      else colours[i] = faded[kind];
    }
  }

  css(block) {
    return css(this.colours[block]);
  }

  // Parts of both drawings.

  /** Mark the peak and failed allocations. */
  drawMarks(plane, names = false) {
    const { device, x } = this;
    const { context, ratio } = plane;
    for (const { row } of device.ooms) plane.line(x[row], theme.peak, { wide: 2, dash: [2, 2] });
    if (device.peak.row < 0) return;
    plane.line(x[device.peak.row], theme.peak);
    if (!names) return;
    const name = (row, text, line) => {
      if (x[row] < plane.view.x0 || x[row] > plane.view.x1) return;
      const at = plane.inset + (x[row] - plane.view.x0) * plane.scaleX;
      const right = at > plane.inset + plane.width * 0.7;
      context.font = `600 ${11.5 * ratio}px ${FONT}`;
      context.textAlign = right ? "right" : "left";
      context.textBaseline = "middle";
      const y = (10 + 15 * line) * ratio;
      const wide = context.measureText(text).width + 8 * ratio;
      const left = right ? at - wide - 2 * ratio : at + 2 * ratio;
      context.fillStyle = theme.card;
      context.globalAlpha = 0.85;
      context.fillRect(left, y - 7.5 * ratio, wide, 15 * ratio);
      context.globalAlpha = 1;
      context.fillStyle = theme.peak;
      context.fillText(text, right ? at - 6 * ratio : at + 6 * ratio, y);
    };
    name(device.peak.row, `peak ${formatBytes(device.active[device.peak.row])}`, 0);
    const shown = device.ooms.filter(({ row }) => x[row] >= plane.view.x0 && x[row] <= plane.view.x1);
    if (shown.length) name(shown[0].row, shown.length === 1 ? `out of memory: ${formatBytes(shown[0].size)} wanted` : `${formatCount(shown.length)} times out of memory`, 1);
  }

  /** Note that a drawing is up to date; the first time both are is the page's first picture. */
  drawn(which) {
    if (this.frames.first) return;
    this.frames[which] = true;
    if (!this.frames.map || !this.frames.timeline) return;
    this.frames.first = true;
    setTimeout(() => { // once it has been painted
      performance.mark("first picture");
      this.onPainted();
    });
  }

  sayDetail(shown, hidden) {
    byId("detail").textContent = `${counted(shown, "allocation")} in view${hidden
      ? `; ${formatCount(hidden)} of them share all their pixels with others: zoom in to see each` : ", each with a pixel of its own"}`;
  }

  /** Return the stream and the pool of a block or segment, in words. */
  where(table, i) {
    const { streams, pools } = this.device;
    return [streams[table.stream[i]], pools[table.pool[i]]].filter((label) => label !== "default pool").join(", ");
  }

  /** Return what is known of a block, line by line. */
  facts(i, row = this.row) {
    const { device, x, shared } = this;
    const { blocks } = device;
    const [start, freed, end] = [blocks.start[i], blocks.freed[i], blocks.end[i]];
    const rule = shared.rules[blocks.rule[i]];
    const lived = byId("axis").value === "time" && freed < device.rows ? `, after ${formatTime(x[freed] - x[start])}` : "";
    return {
      size: formatBytes(blocks.size[i]),
      requested: blocks.slack[i] ? `${formatBytes(blocks.size[i] - blocks.slack[i])} requested` : "as requested",
      state: row < start ? "not yet allocated at the cursor" : row < freed ? "" : row < end ? "freed, but a stream still holds it" : "freed before the cursor",
      address: `0x${blocks.address[i].toString(16)}`,
      where: this.where(blocks, i),
      allocated: this.formatX(x[start]),
      freed: freed >= device.rows ? "never" : `${this.formatX(x[freed])}${lived}`,
      reusable: end === freed ? "" : end >= device.rows ? "never" : this.formatX(x[end]),
      site: device.sites.label[blocks.site[i]],
      range: shared.names[blocks.range[i]],
      module: device.modules[blocks.module[i]],
      category: rule.category === "unknown" ? "" : rule.category,
      purpose: rule.category === "unknown" ? "" : `${rule.category} (inferred: ${rule.reason}; confidence ${rule.confidence})`,
      stack: device.sites.stack[blocks.site[i]],
    };
  }

  describeBlock(i, row) {
    const facts = this.facts(i, row);
    const frames = this.shared.stacks.lines(facts.stack);
    return [
      [`${facts.size} (${facts.requested})`, facts.state].filter(Boolean).join(", "),
      `allocated ${facts.allocated}, freed ${facts.freed}`,
      `${facts.address}, ${facts.where}`,
      facts.range && `in ${facts.range}`,
      facts.module && `module ${facts.module}`,
      facts.category && `${facts.category} (inferred)`,
      ...frames.slice(0, 10),
      frames.length > 10 ? `... ${formatCount(frames.length - 10)} more frames: click` : "",
    ].filter(Boolean).join("\n");
  }
}
