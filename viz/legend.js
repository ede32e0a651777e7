// What the colours mean, and which streams and pools are shown.

const MAX_LEGEND = 8;

class Legend {
  constructor(memory) {
    this.memory = memory;
  }

  draw() {
    this.drawColours();
    this.drawToggles("streams", byId("legend-streams"), "stream", "hatched-stream");
    this.drawToggles("pools", byId("legend-pools"), "pool", "hatched-pool");
  }

  drawColours() {
    const { memory } = this;
    const { device, shared } = memory;
    const kind = byId("colour").value;
    byId("stacked-by").textContent = byId("colour").selectedOptions[0].textContent;
    const named = (label, colour) => [swatch(colour), element("span", { className: "name" }, label)];
    let chips = [];
    if (kind === "site") {
      const sites = Array.from(memory.slots.entries());
      chips = sites.slice(0, MAX_LEGEND).map(([site, slot]) => {
        const button = element("button", { type: "button", className: "chip", title: `Find ${device.sites.label[site]}` }, named(device.sites.label[site], paletteColour(slot)));
        button.addEventListener("click", () => { byId("search").value = device.sites.label[site]; memory.find(); });
        return button;
      });
      if (sites.length > MAX_LEGEND) chips.push(element("span", { className: "quiet" }, `+ ${sites.length - MAX_LEGEND} more`));
      const rest = memory.ranked.length - sites.length;
      if (rest > 0) chips.push(chip(`other: ${counted(rest, "call site")}`, theme.other));
    } else if (kind === "purpose") {
      chips = shared.categories.map((name, i) => (name === "unknown" ? chip("unknown", theme.other) : chip(name, paletteColour(i))));
      chips.push(element("span", { className: "quiet" }, "(inferred)"));
    } else if (kind === "size") {
      chips = [9, 13, 17, 21, 25, 29, 33].map((log2) => chip(formatBytes(2 ** log2), css(sizeColour(log2))));
    }
    byId("legend-colours").replaceChildren(...chips, ...this.marks());
  }

  /** Return the chips of what is neither a call site nor a stream nor a pool. */
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
      const button = element("button", { type: "button", className: "chip" }, mark, label);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      button.addEventListener("click", () => {
        if (!hidden.delete(i)) hidden.add(i);
        memory.filter();
        byId(box.id).querySelectorAll("button")[i].focus(); // this button has been replaced
      });
      return button;
    }));
  }
}

const chip = (label, colour) => element("span", { className: "chip" }, swatch(colour), label);

function swatch(colour) {
  const made = element("span", { className: "swatch" });
  made.style.backgroundColor = colour;
  return made;
}
