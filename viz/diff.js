// Two recordings side by side: their curves, and what each call site holds at the peaks.

const MAX_ROWS = 500;
const SIDES = ["before", "after"];

const signed = (bytes) => `${bytes > 0 ? "+" : ""}${formatBytes(bytes)}`;

class DiffView {
  constructor(data) {
    this.data = data;
    this.hidden = new Set();
    this.keeper = new StateKeeper(this);
    this.plane = new Plane(byId("curves"), {
      bounds: { x0: 0, x1: 1, y0: -1, y1: 0 }, draw: () => this.draw(), describe: (x) => this.words(x).join("\n"),
      onView: () => { this.fit(); this.keeper.changed(); }, onPick: (x) => this.moveTo(x), onKey: (event) => this.key(event), holdsY: () => true,
    });
    const on = (id, event, action) => byId(id).addEventListener(event, action);
    on("axis", "change", () => this.showCurves());
    on("reserved", "change", () => { this.fit(); this.keeper.changed(); });
    for (const [id, event] of [["search", "input"], ["all", "change"], ["order", "change"]]) on(id, event, () => this.list());
    on("device", "change", () => this.show(Number(byId("device").value)));
    theme.listeners.push(() => { this.showLegend(); this.plane.draw(); this.list(); });
  }

  show(index) {
    this.index = index;
    this.device = this.data.devices[index];
    const { device } = this;
    const tile = (change, title, [before, after]) => element("div", { className: "tile" },
      element("b", {}, change), element("span", {}, title), element("span", {}, `${before} → ${after}`));
    const bytes = (name) => SIDES.map((side) => device[name][side]);
    const tiles = Object.entries({ active: "active, at the peak", reserved: "reserved, at most" }).map(([name, title]) => {
      const [before, after] = bytes(name);
      return tile(before === null || after === null ? "unknown" : signed(after - before), title, [before, after].map(formatBytes));
    });
    const counts = [device.rows.filter((row) => row.change > 0).length, device.rows.filter((row) => row.change < 0).length];
    tiles.push(element("div", { className: "tile" }, element("b", {}, formatCount(counts[0])), element("span", {}, "call sites hold more")),
      element("div", { className: "tile" }, element("b", {}, formatCount(counts[1])), element("span", {}, "call sites hold less")));
    byId("tiles").replaceChildren(...tiles);
    this.showLegend();
    this.showCurves();
    this.list();
  }

  // The curves.

  colour(side) {
    return side === "after" ? theme.accent : PALETTE[1];
  }

  showLegend() {
    byId("legend").replaceChildren(...SIDES.map((side, at) => {
      const button = element("button", { type: "button", className: "chip" }, swatch(this.colour(side)), element("span", { className: "name" }, `${side}: ${this.data[side]}`));
      button.setAttribute("aria-pressed", String(!this.hidden.has(side)));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(side)) this.hidden.add(side);
        this.showLegend();
        this.fit();
        this.keeper.changed();
        byId("legend").querySelectorAll("button")[at].focus();
      });
      return button;
    }));
  }

  showCurves() {
    const axis = byId("axis").value;
    this.x = {};
    for (const side of SIDES) {
      const { time } = this.device.curves[side];
      const rows = time.length;
      const x = this.x[side] = new Float64Array(rows + 1); // the last is the end
      let latest = 0;
      for (let i = 0; i < rows; i++) x[i] = latest = axis === "time" ? Math.max(latest, time[i]) : axis === "event" ? i : i / rows;
      x[rows] = !rows ? 0 : axis === "time" ? latest + Math.max(1, latest * 0.004) : axis === "event" ? rows : 1;
    }
    const end = Math.max(...SIDES.map((side) => this.x[side].at(-1))) || 1;
    this.cursor = null;
    Object.assign(this.plane, { bounds: { x0: 0, x1: end, y0: -1, y1: 0 } });
    this.plane.view = { ...this.plane.bounds };
    this.fit();
    this.moveTo(this.peakAt("after"));
  }

  /** Return where a side has the most bytes active. */
  peakAt(side) {
    const { active } = this.device.curves[side];
    return active.length ? this.x[side][highest(active, 0, active.length)] : 0;
  }

  rowAt(side, x) {
    const rows = this.x[side].length - 1;
    return x < this.x[side][rows] || x === 0 ? upperBound(this.x[side], x, 0, rows) - 1 : -1;
  }

  /** Return whether the reserved bytes of a side are drawn: a log of RMM does not have them. */
  showsReserved(side) {
    return byId("reserved").checked && this.device.reserved[side] !== null;
  }

  /** Let the highest bytes of the shown range fill the height. */
  fit() {
    const { plane } = this;
    let most = 1;
    for (const side of SIDES) {
      if (this.hidden.has(side)) continue;
      const { active, reserved } = this.device.curves[side];
      const first = Math.max(0, upperBound(this.x[side], plane.view.x0, 0, active.length) - 1);
      const last = upperBound(this.x[side], plane.view.x1, 0, active.length);
      for (let row = first; row < last; row++) most = Math.max(most, this.showsReserved(side) ? reserved[row] : 0, active[row]);
    }
    Object.assign(plane.bounds, { y0: -most * 1.06 });
    Object.assign(plane.view, { y0: -most * 1.06, y1: 0 });
    plane.draw();
  }

  draw() {
    const { plane } = this;
    const { context, ratio } = plane;
    context.fillStyle = theme.card;
    context.fillRect(0, 0, plane.canvas.width, plane.canvas.height);
    plane.axisY(true);
    const format = { time: (value, step) => formatTick(value, step, "time"), event: formatCount, share: (value) => `${Number((100 * value).toFixed(4))} %` };
    plane.axisX(format[byId("axis").value], { counts: byId("axis").value === "event" });
    context.save();
    context.beginPath();
    context.rect(plane.inset, 0, plane.width, plane.height);
    context.clip();
    for (const side of SIDES) {
      if (this.hidden.has(side)) continue;
      const { active, reserved } = this.device.curves[side];
      if (this.showsReserved(side)) this.drawCurve(side, reserved, 1, [4, 3]);
      this.drawCurve(side, active, 2, []);
    }
    context.restore();
    if (this.cursor !== null) plane.line(this.cursor, theme.text, { dash: [3, 3], wide: ratio });
    plane.outlineSelection();
  }

  /** Draw a curve; each column of pixels shows its highest value. */
  drawCurve(side, values, wide, dash) {
    const { plane } = this;
    const { context, ratio, view } = plane;
    const x = this.x[side];
    const rows = values.length;
    if (!rows) return;
    context.strokeStyle = this.colour(side);
    context.lineWidth = wide * ratio;
    context.setLineDash(dash.map((d) => d * ratio));
    context.beginPath();
    let row = Math.max(0, upperBound(x, view.x0, 0, rows) - 1);
    for (let column = 0; column < plane.width && view.x0 + column / plane.scaleX <= x[rows]; column++) {
      const end = view.x0 + (column + 1) / plane.scaleX;
      let most = values[row];
      while (row + 1 < rows && x[row + 1] < end) most = Math.max(most, values[++row]);
      const y = (-most - view.y0) * plane.scaleY;
      if (column) context.lineTo(plane.inset + column, y);
      else context.moveTo(plane.inset, y);
      context.lineTo(plane.inset + column + 1, y);
    }
    context.stroke();
    context.setLineDash([]);
  }

  formatX(x) {
    const axis = byId("axis").value;
    return axis === "time" ? formatMoment(x) : axis === "event" ? `event ${formatCount(Math.round(x))}` : formatShare(x);
  }

  /** Return what both recordings hold at a place of the axis, in lines. */
  words(x) {
    const rows = SIDES.map((side) => this.rowAt(side, x));
    const lines = SIDES.map((side, i) => {
      const { active, reserved } = this.device.curves[side];
      return `${side}: ${rows[i] < 0 ? "not recorded" : `${formatBytes(active[rows[i]])} active, ${formatBytes(this.device.reserved[side] === null ? null : reserved[rows[i]])} reserved`}`;
    });
    const both = rows.every((row) => row >= 0);
    const change = both ? this.device.curves.after.active[rows[1]] - this.device.curves.before.active[rows[0]] : 0;
    return [this.formatX(x), ...lines, ...both ? [`change: ${signed(change)}`] : []];
  }

  moveTo(x) {
    const { bounds } = this.plane;
    this.cursor = Math.min(Math.max(x, bounds.x0), bounds.x1);
    byId("moment").textContent = this.words(this.cursor).join("; ");
    this.plane.draw();
    this.keeper.changed();
  }

  key(event) {
    const { view } = this.plane;
    const step = (view.x1 - view.x0) / 100;
    const by = { ArrowLeft: -step, ArrowRight: step }[event.key];
    const to = { Home: view.x0, End: view.x1 }[event.key];
    if (event.shiftKey || (by === undefined && to === undefined)) return false;
    this.moveTo(to === undefined ? this.cursor + by : to);
    return true;
  }

  // The call sites.

  list() {
    const wanted = byId("search").value.trim().toLowerCase();
    const has = (row) => [row.label, ...row.stack_before, ...row.stack_after].some((text) => text.toLowerCase().includes(wanted));
    const differs = (row) => row.change !== 0 || row.count_before !== row.count_after;
    const rows = this.device.rows.filter((row) => (byId("all").checked || differs(row)) && (!wanted || has(row)));
    const key = { change: (row) => Math.abs(row.change), grown: (row) => row.change, shrunk: (row) => -row.change, after: (row) => row.after, before: (row) => row.before }[byId("order").value];
    rows.sort((a, b) => key(b) - key(a) || b.after - a.after);
    const same = this.device.rows.length - this.device.rows.filter(differs).length;
    byId("count").textContent = [
      `${counted(rows.length, "call site")}${rows.length > MAX_ROWS ? `, the first ${formatCount(MAX_ROWS)} shown` : ""}`,
      byId("all").checked ? "" : `${counted(same, "call site")} ${same === 1 ? "holds" : "hold"} the same in both`,
      wanted ? `change of those found: ${signed(rows.reduce((sum, row) => sum + row.change, 0))}` : "",
    ].filter(Boolean).join("; ");
    const most = this.device.rows.reduce((so, row) => Math.max(so, Math.abs(row.change)), 1);
    byId("rows").tBodies[0].replaceChildren(...rows.slice(0, MAX_ROWS).map((row) => this.row(row, most)));
    this.keeper.changed();
  }

  row(row, most) {
    const stacks = SIDES.map((side) => [side, row[`stack_${side}`]]).filter(([, stack]) => stack.length);
    const same = stacks.length === 2 && stacks[0][1].join() === stacks[1][1].join();
    let site = row.label;
    if (stacks.length) {
      site = element("details", {}, element("summary", {}, row.label));
      site.addEventListener("toggle", () => {
        if (!site.open || site.childElementCount > 1) return;
        for (const [side, stack] of same ? [stacks[1]] : stacks) {
          site.append(...same ? [] : [element("p", { className: "quiet" }, side)], element("ol", { className: "stack" }, ...stack.map((frame) => element("li", {}, frame))));
        }
      });
    }
    const bar = element("span", { className: row.change < 0 ? "less" : "more" });
    bar.style.width = `${50 * Math.abs(row.change) / most}%`;
    const cell = (text) => element("td", {}, text);
    return element("tr", {}, element("td", {}, site, !row.count_before || !row.count_after ? element("small", {}, ` only ${row.count_before ? "before" : "after"}`) : null),
      cell(formatBytes(row.before)), cell(formatBytes(row.after)), cell(signed(row.change)),
      element("td", { className: "bars", ariaHidden: "true" }, row.change ? bar : null), cell(`${formatCount(row.count_before)} → ${formatCount(row.count_after)}`));
  }

  // What a link restores.

  state() {
    const { view, bounds } = this.plane;
    return {
      device: this.index || "",
      axis: byId("axis").value === "share" ? "" : byId("axis").value,
      shown: view.x0 <= bounds.x0 && view.x1 >= bounds.x1 ? "" : `${view.x0},${view.x1}`,
      at: this.cursor === this.peakAt("after") ? "" : this.cursor,
      find: byId("search").value,
      all: byId("all").checked ? 1 : "",
      order: byId("order").value === "change" ? "" : byId("order").value,
      reserved: byId("reserved").checked ? 1 : "",
      hide: Array.from(this.hidden).join(),
    };
  }

  restore(state) {
    const choose = (id, value) => {
      const values = Array.from(byId(id).options, (option) => option.value);
      byId(id).value = values.includes(value) ? value : values[0];
    };
    choose("device", state.device);
    choose("axis", state.axis);
    choose("order", state.order);
    byId("search").value = state.find || "";
    byId("all").checked = Boolean(state.all);
    byId("reserved").checked = Boolean(state.reserved);
    this.hidden = new Set((state.hide || "").split(",").filter((side) => SIDES.includes(side)));
    this.show(Number(byId("device").value));
    const [from, to] = stateNumbers(state.shown);
    if (to > from) {
      this.plane.setView({ ...this.plane.view, x0: from, x1: to }, false);
      this.fit();
    }
    const [at] = stateNumbers(state.at);
    if (at !== undefined) this.moveTo(at);
  }
}

async function showDiff() {
  const data = readPayload(await inflate(byId("payload").textContent));
  byId("source").textContent = `${data.before} → ${data.after}`;
  byId("notes").hidden = !data.notes.length;
  byId("notes").replaceChildren(...data.notes.map((note) => element("li", {}, note)));
  byId("nothing").hidden = data.devices.length > 0;
  byId("compared").hidden = !data.devices.length;
  listenToKeys();
  if (data.devices.length) {
    byId("device").replaceChildren(...data.devices.map((device, i) => element("option", { value: i }, String(device.device))));
    byId("device-choice").hidden = data.devices.length < 2;
    window.diffView = new DiffView(data);
    window.diffView.restore(readState());
  }
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = "true"; }));
}

showDiff();
