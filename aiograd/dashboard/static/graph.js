// The graph of the last pass: a frame per worker, boxes coloured by time, thick arrows between workers. The server lays it out.
import { at, bytes, colour, svg, time } from "/dashboard/draw.js";

export class Graph {
  constructor() { this.picture = null; }

  take(data) {
    if (!data.graph || !data.graph.boxes) return;
    this.picture = data.graph;
    this.draw();
  }

  draw() {
    const graph = this.picture;
    if (!graph) return;
    const box = at("graph-box");
    const [left, top] = [box.scrollLeft, box.scrollTop];
    const room = box.clientWidth;
    const scale = graph.width > room && graph.width < room * 1.5 ? room / graph.width : 1;
    const picture = svg("svg", { width: graph.width * scale, height: graph.height * scale, viewBox: `0 0 ${graph.width} ${graph.height}`, role: "img",
      "aria-label": `${graph.boxes.length} nodes on ${graph.frames.length} workers` });
    const most = Math.max(1, ...graph.boxes.map((each) => each.us));
    for (const frame of graph.frames) {
      const title = svg("text", { x: frame.x + 14, y: 24, class: "title" });
      title.textContent = frame.worker;
      picture.append(svg("rect", { x: frame.x + 0.5, y: 0.5, width: frame.w - 1, height: graph.height - 1, rx: 9, fill: colour("paper"), stroke: colour("line") }), title);
    }
    for (const arrow of graph.arrows) picture.append(arrow.crosses ? this.crossing(graph, arrow) : this.inner(arrow));
    for (const each of graph.boxes) {
      const heat = Math.sqrt(each.us / most);
      const name = svg("text", { x: each.x, y: each.y - 4, "text-anchor": "middle" });
      name.textContent = each.name;
      const spent = svg("text", { x: each.x, y: each.y + 11, "text-anchor": "middle", class: "spent" });
      spent.textContent = time(each.us);
      const title = svg("title");
      title.textContent = `${each.name} on ${each.worker}: ${time(each.us)}, gradients of ${bytes(each.bytes)}`;
      picture.append(svg("g", {},
        svg("rect", { x: each.x - each.w / 2, y: each.y - each.h / 2, width: each.w, height: each.h, rx: 6, fill: colour("card"), stroke: colour("soft"), "stroke-opacity": 0.55 }),
        svg("rect", { x: each.x - each.w / 2, y: each.y - each.h / 2, width: each.w, height: each.h, rx: 6, fill: "#e8743b", "fill-opacity": (heat * 0.75).toFixed(3) }),
        name, spent, title));
    }
    box.replaceChildren(picture);
    box.scrollTo(left, top);
    const total = graph.boxes.reduce((sum, each) => sum + each.us, 0);
    const crossed = graph.arrows.filter((arrow) => arrow.crosses).reduce((sum, arrow) => sum + arrow.bytes, 0);
    at("graph-hint").textContent = `${graph.nodes} nodes on ${graph.frames.length} ${graph.frames.length === 1 ? "worker" : "workers"}, ${time(total)} of computation`
      + `${crossed ? `, ${bytes(crossed)} of gradients between workers` : ""}; the warmer, the longer`;
  }

  inner(arrow) {
    const points = arrow.points;
    let way = `M${points[0][0]} ${points[0][1]}`;
    for (let i = 1; i < points.length; i += 1) {
      const [x, y] = points[i];
      const [px, py] = points[i - 1];
      way += i % 2 ? `L${x} ${y}` : `C${px} ${(py + y) / 2} ${x} ${(py + y) / 2} ${x} ${y}`;
    }
    return svg("path", { d: way, fill: "none", stroke: colour("soft"), "stroke-width": 1.3, "stroke-opacity": 0.7 });
  }

  crossing(graph, arrow) {
    const [one, two] = [graph.boxes[arrow.from], graph.boxes[arrow.to]];
    const right = two.x > one.x;
    const [x1, x2] = [one.x + (right ? one.w / 2 : -one.w / 2), two.x + (right ? -two.w / 2 : two.w / 2)];
    const bend = Math.max(40, Math.abs(x2 - x1) * 0.5) * (right ? 1 : -1);
    const width = Math.min(9, 2.5 + Math.log10(1 + arrow.bytes / 100));
    const group = svg("g", {}, svg("path", { d: `M${x1} ${one.y}C${x1 + bend} ${one.y} ${x2 - bend} ${two.y} ${x2} ${two.y}`, fill: "none", stroke: colour("send"), "stroke-width": width, "stroke-opacity": 0.75 }));
    const text = svg("text", { x: (x1 + x2) / 2, y: (one.y + two.y) / 2 - 7, "text-anchor": "middle", class: "soft halo" });
    text.textContent = bytes(arrow.bytes);
    group.append(text);
    return group;
  }
}
