// The meaning of the colours, and which streams and pools are shown.

const MAX_LEGEND = 8;

class Legend {
  constructor(memory) {
    this.memory = memory;
  }

  draw() {
    this.drawColours();
    this.drawToggles("streams", byId("legend-streams"), "stream", "hatched-stream");
    this.drawToggles("pools", byId("legend-pools"), "pool", "hatched-pool");
    this.drawHidden();
  }

  drawColours() {
    const { memory } = this;
    const { device, shared } = memory;
    const kind = byId("colour").value;
    byId("stacked-by").textContent = byId("colour").selectedOptions[0].textContent;
    const box = byId("legend-colours");
    let chips = [];
    if (kind === "site") {
      const sites = Array.from(memory.slots.entries());
      chips = (this.isLong ? sites : sites.slice(0, MAX_LEGEND)).map(([site, slot], at) => (
        this.toggle(box, at, device.sites.label[site], swatch(paletteColour(slot)), memory.hidden.sites, site)));
      if (sites.length > MAX_LEGEND) {
        const more = element("button", { type: "button", className: "link" }, this.isLong ? "fewer" : `+ ${sites.length - MAX_LEGEND} more`);
        more.setAttribute("aria-expanded", String(Boolean(this.isLong)));
        more.addEventListener("click", () => {
          this.isLong = !this.isLong;
          this.drawColours();
          box.querySelector("[aria-expanded]").focus();
        });
        chips.push(more);
      }
      const rest = memory.ranked.filter((site) => !memory.slots.has(site)).length;
      if (rest > 0) chips.push(chip(`other: ${counted(rest, "call site")}`, theme.other));
    } else if (kind === "purpose") {
      const rules = new Set(device.blocks.rule);
      const there = new Set(Array.from(rules, (rule) => shared.rules[rule].category));
      chips = shared.categories.filter((name) => there.has(name)).map((name, at) => {
        const i = shared.categories.indexOf(name);
        return this.toggle(box, at, name, swatch(name === "unknown" ? theme.other : paletteColour(i)), memory.hidden.purposes, i);
      });
      chips.push(element("span", { className: "quiet" }, "(inferred)"));
    } else if (kind === "size") {
      chips = [9, 13, 17, 21, 25, 29, 33].map((log2) => chip(formatBytes(2 ** log2), css(sizeColour(log2))));
    }
    box.replaceChildren(...chips, ...this.marks());
  }

  /** Return a chip that hides and shows its blocks; `at` is its position in the box. */
  toggle(box, at, label, mark, hidden, item) {
    const isShown = !hidden.has(item);
    const button = element("button", { type: "button", className: "chip", title: `${isShown ? "Hide" : "Show"} ${label}` },
      mark, element("span", { className: "name" }, label));
    button.setAttribute("aria-pressed", String(isShown));
    button.addEventListener("click", () => {
      if (!hidden.delete(item)) hidden.add(item);
      this.memory.filter();
      box.querySelectorAll("button")[at].focus(); // this button has been replaced
    });
    return button;
  }

  /** Show how much is hidden, whatever the colours mean at the moment. */
  drawHidden() {
    const { memory } = this;
    const nouns = { sites: "call site", purposes: "purpose", streams: "stream", pools: "pool" };
    const counts = Object.entries(nouns).filter(([name]) => memory.hidden[name].size).map(([name, noun]) => counted(memory.hidden[name].size, noun));
    byId("hidden-box").hidden = !counts.length;
    byId("hidden").textContent = `Hidden: ${counts.join(", ")}`;
  }

  /** Return the chips of kinds that are neither a call site nor a stream nor a pool. */
  marks() {
    const { device } = this.memory;
    const waits = device.blocks.waited.some((rows) => rows > 1);
    return [
      waits ? element("span", { className: "chip", title: "Pale: freed, and not reusable yet" }, swatch(theme.pending), "freed, held by streams") : null,
      element("span", { className: "chip" }, swatch(theme.unused), "reserved, unused"),
      device.ooms.length ? element("span", { className: "chip" }, swatch(theme.peak), "out of memory") : null,
    ].filter(Boolean);
  }

  drawToggles(name, box, colouredBy, hatch) {
    const { memory } = this;
    const labels = memory.device[name];
    const hidden = memory.hidden[name];
    box.hidden = labels.length < 2;
    const coloured = byId("colour").value === colouredBy;
    box.replaceChildren(element("span", { className: "quiet" }, name === "streams" ? "Streams" : "Pools"), ...labels.map((label, i) => {
      const mark = swatch(coloured ? paletteColour(i) : theme.unused);
      if (name === "pools" ? memory.isPrivate[i] : memory.isSide[i]) mark.classList.add(hatch);
      return this.toggle(box, i, label, mark, hidden, i);
    }));
  }
}
