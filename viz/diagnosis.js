// Why so much is reserved, what memory is for, and what holds it: the analysis as charts and tables.

const MOST_MODULES = 200; // rows

class DiagnosisView {
  constructor(shared, memory) {
    Object.assign(this, { shared, memory });
    theme.listeners.push(() => this.drawCharts());
    // Plotly takes longer to start than the rest of the page, so it starts when its charts are about to be visible.
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      this.loadPlotly();
    }, { rootMargin: "600px" });
    memory.painted.then(() => watch.observe(byId("diagnosis")));
  }

  async loadPlotly() {
    if (document.readyState === "loading") await new Promise((done) => { document.addEventListener("DOMContentLoaded", done); });
    const source = new TextDecoder().decode(await inflate(byId("plotly").textContent));
    document.head.append(element("script", {}, source));
    this.drawCharts();
    document.documentElement.dataset.charts = "true";
  }

  show(device) {
    this.device = device;
    const { diagnosis } = device;
    this.drawHoles(diagnosis.fragmentation);
    this.drawUsage(diagnosis);
    this.drawOutside(diagnosis.outside);
    this.drawModules(diagnosis.modules);
    this.drawLedger(device.ledger);
    this.drawCharts();
    byId("generated").hidden = !device.generated;
    byId("generated").textContent = device.generated ? `At the peak: ${device.generated.join(" ")}` : "";
  }

  drawAdvice(advice) {
    byId("advice").hidden = !advice.length;
    byId("advice-list").replaceChildren(...advice.map(({ text, topic }) => element("li", {}, meaningLink(text, topic))));
  }

  drawCharts() {
    const { device } = this;
    if (!device) return;
    const moments = device.diagnosis.fragmentation;
    byId("causes-card").hidden = !moments.length;
    const purposes = device.diagnosis.categories.at_peak.filter((share) => share.size);
    byId("purposes-card").hidden = purposes.every((share) => share.category === "unknown");
    byId("purposes").replaceChildren(...purposes.map((share) => this.shared.row({
      name: share.category, detail: `${share.reason}; confidence ${share.confidence}; ${counted(share.count, "block")}`,
      numbers: formatBytes(share.size), colour: this.purposeColour(share.category) })));
    if (!window.Plotly) return;
    this.drawCauses(moments);
    this.drawPurposes(purposes);
  }

  purposeColour(name) {
    return name === "unknown" ? theme.other : paletteColour(this.shared.categories.indexOf(name));
  }

  drawCauses(moments) {
    if (!moments.length) return;
    const name = (moment) => `${moment.moment}${moments.filter((m) => m.moment === moment.moment).length > 1 ? ` at ${this.memory.formatX(this.memory.x[moment.row])}` : ""}`;
    const names = moments.map((moment, i) => `${name(moment)}${"\u200b".repeat(i)}`); // categories must differ
    const causes = moments[0].causes.map((share) => share.cause).filter((cause) => moments.some((m) => m.causes.find((s) => s.cause === cause).size));
    const bar = (label, sizes, counts, colour) => ({
      type: "bar", orientation: "h", name: label, y: names, x: sizes, marker: { color: colour }, hoverinfo: "text",
      text: sizes.map((size, i) => `${label}: ${formatBytes(size)}${counts ? ` in ${counted(counts[i], "piece")}` : ""}, ${formatShare(size / moments[i].reserved)} of what is reserved`),
      textposition: "none",
    });
    const share = (moment, cause) => moment.causes.find((s) => s.cause === cause);
    const traces = [
      bar("asked for", moments.map((m) => m.requested), null, theme.unused),
      ...causes.map((cause) => bar(cause, moments.map((m) => share(m, cause).size), moments.map((m) => share(m, cause).count), causeColour(moments[0], cause))),
    ];
    this.plot(byId("causes"), traces, { height: 62 + 30 * moments.length, left: 24 + 6.5 * Math.max(...names.map((n) => n.replaceAll("\u200b", "").length)), top: Math.max(...moments.map((m) => m.reserved)), barmode: "stack" });
    byId("causes-legend").replaceChildren(...traces.map((trace) => (
      element("span", { className: "chip" }, swatch(trace.marker.color), meaningLink(trace.name, trace.name)))));
  }

  drawPurposes(purposes) {
    const sizes = new Map();
    for (const { category, size } of purposes) sizes.set(category, (sizes.get(category) || 0) + size);
    const names = Array.from(sizes.keys()).sort((a, b) => sizes.get(a) - sizes.get(b));
    const values = names.map((name) => sizes.get(name));
    const trace = { type: "bar", orientation: "h", y: names, x: values, text: values.map(formatBytes), textposition: "auto", hoverinfo: "none",
      marker: { color: names.map((name) => this.purposeColour(name)) } };
    this.plot(byId("purposes-chart"), [trace], { height: 62 + 28 * names.length, left: 110, top: Math.max(...values) });
  }

  plot(box, traces, { height, left, top, barmode = "group" }) {
    const values = ticks(0, top, 5, 2);
    const axis = { gridcolor: theme.line, zeroline: false, linecolor: theme.line, fixedrange: true };
    box.style.height = `${height}px`;
    Plotly.react(box, traces, {
      barmode, height, bargap: 0.35, showlegend: false, margin: { l: left, r: 12, t: 8, b: 30 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: theme.text, size: 12 },
      hoverlabel: { bgcolor: theme.text, font: { color: theme.page } },
      xaxis: { ...axis, range: [0, top * 1.02], tickvals: values, ticktext: values.map(formatBytes) }, yaxis: { ...axis, automargin: false },
    }, { displayModeBar: false, responsive: true });
  }

  drawHoles(moments) {
    const { memory } = this;
    const holes = moments.flatMap((moment) => moment.holes.map((hole) => ({ moment, hole })));
    fill(byId("holes"), byId("hole-count"), holes, holes.length, ({ moment, hole }) => {
      const pins = hole.pins.map((pin) => {
        const text = `${formatBytes(pin.size)} of ${pin.label}, ${pin.lived === null ? `${formatCount(pin.events)} events` : formatTime(pin.lived)} old`;
        const button = element("button", { type: "button", className: "link" }, text);
        button.addEventListener("click", () => {
          memory.moveTo(moment.row, true);
          memory.pin(this.blockAt(moment.row, pin.address));
          byId("selection").scrollIntoView({ block: "nearest" });
        });
        return element("li", {}, button);
      });
      const more = hole.pinned_by - hole.pins.length;
      const summary = element("summary", {}, swatch(causeColour(moment, hole.cause)),
        element("span", { className: "name" }, `${hole.cause} `, element("small", {},
          `in a segment of ${formatBytes(hole.segment_size)}, pinned by ${pinnedBy(hole)}; ${moment.moment}`)),
        element("span", { className: "numbers" }, formatBytes(hole.size)));
      return element("details", { className: "row" }, summary, element("ul", {}, ...pins, more > 0 ? element("li", {}, `and ${formatCount(more)} more`) : null));
    });
  }

  blockAt(row, address) {
    const { blocks } = this.device;
    const found = this.device.liveAt(row, true).find((i) => blocks.address[i] === address);
    return found === undefined ? null : found;
  }

  drawUsage(diagnosis) {
    byId("usage-card").hidden = diagnosis.by_stream.length < 2 && diagnosis.by_pool.length < 2;
    for (const [id, rows] of [["by-stream", diagnosis.by_stream], ["by-pool", diagnosis.by_pool]]) {
      const cells = (tag, values) => element("tr", {}, ...values.map((value) => element(tag, {}, value)));
      byId(id).replaceChildren(
        element("thead", {}, cells("th", [id === "by-stream" ? "Stream" : "Pool", "In use at the peak", "highest", "Reserved at the peak", "highest"])),
        element("tbody", {}, ...rows.map((row) => cells("td", [row.label, ...[row.at_peak, row.peak, row.reserved_at_peak, row.reserved_peak].map(formatBytes)]))));
    }
  }

  /** What each module of PyTorch holds; layers that differ in their number alone are one row, unless each is asked for. */
  drawModules(modules) {
    byId("modules-card").hidden = !modules;
    if (!modules) return;
    const each = byId("each-module");
    each.onchange = () => this.drawModules(modules);
    const rows = each.checked ? modules.held : modules.merged;
    const sizes = ["parameters", "gradients", "optimizer_state", "activations", "workspace", "unknown"].filter((name) => rows.some((row) => row[name]));
    const cells = (tag, values) => element("tr", {}, ...values.map((value) => element(tag, {}, value)));
    const name = ({ path, modules: count }) => (count > 1 ? `${path} (${counted(count, "module")})` : path);
    byId("modules-count").textContent = rows.length > MOST_MODULES ? `the largest ${formatCount(MOST_MODULES)} of ${formatCount(rows.length)}` : "";
    byId("modules-text").textContent = modules.sentences.join(" ");
    byId("modules").replaceChildren(
      element("thead", {}, cells("th", ["Module", ...sizes.map((size) => size.replace("_", " ")), "In all"])),
      element("tbody", {}, ...rows.slice(0, MOST_MODULES).map((row) => cells("td", [name(row), ...[...sizes, "size"].map((size) => (row[size] ? formatBytes(row[size]) : ""))]))));
  }

  drawLeaks({ leaks, unclear, why, steps, verdict }) {
    byId("leaks-card").hidden = !leaks.length && verdict !== "could not tell";
    byId("leaks-title").textContent = leaks.length ? "Grows step after step" : "Could not tell whether anything leaks";
    byId("leaks-steps").replaceChildren(...inCode(why ?? (steps.count
      ? `${formatCount(steps.count)} steps: ${steps.source} (confidence ${steps.confidence})` : `${steps.source}.`)));
    byId("leaks").hidden = !leaks.length && !unclear.length;
    fill(byId("leaks"), null, [...leaks, ...unclear], leaks.length + unclear.length, (leak) => this.shared.row({
      name: leak.label,
      detail: [leak.why ? ["could not tell: ", ...inCode(leak.why), " It "] : [], leak.steps ? `grew in ${formatCount(leak.grew)} of ${counted(leak.steps, "step")}, by ` : "grew by ",
        `${formatBytes(leak.growth)} in all; confidence ${leak.confidence}`].flat(),
      numbers: leak.per_step ? `${formatBytes(leak.per_step)} each step` : formatBytes(leak.growth), stack: leak.stack }));
  }

  /** The holders of the memory that the driver charges to the process: one line each. */
  drawLedger(ledger) {
    byId("ledger-card").hidden = !ledger;
    if (!ledger) return;
    const { lines, unknown, whole, process, used, total, beside } = ledger;
    const cells = (tag, values) => element("tr", {}, ...values.map((value) => element(tag, {}, value)));
    const rows = unknown ? [...lines, ["unknown", "", unknown]] : lines;
    byId("ledger-title").textContent = process === null ? "The GPU's memory, as NVML shows it" : "This process's memory, as NVML shows it";
    const rest = process === null ? "; NVML does not say whose."
      : `. Of the GPU's ${formatBytes(total)}, ${formatBytes(used)} were in use: ${formatBytes(beside)} by other processes and by the driver for itself.`;
    byId("ledger-when").textContent = `${formatBytes(whole)}${ledger.is_most ? " at most" : ""}, at ${formatMoment(ledger.time)}${rest}`;
    byId("ledger").replaceChildren(
      element("thead", {}, cells("th", ["Held by", "As", "Bytes", "Share"])),
      element("tbody", {}, ...rows.map(([owner, how, size]) => cells("td", [owner, how, formatBytes(size), formatShare(size / whole)]))));
  }

  drawOutside({ total, taken_peak: taken, readings }) {
    const lines = [];
    if (total !== null) lines.push(`The device has ${formatBytes(total)}.`);
    if (taken) lines.push(`The program itself took up to ${formatBytes(taken)} from the driver, beside the caching allocator.`);
    for (const { free, reserved, outside } of readings.slice(-1)) {
      lines.push(`When an allocation failed last, the driver had ${formatBytes(free)} free and the allocator ${formatBytes(reserved)}${
        outside === null ? "." : `; ${formatBytes(outside)} were neither: contexts, libraries, other processes.`}`);
    }
    byId("outside-card").hidden = !lines.length;
    byId("outside").replaceChildren(...lines.map((line) => element("p", {}, line)));
  }
}

function pinnedBy({ pins, pinned_by: number }) {
  if (!pins.length) return counted(number, "block");
  return pins[0].label + (number > 1 ? ` and ${formatCount(number - 1)} more` : "");
}

/** Return the colour of a cause: its place among all of them. */
function causeColour(moment, cause) {
  return paletteColour(moment.causes.findIndex((share) => share.cause === cause));
}
