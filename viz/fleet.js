// Many ranks, and many runs: which rank differs from the others, and in what.

const MOST_RANKS = 500; // rows of a table
const MOST_FINDINGS = 300;
const MOST_ENDS = 20;
const MOST_APART = 8;

const ENDS = { "out-of-memory": "ran out of memory", "ended-early": "its recording ended early" };
const more = (bytes) => `${bytes > 0 ? "+" : ""}${formatBytes(bytes)}`;
const orUnknown = (bytes) => formatBytes(bytes === NONE ? null : bytes);

/** Put rows of texts and elements into a table. */
function fillTable(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)))));
}

/** Return in what ranks differ: from the others, or two from each other. */
const differencesOf = (run) => (run.pair ? run.pair.differences : run.findings);
const differing = (run) => new Set(run.pair ? (run.pair.differences.length ? run.pair.ranks : []) : run.findings.map((finding) => finding.rank));

class FleetView {
  constructor(data) {
    this.data = data;
    this.row = 0;
    this.column = 0;
    this.keeper = new StateKeeper(this);
    this.heat = new HeatMap(byId("heat"), this);
    this.plane = new Plane(byId("curves"), {
      bounds: { x0: 0, x1: 1, y0: -1, y1: 0 }, draw: () => this.drawCurves(), describe: (x) => this.words(this.row, this.columnAt(x)).join("\n"),
      onPick: (x) => this.choose(this.row, this.columnAt(x)), onKey: (event) => this.key(event), holdsY: () => true,
    });
    const on = (id, event, action) => byId(id).addEventListener(event, action);
    on("run", "change", () => this.show(Number(byId("run").value)));
    on("order", "change", () => { this.sort(); this.keeper.changed(); });
    on("colour", "change", () => { this.showScale(); this.heat.plane.draw(); this.keeper.changed(); });
    on("search", "input", () => this.list());
    on("list-order", "change", () => this.list());
    on("previous", "click", () => this.goOn(-1));
    on("next", "click", () => this.goOn(1));
    theme.listeners.push(() => { this.showScale(); this.showRank(); this.heat.plane.draw(); });
    this.showRuns();
    this.showAgainst();
  }

  // All runs.

  showRuns() {
    const { runs } = this.data;
    byId("runs-card").hidden = byId("run-choice").hidden = runs.length < 2;
    byId("run").replaceChildren(...runs.map((run, i) => element("option", { value: i }, run.run)));
    const most = Math.max(1, ...runs.map((run) => this.largest(run)));
    fillTable("runs", runs.map((run, i) => {
      const bar = element("span", { className: "more" });
      Object.assign(bar.style, { left: "0", background: "var(--accent)", width: `${(100 * this.largest(run)) / most}%` });
      const different = differing(run).size;
      return [this.button(run.run, () => this.show(i)), formatCount(run.ranks.rank.length), formatBytes(this.largest(run)), formatBytes(run.median_peak), bar,
        run.compared || different ? formatCount(different) : "not compared"];
    }));
    for (const line of byId("runs").tBodies[0].rows) line.cells[4].className = "bars";
  }

  largest(run) {
    const { peak } = run.ranks;
    return peak.length ? peak[highest(peak, 0, peak.length)] : 0;
  }

  showAgainst() {
    const { against } = this.data;
    byId("against-card").hidden = !against;
    if (!against) return;
    byId("against-title").textContent = `Compared with ${against.against}`;
    const unknown = (bytes) => bytes === null || bytes === undefined;
    fillTable("against", [...against.metrics.map((one) => [`most: ${one.metric}`, one]), ...against.sites.map((one) => [one.site, one])].map(([name, { before, after }]) => [
      name, formatBytes(before), formatBytes(after), unknown(before) || unknown(after) ? "unknown" : more(after - before)]));
  }

  button(text, action) {
    const made = element("button", { type: "button", className: "link" }, text);
    made.addEventListener("click", action);
    return made;
  }

  /** Return a button that shows a rank. */
  link(rank) {
    const row = this.rowOf(rank);
    return row < 0 ? String(rank) : this.button(String(rank), () => this.open(row));
  }

  // One run.

  show(index) {
    this.index = index;
    this.run = this.data.runs[index];
    byId("run").value = String(index);
    const { run } = this;
    const ranks = run.ranks.rank;
    this.marked = new Set(Array.from(differing(run), (rank) => this.rowOf(rank)));
    this.cells = run.memory ? new StepCells(run.memory, ranks.length) : null;
    byId("one-run").hidden = !ranks.length;
    byId("nothing").hidden = ranks.length > 0;
    if (!ranks.length) return;
    this.row = this.marked.size ? Math.min(...this.marked) : highest(run.ranks.peak, 0, ranks.length);
    this.column = 0;
    this.nameMiddle();
    this.showTiles();
    this.showFindings();
    byId("notes").hidden = !run.not_looked_at.length;
    byId("notes").replaceChildren(...run.not_looked_at.map((sentence) => element("li", {}, element("b", {}, "not looked at"), sentence)));
    byId("memory-card").hidden = byId("curves").hidden = !this.cells;
    if (this.cells) {
      this.column = this.highestColumn(this.row);
      this.plane.bounds = { x0: 0, x1: this.cells.columns, y0: -this.cells.high * 1.06, y1: 0 };
      this.plane.view = { ...this.plane.bounds };
    }
    this.sort();
    this.showScale();
    this.choose(this.row, this.column);
    this.showEnds();
    this.showPace();
    this.list();
  }

  rowOf(rank) {
    return this.run.ranks.rank.indexOf(rank);
  }

  rank(row) {
    return this.run.ranks.rank[row];
  }

  isMarked(row) {
    return this.marked.has(row);
  }

  colourBy() {
    return byId("colour").value;
  }

  highestColumn(row) {
    let best = 0;
    for (let column = 1; column < this.cells.columns; column++) if (this.cells.at(row, column) > this.cells.at(row, best)) best = column;
    return best;
  }

  /** What lies in the middle of the ranks: of two, that is halfway. */
  get middle() {
    return this.run.ranks.rank.length === 2 ? "mean" : "median";
  }

  nameMiddle() {
    const { middle } = this;
    byId("colour").options[0].textContent = `beside the step's ${middle}`;
    byId("curves").ariaLabel = `Bytes of the chosen rank over its steps, with the ${middle} and the range of all ranks; arrow keys choose a step`;
    byId("usual-step").textContent = middle[0].toUpperCase() + middle.slice(1);
    byId("usual-peak").textContent = `Beside ${middle}`;
  }

  showTiles() {
    const { run } = this;
    const { peak, rank } = run.ranks;
    const top = highest(peak, 0, peak.length);
    const tile = (value, title, rest) => element("div", { className: "tile" }, element("b", {}, value), element("span", {}, title), element("span", {}, rest));
    const different = this.marked.size;
    const missing = run.missing.length;
    byId("tiles").replaceChildren(
      tile(formatCount(rank.length), "ranks", missing ? `no trace of ${counted(missing, "rank")}: ${Array.from(run.missing).slice(0, 5).join(", ")}${missing > 5 ? " ..." : ""}` : "none is known to be missing"),
      tile(formatCount(different), different === 1 ? "rank differs" : "ranks differ", run.compared ? `${counted(differencesOf(run).length, "difference")} in all` : "the ranks were not compared"),
      tile(formatBytes(peak[top]), "largest peak", `rank ${rank[top]}`),
      tile(formatBytes(run.median_peak), `${this.middle} peak`, `least ${formatBytes(Math.min(...peak))}`),
      tile(formatCount(this.cells ? this.cells.steps : 0), "steps", this.cells ? "with memory" : "none were found"),
    );
  }

  showFindings() {
    const { findings, compared, pair } = this.run;
    byId("findings-title").textContent = pair ? "In what the two ranks differ" : "Different from the other ranks";
    byId("pair-libraries").hidden = !pair;
    byId("pair-memory-box").hidden = !pair?.memory.length;
    if (pair) {
      this.showPair(pair);
      return;
    }
    const none = compared ? "No rank differs from the others in what was compared." : "Could not tell: the ranks were not compared.";
    byId("verdict").textContent = !findings.length ? none : findings.length > MOST_FINDINGS ? `${counted(findings.length, "difference")}, the first ${MOST_FINDINGS} shown` : "The first difference of a rank is the likely cause of the next ones.";
    byId("findings-box").hidden = !findings.length;
    fillTable("findings", findings.slice(0, MOST_FINDINGS).map((finding) => [this.link(finding.rank), finding.in, finding.text]));
  }

  /** Show in what two ranks differ; which one is wrong is not known. */
  showPair({ ranks, differences, memory, libraries }) {
    const both = () => element("span", {}, this.link(ranks[0]), " and ", this.link(ranks[1]));
    byId("verdict").textContent = differences.length ? "The two ranks differ; which one is wrong is not known." : "The two ranks do not differ in what was compared.";
    byId("findings-box").hidden = !differences.length;
    fillTable("findings", differences.slice(0, MOST_FINDINGS).map((one) => [both(), one.in, one.text]));
    const loaded = libraries.map((only, i) => only.length ? `Loaded by rank ${ranks[i]} only: ${only.join(", ")}` : "").filter(Boolean);
    byId("pair-libraries").replaceChildren(...loaded.map((line) => element("li", {}, line)));
    const head = byId("pair-memory").tHead.rows[0].cells;
    ranks.forEach((rank, i) => { head[2 + i].textContent = `Rank ${rank}`; });
    fillTable("pair-memory", memory.map(({ by, name, bytes: [one, two] }) => [by, name, formatBytes(one), formatBytes(two), `rank ${ranks[one > two ? 0 : 1]} by ${formatBytes(Math.abs(one - two))}`]));
  }

  /** Put the ranks of the picture into the order that was chosen. */
  sort() {
    if (!this.cells) return;
    const { peak, rank } = this.run.ranks;
    const key = { rank: () => 0, peak: (row) => -peak[row], different: (row) => (this.marked.has(row) ? 0 : 1) }[byId("order").value];
    this.order = Array.from(rank.keys()).sort((a, b) => key(a) - key(b) || rank[a] - rank[b]);
    this.heat.reset();
  }

  showScale() {
    if (!this.cells) return;
    const { cells } = this;
    const chips = this.colourBy() === "bytes"
      ? [chip(formatBytes(cells.low), theme.unused), chip(formatBytes(cells.high), theme.accent)]
      : [chip(more(-cells.range), theme.accent), chip(`${this.middle} of the step`, theme.unused), chip(more(cells.range), theme.peak)];
    byId("scale").replaceChildren(...chips, element("span", { className: "chip" }, swatch(theme.card), "no such step"));
  }

  /** Return what is known of a cell, in lines. */
  words(row, column) {
    const { cells } = this;
    const value = cells.at(row, column);
    const host = this.run.ranks.host[row];
    return [
      `rank ${this.rank(row)}${host ? ` on ${host}` : ""}, ${cells.named(column)}`,
      value === NONE ? "no such step on this rank" : `${formatBytes(value)} active at most, ${more(Math.round(cells.beside(row, column)))} beside the ${this.middle}`,
      `all ranks: ${formatBytes(cells.least[column])} to ${formatBytes(cells.most[column])}`,
    ];
  }

  columnAt(x) {
    return Math.min(Math.max(Math.floor(x), 0), this.cells.columns - 1);
  }

  choose(row, column) {
    this.row = row;
    this.column = column;
    if (this.cells) {
      byId("moment").textContent = this.words(row, column).join("; ");
      this.heat.plane.draw();
      this.plane.draw();
    }
    this.showRank();
    this.keeper.changed();
  }

  /** Show a rank, and take the reader to it. */
  open(row) {
    this.choose(row, this.cells ? this.highestColumn(row) : 0);
    if (this.cells) this.heat.reveal();
    byId("rank-card").scrollIntoView({ block: "nearest" });
  }

  /** Show the next rank that differs, or the one before. */
  goOn(by) {
    const rows = Array.from(this.marked).sort((a, b) => a - b);
    const next = by > 0 ? rows.find((row) => row > this.row) ?? rows[0] : rows.findLast((row) => row < this.row) ?? rows.at(-1);
    if (next !== undefined) this.choose(next, this.cells ? this.highestColumn(next) : 0);
  }

  showRank() {
    if (!this.run || !this.run.ranks.rank.length) return;
    const { ranks, median_peak: usual } = this.run;
    const { row } = this;
    const rank = this.rank(row);
    byId("rank-title").textContent = `Rank ${rank}`;
    const own = this.run.findings.filter((finding) => finding.rank === rank);
    byId("rank-findings").replaceChildren(...own.map((finding) => element("li", {}, `${finding.in}: ${finding.text}`)));
    byId("previous").hidden = byId("next").hidden = this.marked.size < 1;
    const facts = {
      host: ranks.host[row] || "not recorded", peak: `${formatBytes(ranks.peak[row])} (${more(ranks.peak[row] - usual)} beside the ${this.middle})`, reserved: orUnknown(ranks.reserved[row]),
      "at the end": formatBytes(ranks.end[row]), "out of memory": ranks.ooms[row] ? counted(ranks.ooms[row], "time") : "never", ending: ranks.ending[row],
    };
    byId("rank-facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    const sites = this.run.sites.filter((site) => site.rank === rank);
    const others = Array.from(ranks.rank).filter((one) => one !== rank);
    byId("usual").textContent = others.length === 1 ? `Rank ${others[0]}` : "Median rank";
    fillTable("sites", sites.map((site) => [site.site, formatBytes(site.bytes), formatBytes(site.usual), more(site.bytes - site.usual)]));
    byId("sites").hidden = !sites.length;
    byId("no-sites").hidden = sites.length > 0;
    byId("rank-legend").replaceChildren(...this.cells ? [chip(`rank ${rank}`, theme.accent), chip(this.middle, PALETTE[1]), chip("all ranks", theme.unused)] : []);
  }

  drawCurves() {
    const { cells, plane } = this;
    const { context, ratio } = plane;
    context.fillStyle = theme.card;
    context.fillRect(0, 0, plane.canvas.width, plane.canvas.height);
    if (!cells) return;
    plane.axisX((value) => formatCount(value * cells.width), { counts: true });
    context.save();
    context.beginPath();
    context.rect(plane.inset, 0, plane.width, plane.height);
    context.clip();
    const x = (column) => plane.inset + (column - plane.view.x0) * plane.scaleX;
    const y = (bytes) => (-bytes - plane.view.y0) * plane.scaleY;
    context.fillStyle = theme.unused;
    for (let column = 0; column < cells.columns; column++) {
      if (cells.median[column] === NONE) continue;
      const top = y(cells.most[column]);
      context.fillRect(x(column), top, Math.ceil(plane.scaleX), Math.max(y(cells.least[column]) - top, ratio));
    }
    this.drawSteps((column) => cells.median[column], x, y, PALETTE[1]);
    this.drawSteps((column) => cells.at(this.row, column), x, y, theme.accent);
    context.restore();
    plane.axisY(true);
    plane.line(this.column + 0.5, theme.text, { dash: [3, 3], wide: ratio });
  }

  /** Draw bytes as a line with steps; it is broken where there are none. */
  drawSteps(at, x, y, colour) {
    const { context, ratio } = this.plane;
    context.strokeStyle = colour;
    context.lineWidth = 2 * ratio;
    context.beginPath();
    let isDrawing = false;
    for (let column = 0; column < this.cells.columns; column++) {
      const value = at(column);
      if (value !== NONE) {
        if (isDrawing) context.lineTo(x(column), y(value)); else context.moveTo(x(column), y(value));
        context.lineTo(x(column + 1), y(value));
      }
      isDrawing = value !== NONE;
    }
    context.stroke();
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || event.shiftKey) return false;
    this.choose(this.row, this.columnAt(this.column + by));
    return true;
  }

  // What happened when.

  showEnds() {
    const { ends } = this.run;
    byId("ends-card").hidden = !ends.length;
    fillTable("ends", ends.slice(0, MOST_ENDS).map((end) => [this.link(end.rank), ENDS[end.in], end.after === null ? "unknown" : formatTime(end.after)]));
    byId("ends-rest").textContent = ends.length > MOST_ENDS ? `... and ${formatCount(ends.length - MOST_ENDS)} more` : "";
  }

  showPace() {
    const { steps, collectives } = this.run;
    byId("steps-card").hidden = !steps.step.length;
    const apart = (i) => steps.longest[i] - steps.median[i];
    const largest = Array.from(steps.step.keys()).sort((a, b) => apart(b) - apart(a)).slice(0, MOST_APART);
    fillTable("steps", largest.map((i) => [String(steps.step[i]), formatTime(steps.median[i]), formatTime(steps.longest[i]), this.link(steps.longest_rank[i])]));
    this.showGroups();
    byId("waits-card").hidden = !collectives;
    if (!collectives) return;
    const { rank, waited, awaited, last, compared } = collectives;
    byId("waits-said").textContent = `${counted(compared, "collective")} of all ranks, within ${formatTime(collectives.span)}`;
    const late = Array.from(rank.keys()).sort((a, b) => awaited[b] - awaited[a]).slice(0, MOST_APART);
    fillTable("waits", late.map((i) => [this.link(rank[i]), formatTime(Math.max(0, awaited[i])), formatTime(waited[i]), `${formatCount(last[i])} of ${formatCount(compared)}`]));
  }

  /** Show which rank of a group of ranks, such as one of a mesh, the others wait for. */
  showGroups() {
    const groups = this.run.groups.toSorted((a, b) => b.awaited - a.awaited);
    byId("groups-card").hidden = !groups.length;
    fillTable("groups", groups.slice(0, MOST_APART).map((group) => [group.ranks, this.link(group.latest), formatTime(Math.max(0, group.awaited)), formatTime(group.waited),
      formatCount(group.compared), formatTime(group.span)]));
    byId("groups-rest").textContent = groups.length > MOST_APART ? `... and ${counted(groups.length - MOST_APART, "more group")}` : "";
  }

  // All ranks.

  list() {
    const { ranks, median_peak: usual } = this.run;
    const wanted = byId("search").value.trim().toLowerCase();
    const has = (row) => String(ranks.rank[row]) === wanted || (ranks.host[row] || "").toLowerCase().includes(wanted);
    const rows = Array.from(ranks.rank.keys()).filter((row) => !wanted || has(row));
    const order = byId("list-order").value;
    if (order !== "rank") rows.sort((a, b) => ranks[order][b] - ranks[order][a]);
    byId("count").textContent = `${counted(rows.length, "rank")}${rows.length > MOST_RANKS ? `, the first ${MOST_RANKS} shown` : ""}`;
    fillTable("ranks", rows.slice(0, MOST_RANKS).map((row) => [this.link(ranks.rank[row]), ranks.host[row] || "", formatBytes(ranks.peak[row]), more(ranks.peak[row] - usual),
      orUnknown(ranks.reserved[row]), formatBytes(ranks.end[row]), formatCount(ranks.ooms[row]), ranks.ending[row]]));
    this.keeper.changed();
  }

  // What a link restores.

  state() {
    const chosen = (id) => (byId(id).selectedIndex ? byId(id).value : "");
    return {
      run: this.data.runs.length > 1 ? this.index : "", rank: this.run?.ranks.rank.length ? this.rank(this.row) : "", column: this.column || "",
      order: chosen("order"), colour: chosen("colour"), list: chosen("list-order"), find: byId("search").value,
    };
  }

  restore(state) {
    for (const [id, value] of Object.entries({ order: state.order, colour: state.colour, "list-order": state.list })) {
      const values = Array.from(byId(id).options, (option) => option.value);
      byId(id).value = values.includes(value) ? value : values[0];
    }
    byId("search").value = state.find || "";
    const { runs } = this.data;
    const first = Math.max(0, runs.findIndex((run) => differencesOf(run).length));
    this.show(runs[state.run] ? Number(state.run) : first);
    const row = state.rank === undefined ? -1 : this.rowOf(Number(state.rank));
    if (row >= 0) this.choose(row, this.cells ? this.columnAt(Number(state.column) || 0) : 0);
  }
}

async function showFleet() {
  const data = readPayload(await inflate(byId("payload").textContent));
  byId("source").textContent = data.source;
  listenToKeys();
  byId("nothing").hidden = data.runs.length > 0;
  if (data.runs.length) {
    window.fleetView = new FleetView(data);
    window.fleetView.restore(readState());
  }
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = "true"; }));
}

showFleet();
