// The pinned allocation and its details.

class Selection {
  constructor(shared, memory) {
    Object.assign(this, { shared, memory });
    const on = (id, action) => byId(id).addEventListener("click", action);
    on("unpin", () => memory.pin(null));
    on("to-start", () => memory.moveTo(memory.device.blocks.start[memory.pinned], true));
    on("to-freed", () => memory.moveTo(Math.min(memory.device.blocks.freed[memory.pinned], memory.device.rows - 1), true));
    on("show-lifetime", () => this.showLifetime());
    on("find-site", () => {
      byId("search").value = memory.device.sites.label[memory.device.blocks.site[memory.pinned]];
      memory.find();
    });
  }

  /** Zoom to the time in which the allocation lives, with some space around it. */
  showLifetime() {
    const { memory } = this;
    const { blocks } = memory.device;
    const [from, to] = [memory.x[blocks.start[memory.pinned]], memory.x[blocks.end[memory.pinned]]];
    memory.setRange(from - (to - from) * 0.15, to + (to - from) * 0.15);
  }

  show() {
    const { memory } = this;
    const box = byId("selection");
    box.hidden = memory.pinned === null;
    if (memory.pinned === null) return;
    const facts = memory.facts(memory.pinned);
    const rows = {
      Size: `${facts.size}, ${facts.requested}${facts.state ? `; ${facts.state}` : ""}`,
      Allocated: facts.allocated, Freed: facts.freed, "Reusable from": facts.reusable,
      Address: `${facts.address}, ${facts.where}`, "Call site": facts.site, Module: facts.module, Range: facts.range, Purpose: facts.purpose,
    };
    byId("selection-title").replaceChildren(swatch(memory.css(memory.pinned)), ` ${facts.size} of ${facts.site}`);
    byId("selection-facts").replaceChildren(...Object.entries(rows).filter(([, value]) => value)
      .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    const frames = this.shared.stacks.items(facts.stack);
    byId("selection-stack").replaceChildren(...frames);
    byId("selection-no-stack").hidden = frames.length > 0;
  }
}
