// Memory that was planned ahead: for each graph a drawing of its buffers, nodes to the right and bytes downwards.

const SVG = "http://www.w3.org/2000/svg";
const MAX_DRAWN = 4000; // buffers of a plan, the largest

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const largestFirst = ({ buffers }) => [...buffers].sort((a, b) => b.size - a.size);
const lifetime = ({ first, end, kept }) => `nodes ${formatCount(first)} to ${formatCount(Math.max(end - 1, first))}${kept ? ", kept" : ""}`;

function drawPlan(plan) {
  const [width, height] = [1000, 200];
  const [nodes, bytes] = [Math.max(1, plan.nodes), Math.max(1, plan.planned)];
  const boxes = largestFirst(plan).slice(0, MAX_DRAWN).map((buffer, i) => {
    const { first, end, offset, size, node, label } = buffer;
    const words = `${node}\n${label}\n${formatBytes(size)} at byte ${formatCount(offset)}, ${lifetime(buffer)}`;
    return svg("rect", {
      x: (first / nodes) * width, width: (Math.max(end - first, 0.2) / nodes) * width, y: (offset / bytes) * height,
      height: (size / bytes) * height, fill: paletteColour(i), stroke: "var(--card)",
    }, svg("title", {}, words));
  });
  const what = `Buffers of ${plan.function}: nodes of the graph to the right, bytes of the reservation downwards`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": what, class: "plan" }, ...boxes);
}

function showPlans(plans, shared) {
  byId("plans").hidden = !plans.length;
  byId("plans").replaceChildren(...plans.map((plan) => {
    const table = element("div", { className: "scroll short", tabIndex: 0, role: "region", ariaLabel: `Buffers of ${plan.function}, largest first` });
    fill(table, null, largestFirst(plan), plan.buffers.length, (buffer, i) => shared.row({
      name: buffer.node, colour: paletteColour(i), detail: `${buffer.label}; ${lifetime(buffer)}`, numbers: `${formatBytes(buffer.size)} at byte ${formatCount(buffer.offset)}` }));
    const operations = plan.fused.flatMap(({ node, name, operations }) => operations.map((each) => ({ ...each, node, kernel: name })));
    const fused = element("div", { className: "scroll short", tabIndex: 0, role: "region", ariaLabel: `Fused kernels of ${plan.function}`, hidden: !operations.length });
    fill(fused, null, operations, operations.length, ({ node, kernel, name, label }) => shared.row({
      name: `${name} in ${kernel}`, colour: paletteColour(node), detail: label, numbers: `node ${formatCount(node)}` }));
    return element("div", { className: "card" },
      element("h2", {}, `Planned memory of ${plan.function}`),
      element("p", { className: "quiet" }, `compiled at ${plan.label}, device ${plan.device}; ${counted(plan.nodes, "node")} to the right, bytes downwards`),
      element("div", { className: "tiles" },
        tile(formatBytes(plan.planned), "planned", `${formatBytes(plan.ran)} used`),
        tile(formatBytes(plan.most_live), "live at once, at most", "no plan needs less"),
        tile(formatBytes(plan.unshared), "if no buffers shared a place", counted(plan.buffers.length, "buffer"))),
      drawPlan(plan), table, fused);
  }));
}
