// Reads the payload and shows what it has.

class Stacks {
  constructor(data) {
    this.strings = data.strings;
    this.missing = data.missing_stack; // why an allocation has no stack, in words
    this.frames = data.frames;
    this.offset = data.stacks.offset;
    this.frame = data.stacks.frame;
    this.length = this.offset.length - 1;
  }

  /** Return a stack's frames, innermost first, as [function, "file:line", line of source or ""]. */
  pairs(stack) {
    const { frames, strings } = this;
    return Array.from(this.frame.subarray(this.offset[stack], this.offset[stack + 1]), (frame) => (
      [strings[frames.function[frame]], frames.line[frame] || strings[frames.file[frame]] ? `${strings[frames.file[frame]]}:${frames.line[frame]}` : "", strings[frames.code[frame]]]));
  }

  lines(stack) {
    return this.pairs(stack).map(([name, place]) => `${place} ${name}`);
  }

  /** Return a list's items. */
  items(stack) {
    return this.pairs(stack).map(([name, place, code]) => frameItem(`${place} ${name}`, code));
  }

  /** Return the frames, outermost first; a stack that was not recorded has one frame that says so. */
  path(stack) {
    const pairs = this.pairs(stack).reverse();
    return pairs.length ? pairs : [[this.missing, "", ""]];
  }

  text(stack) {
    return this.lines(stack).join("\n");
  }
}

class Shared {
  constructor(data) {
    this.stacks = new Stacks(data);
    this.names = data.names;
    this.rules = data.rules;
    this.categories = Array.from(new Set(data.rules.map((rule) => rule.category))).sort((a, b) => (a === "unknown") - (b === "unknown"));
  }

  /** Return a table's row, which opens to show the stack if there is one. */
  row({ name, detail, numbers, stack = 0, colour = "transparent" }) {
    const items = this.stacks.items(stack);
    const parts = [
      swatch(colour), element("span", { className: "name", title: name }, name, " ", element("small", {}, detail)),
      element("span", { className: "numbers" }, numbers),
    ];
    if (!items.length) return element("div", { className: "row" }, element("div", {}, ...parts));
    const details = element("details", { className: "row" }, element("summary", {}, ...parts));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) {
        details.append(element("ol", {}, ...items));
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
  const knowsReserved = device.peak_reserved !== null;
  const last = device.rows - 1;
  const at = (curve, row) => (row >= 0 ? curve[row] : 0);
  const reservedThen = at(device.reserved, peak.row);
  const reservedNow = at(device.reserved, last);
  const unusedNow = reservedNow ? 1 - at(device.active, last) / reservedNow : 0;
  byId("tiles").replaceChildren(...[
    tile(formatBytes(at(device.allocated, peak.row)), "allocated at the peak", `${formatBytes(peak.requested)} requested`),
    ...(knowsReserved ? [
      tile(formatBytes(device.peak_reserved), "reserved, highest", `${formatBytes(reservedThen)} at the peak`),
      tile(formatShare(peak.fragmentation), "fragmentation at the peak", `${formatShare(unusedNow)} at the end`),
    ] : [tile("unknown", "reserved", "the recording does not say")]),
    tile(formatBytes(at(device.allocated, last)), "allocated at the end", ...(knowsReserved ? [`${formatBytes(reservedNow)} reserved`] : [])),
    tile(formatCount(device.allocations), "allocations", `${formatBytes(device.still_live)} never freed`),
    device.ooms.length ? tile(formatCount(device.ooms.length), "times out of memory", "marked in red") : null,
  ].filter(Boolean));
}

/** What a recording has of pinned memory: the numbers of PyTorch's allocator, or who held it when most was pinned. */
function showPinned(shared, pinned, holders) {
  byId("pinned").hidden = pinned === null && holders === null;
  const tiles = [];
  if (pinned) tiles.push(
    tile(formatBytes(pinned.active), "in use at the end"),
    tile(pinned.events ? formatBytes(pinned.peak_active) : "unknown", "in use, highest", ...(pinned.events ? [] : ["no events were recorded"])),
    tile(formatBytes(pinned.reserved), "reserved at the end", counted(pinned.segments, "segment")),
  );
  if (holders) {
    tiles.push(tile(formatBytes(holders.size), "pinned, highest", "below: who held it then"), tile(formatBytes(holders.now), "pinned at the end"));
    byId("pinned-sites").hidden = false;
    fill(byId("pinned-sites"), null, holders.sites, holders.sites.length, (site) => shared.row({
      name: site.label, detail: `${site.owner}, ${site.words}, ${counted(site.count, "piece")}`, numbers: formatBytes(site.size), stack: site.stack }));
  }
  byId("pinned-tiles").replaceChildren(...tiles);
}

/** Which call sites hold what libraries said of their pools, when they were asked and had most. */
function showLibraryBlocks(shared, libraries) {
  const section = byId("library-blocks");
  section.hidden = libraries.length === 0;
  section.replaceChildren(...libraries.flatMap((one) => {
    const most = one.most === null ? "" : `; ${formatBytes(one.most)} in use at most, temporary memory included`;
    const rows = element("div", { className: "scroll short", tabIndex: 0, role: "region", ariaLabel: `Arrays of ${one.library}` });
    fill(rows, null, one.sites, one.sites.length, (site) => shared.row({
      name: site.label, detail: counted(site.count, "array"), numbers: formatBytes(site.size), stack: site.stack }));
    return [
      element("h2", {}, `Arrays of ${one.library} on device ${one.device}`),
      element("p", { className: "quiet" }, `When it was asked and had most: ${formatBytes(one.size)} together${most}`),
      rows,
    ];
  }));
}

function showWork(shared, data) {
  byId("work").hidden = false;
  let streams = null;
  if (data.operations.start.length) streams = new StreamsView(shared, data);
  else byId("streams").closest(".card").hidden = true;
  const time = (ns) => (ns === null ? "time not recorded" : formatTime(ns) + (data.simulated ? " (simulated)" : ""));
  if (data.simulated) byId("streams-clock").textContent = byId("streams-clock").textContent.replace("Device time", "Device time (simulated)");
  fill(byId("kernels"), null, data.kernels, data.kernels.length, (k) => shared.row({
    name: k.name, detail: `${formatCount(k.launches)} launched`, numbers: time(k.time) }));
  fill(byId("copies"), null, data.copies, data.copies.length, (c) => shared.row({
    name: c.name, detail: `${formatCount(c.count)}, ${time(c.time)}`, numbers: formatBytes(c.size) }));
  return streams;
}

/** The findings of a check come first, with the streams; memory follows. */
function showDefects({ defects, verdict, gaps }, streams) {
  document.querySelector("main").prepend(byId("defects"), byId("work"));
  byId("streams-clock").textContent = byId("streams-clock").textContent.replace("above", "below");
  new DefectsView(defects, streams, verdict, gaps);
}

function showFindings(findings, several) {
  byId("notes").hidden = !findings.length;
  byId("notes").replaceChildren(...findings.map(({ severity, confidence, device, message }) => element("li", { className: severity },
    element("b", {}, severity), several && device >= 0 ? ` device ${device}: ` : " ", message, confidence === "high" ? "" : ` (confidence ${confidence})`)));
}

/** The keys of this page, some only where it has a view of memory, and the help that lists them. */
function listenToPage(view) {
  const help = byId("help");
  const open = () => help.showModal();
  byId("help-open").addEventListener("click", open);
  byId("help-close").addEventListener("click", () => help.close());
  listenToKeys({
    "?": open,
    ...view && {
      "+": () => view.zoom(0.7), "=": () => view.zoom(0.7), "-": () => view.zoom(1 / 0.7),
      0: () => view.showAll(), p: () => view.moveTo(view.peakInRange(), true), Escape: () => view.pin(null),
    },
  });
  if (!view) return;
  byId("search").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    byId("search").value = "";
    view.find();
    view.map.plane.canvas.focus();
  });
}

async function showPage() {
  const data = readPayload(await inflate(byId("payload").textContent));
  byId("source").textContent = data.source || "cudatool";
  byId("subtitle").textContent = [
    `${formatCount(data.events)} events`, data.duration ? formatTime(data.duration) : "", data.recorded_on,
  ].filter(Boolean).join(", ");
  const failed = data.devices.filter((device) => !device.time.length && device.ooms.length).map(({ device, ooms }) => (
    { severity: "error", confidence: "high", device, message: `nothing was allocated: ${counted(ooms.length, "allocation")} found no memory` }));
  showFindings([...data.findings, ...failed], data.devices.length > 1);
  const shared = new Shared(data);
  showMeanings();
  let view = null;
  const raw = data.devices.filter((device) => device.time.length);
  if (raw.length) {
    byId("memory").hidden = false;
    const devices = raw.map(() => null); // each is laid out when it first becomes visible
    if (data.clock === "index") {
      byId("axis").value = "event";
      byId("axis").disabled = true;
    }
    view = new MemoryView(shared);
    const diagnosis = new DiagnosisView(shared, view);
    const show = async (i, state = NO_STATE) => {
      const device = devices[i] = devices[i] || new DeviceMemory(raw[i], shared);
      showTiles(device);
      diagnosis.drawAdvice(device.diagnosis.remedies);
      diagnosis.drawLeaks(device.diagnosis.leaks);
      view.show(device);
      if (Object.keys(state).length) view.restore(state);
      await view.painted; // first the picture, then everything below it
      diagnosis.show(device);
    };
    const choice = byId("device");
    choice.replaceChildren(...raw.map((device, i) => element("option", { value: i }, String(device.device))));
    byId("device-choice").hidden = raw.length < 2;
    choice.addEventListener("change", () => show(Number(choice.value)));
    const state = readState();
    const first = Math.max(0, raw.findIndex((device) => String(device.device) === state.device));
    choice.value = first;
    await show(first, state);
  }
  showPlans(data.plans, shared);
  showLibraryBlocks(shared, data.library_blocks);
  showPinned(shared, data.pinned, data.pinned_holders);
  const worked = data.kernels.length || data.copies.length || data.operations.start.length;
  const streams = worked ? showWork(shared, data) : null;
  if (data.defects) showDefects(data, streams);
  byId("nothing").hidden = !["memory", "plans", "library-blocks", "pinned", "work"].every((id) => byId(id).hidden);
  if (byId("memory").hidden) byId("streams-clock").textContent = byId("streams-clock").textContent.replace(/: not the axis .*/, "");
  listenToPage(view);
  window.memoryView = view; // for use in the console
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = "true"; }));
}

if ("DecompressionStream" in window) {
  showPage();
} else {
  byId("nothing").hidden = false;
  byId("nothing").textContent = "This browser is too old for the page: it cannot unpack compressed data (DecompressionStream). Chrome 80, Firefox 113 and Safari 16.4 can.";
}
