// A small chart of one figure over time, drawn as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 76;
const MARGIN = 4;

function add(svg, name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  svg.append(element);
  return element;
}

export class Chart {
  /** size: how many values fit; the newest is at the right. */
  constructor(svg, size) {
    this.svg = svg;
    this.size = size;
    this.name = svg.getAttribute("aria-label");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    add(svg, "line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 });
    this.area = add(svg, "path", { class: "area" });
    this.line = add(svg, "path", { class: "line" });
  }

  draw(values) {
    const top = Math.max(1, ...values);
    const step = WIDTH / (this.size - 1);
    const first = WIDTH - (values.length - 1) * step;
    const points = values.map((value, index) => {
      const y = HEIGHT - 1 - (value / top) * (HEIGHT - MARGIN - 1);
      return `${(first + index * step).toFixed(1)},${y.toFixed(1)}`;
    });
    const path = points.length ? `M${points.join("L")}` : "";
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", points.length ? `${path}L${WIDTH},${HEIGHT - 1}L${first.toFixed(1)},${HEIGHT - 1}Z` : "");
    this.svg.setAttribute("aria-label", `${this.name}: now ${Math.round(values.at(-1) ?? 0)}, at most ${Math.round(top)} in this window`);
  }
}
