// The whole recording in a strip, with the range that the drawings below show.

class Overview {
  constructor(memory) {
    this.memory = memory;
    this.box = byId("overview");
    this.canvas = byId("overview-curve");
    this.window = byId("window");
    this.handles = { from: byId("range-from"), to: byId("range-to") };
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(device) {
    this.device = device;
    this.whole = [this.memory.x[0], this.memory.x[device.rows]];
    this.draw();
  }

  draw() {
    if (!this.device) return;
    const { device, canvas, memory } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    const height = canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    const context = canvas.getContext("2d");
    const { showsReserved } = memory;
    const top = Math.max(1, showsReserved ? highestValue(device.reserved) : 0, highestValue(device.active)) * 1.05;
    const [begin, end] = this.whole;
    const high = (bytes) => height - (bytes / top) * height;
    let row = 0;
    for (let column = 0; column < width; column++) {
      const until = begin + ((column + 1) / width) * (end - begin);
      let [active, reserved] = [device.active[row], device.reserved[row]];
      while (row + 1 < device.rows && memory.x[row + 1] < until) {
        row++;
        if (device.active[row] > active) active = device.active[row];
        if (device.reserved[row] > reserved) reserved = device.reserved[row];
      }
      context.fillStyle = theme.unused;
      if (showsReserved) context.fillRect(column, high(reserved), 1, height);
      context.fillStyle = theme.accent;
      context.globalAlpha = 0.55;
      context.fillRect(column, high(active), 1, height);
      context.globalAlpha = 1;
    }
    context.fillStyle = theme.peak;
    for (const { row: at } of device.ooms) context.fillRect(((memory.x[at] - begin) / (end - begin)) * width, 0, 1.5 * ratio, height);
  }

  /** Put the window and the handles where the range is, and the mark where the cursor is. */
  placeCursor() {
    if (!this.device) return;
    const { memory } = this;
    const share = (x) => Math.min(1, Math.max(0, (x - this.whole[0]) / (this.whole[1] - this.whole[0])));
    this.window.style.left = `${100 * share(memory.from)}%`;
    this.window.style.width = `${100 * (share(memory.to) - share(memory.from))}%`;
    byId("overview-cursor").style.left = `${100 * share(memory.x[memory.row])}%`;
    for (const [name, handle] of Object.entries(this.handles)) {
      handle.setAttribute("aria-valuenow", (100 * share(memory[name])).toFixed(1));
      handle.setAttribute("aria-valuetext", memory.formatX(memory[name]));
    }
  }

  listen() {
    const { box, handles, memory } = this;
    const at = (event) => {
      const area = box.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - area.left) / area.width));
      return this.whole[0] + share * (this.whole[1] - this.whole[0]);
    };
    let drag = null;
    box.addEventListener("pointerdown", (event) => {
      const x = at(event);
      const { from, to } = memory;
      const isWhole = to - from >= (this.whole[1] - this.whole[0]) * 0.999;
      if (event.target === handles.from) drag = { fixed: to };
      else if (event.target === handles.to) drag = { fixed: from };
      else if (x >= from && x <= to && !isWhole) drag = { grip: x - from };
      else drag = { fixed: x };
      box.setPointerCapture(event.pointerId);
    });
    box.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const x = at(event);
      if ("grip" in drag) memory.setRange(x - drag.grip, x - drag.grip + memory.to - memory.from);
      else if (x !== drag.fixed) this.setRange(drag.fixed, x);
    });
    for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, () => { drag = null; });
    box.addEventListener("dblclick", () => memory.showAll());
    for (const [name, handle] of Object.entries(handles)) {
      handle.addEventListener("keydown", (event) => {
        const direction = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
        if (!direction) return;
        event.preventDefault();
        const by = direction * (this.whole[1] - this.whole[0]) * (event.shiftKey ? 0.001 : 0.01);
        this.setRange(memory.from + (name === "from" ? by : 0), memory.to + (name === "to" ? by : 0));
      });
    }
  }

  /** Show the range between two positions, in either order. */
  setRange(one, other) {
    const [low, high] = this.whole;
    const [from, to] = [one, other].sort((a, b) => a - b);
    const least = (high - low) * 1e-6;
    this.memory.setRange(Math.max(low, from), Math.max(Math.min(high, to), from + least));
  }
}

function highestValue(values) {
  return values.length ? values[highest(values, 0, values.length)] : 0;
}
