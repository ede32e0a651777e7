// Reads the document and shows what it has.

class Stacks {
  constructor(data) {
    this.strings = data.strings;
    this.frames = decodeColumns(data.frames);
    this.offset = decodeColumn(data.stacks.offset);
    this.frame = decodeColumn(data.stacks.frame);
    this.length = this.offset.length - 1;
  }

  /** Return a stack's frames, innermost first, one line each. */
  lines(stack) {
    const { frames, strings } = this;
    return Array.from(this.frame.subarray(this.offset[stack], this.offset[stack + 1]), (frame) => (
      `${strings[frames.file[frame]]}:${frames.line[frame]} ${strings[frames.function[frame]]}`));
  }

  text(stack) {
    return this.lines(stack).join("\n");
  }
}

class Shared {
  constructor(data) {
    this.stacks = new Stacks(data);
    this.sites = data.sites;
    this.pools = data.pools;
    this.streams = new Map(data.streams.map((stream) => [stream.id, stream.label]));
  }

  streamName(id) {
    return id ? this.streams.get(id) || `stream ${id}` : "no stream";
  }

  poolName(pool) {
    if (!pool) return "";
    return `, private pool ${this.pools[pool] ? `(${this.pools[pool].join(", ")})` : pool}`;
  }

  /** Return a table's row, which opens to show the stack if there is one. */
  row({ name, detail, numbers, stack = 0, colour = "transparent" }) {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colour;
    const lines = this.stacks.lines(stack);
    const parts = [
      swatch, element("span", { className: "name", title: name }, name, " ", element("small", {}, detail)),
      element("span", { className: "numbers" }, numbers),
    ];
    if (!lines.length) return element("div", { className: "row" }, element("div", {}, ...parts));
    const details = element("details", { className: "row" }, element("summary", {}, ...parts));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) {
        details.append(element("ol", {}, ...lines.map((line) => element("li", {}, line))));
      }
    });
    return details;
  }
}

function tile(value, ...labels) {
  return element("div", { className: "tile" }, element("b", {}, value), ...labels.map((label) => element("span", {}, label)));
}

function showTiles(device) {
  const { peak } = device;
  const last = device.rows - 1;
  const at = (curve, row) => (row >= 0 ? curve[row] : 0);
  const reservedThen = at(device.reserved, peak.row);
  const reservedNow = at(device.reserved, last);
  const unusedNow = reservedNow ? 1 - at(device.active, last) / reservedNow : 0;
  byId("tiles").replaceChildren(...[
    tile(formatBytes(at(device.allocated, peak.row)), "allocated at the peak", `requested ${formatBytes(peak.requested)}`),
    tile(formatBytes(device.peak_reserved), "reserved, highest", `${formatBytes(reservedThen)} at the peak`),
    tile(formatShare(peak.fragmentation), "fragmentation at the peak", `${formatShare(unusedNow)} at the end`),
    tile(formatBytes(at(device.allocated, last)), "allocated at the end", `${formatBytes(reservedNow)} reserved`),
    tile(formatCount(device.allocations), "allocations", `${formatBytes(device.still_live)} never freed`),
    device.ooms ? tile(formatCount(device.ooms), "out of memory", "marked in red above the curves") : null,
  ].filter(Boolean));
}

function showPage(data) {
  byId("source").textContent = data.source || "cudatool";
  byId("subtitle").textContent = [
    `${formatCount(data.events)} events`, data.duration ? formatTime(data.duration) : "", data.recorded_on,
  ].filter(Boolean).join(", ");
  byId("notes").hidden = !data.notes.length;
  byId("notes").replaceChildren(...data.notes.map((note) => element("li", {}, note)));
  const shared = new Shared(data);

  if (data.devices.some((device) => device.time.n)) {
    byId("memory").hidden = false;
    const devices = data.devices.filter((device) => device.time.n).map((device) => new DeviceMemory(device, shared));
    if (data.clock === "index") {
      byId("axis").value = "event";
      byId("axis").disabled = true;
    }
    if (shared.stacks.length < 2) byId("colour").value = "size";
    const view = new MemoryView(shared);
    const show = (device) => { showTiles(device); view.show(device); };
    const choice = byId("device");
    choice.replaceChildren(...devices.map((device, i) => element("option", { value: i }, String(device.device))));
    byId("device-choice").hidden = devices.length < 2;
    choice.addEventListener("change", () => show(devices[Number(choice.value)]));
    show(devices[0]);
    // Plotly takes longer to start than all the rest: first the picture without it, then the curves.
    window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => {
      document.head.append(element("script", {}, byId("plotly").textContent));
      view.drawTimeline();
      document.documentElement.dataset.ready = "true";
    })));
  } else {
    document.documentElement.dataset.ready = "true";
  }

  if (data.kernels.length || data.copies.length || data.operations.start.n) {
    byId("work").hidden = false;
    if (data.operations.start.n) new StreamsView(shared, data);
    else byId("streams").closest(".card").hidden = true;
    const time = (ns) => (ns === null ? "time not recorded" : formatTime(ns));
    fill(byId("kernels"), null, data.kernels, (k) => shared.row({
      name: k.name, detail: `${formatCount(k.launches)} launched`, numbers: time(k.time) }));
    fill(byId("copies"), null, data.copies, (c) => shared.row({
      name: c.name, detail: `${formatCount(c.count)}, ${time(c.time)}`, numbers: formatBytes(c.size) }));
  }
  byId("nothing").hidden = !(byId("memory").hidden && byId("work").hidden);
}

showPage(JSON.parse(byId("payload").textContent));
