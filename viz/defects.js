// The sanitizer's findings: a list, and the accesses of the chosen one marked on the streams.

class DefectsView {
  constructor(defects, streams, verdict, gaps) {
    Object.assign(this, { defects, streams });
    byId("defects").hidden = false;
    byId("defects-count").textContent = defects.length ? counted(defects.length, "finding") : verdict.outcome === "clean" ? "nothing was found" : verdict.words;
    byId("defects-gaps").replaceChildren(...gaps.map((gap) => element("li", {}, element("b", {}, "Not checked: "), ...inCode(gap))));
    byId("defects-gaps").hidden = !gaps.length;
    this.rows = defects.map((defect, i) => this.row(defect, i));
    byId("defects-list").replaceChildren(...this.rows);
    byId("defects-list").hidden = !defects.length;
    const first = this.rows.findIndex((_row, i) => this.marked(defects[i]).length);
    if (first >= 0) this.rows[first].open = true;
  }

  /** Return the operations of a finding that are drawn, with the letters of their sides. */
  marked(defect) {
    return defect.sides.map((side, i) => ({ operation: side.operation, letter: letter(i) })).filter(({ operation }) => operation >= 0);
  }

  row(defect, i) {
    const title = `${i + 1}. ${defect.title}`;
    const notes = [defect.kind, defect.count > 1 ? `${formatCount(defect.count)} times` : "", defect.certain ? "" : "possible"];
    const details = element("details", { className: "defect", name: "defect" },
      element("summary", {}, element("b", {}, title), " ", element("small", {}, notes.filter(Boolean).join(", "))));
    details.addEventListener("toggle", () => {
      if (!details.open) return;
      if (details.childElementCount === 1) details.append(...this.body(defect));
      if (this.streams) this.streams.mark(this.marked(defect));
    });
    return details;
  }

  body(defect) {
    const { bytes, buffer, why, repair, proof } = defect;
    const facts = [];
    const fact = (name, value, stack = []) => {
      if (value && value.length !== 0) facts.push(element("dt", {}, name), element("dd", {}, value, stack.length ? this.stack(stack) : null));
    };
    fact("why", why);
    fact("repair", inCode(repair));
    if (proof.length) fact("proof", element("div", { className: "proof" }, proof.join("\n")));
    if (bytes) fact("bytes", `${formatBytes(bytes[1])} at 0x${bytes[0].toString(16)}`);
    if (buffer) fact("buffer", `${formatBytes(buffer.size)} at 0x${buffer.address.toString(16)}, allocated at ${buffer.where}`, buffer.stack);
    fact("fingerprint", defect.fingerprint);
    return [
      element("div", { className: "columns fitting" }, ...defect.sides.map((side, i) => element("div", {},
        element("h3", {}, element("span", { className: "mark" }, letter(i)), " ", side.text), this.stack(side.stack)))),
      element("dl", {}, ...facts),
    ];
  }

  stack(lines) {
    return lines.length ? element("ol", { className: "stack" }, ...lines.map(([place, code]) => frameItem(place, code))) : element("p", { className: "quiet" }, "No stack was recorded.");
  }
}

const letter = (i) => String.fromCharCode(65 + i);
