// The graph of the last pass: a frame per worker, boxes coloured by time, thick arrows between workers. The server lays each frame out; here they
// stand beside and below each other as there is room.
import { ago, at, beside, bytes, colour, crosses, curvePoints, Drawn, svg, tellScroll, textWidth, time } from "/dashboard/draw.js";

const [GAP, ROW_GAP, LANE] = [30, 48, 8]; // between frames, between their rows, and between arrows there
const [WRAPPED, SMALLEST] = [0.85, 0.8]; // scales below which frames go to another row, and below which nothing is drawn
const TITLE = { font: '650 13px system-ui, "DejaVu Sans", sans-serif', height: 18 };
const LABEL = { font: '10.5px ui-monospace, "DejaVu Sans Mono", monospace', height: 15 };

const SIDES = [[1, 0], [-1, 0], [0, 1], [0, -1]];
const [BENDS, MANY] = [[0.25, 0.42, 0.65, 0.9], 12]; // of many arrows between workers fewer ways are looked at
const contains = (box, node) => node.x > box.x && node.x < box.x + box.w && node.y > box.y && node.y < box.y + box.h;

export class Graph {
  constructor(id = "graph") {
    this.id = id;
    this.picture = null;
    at(`${id}-box`).addEventListener("scroll", () => tellScroll(at(`${id}-box`), at(`${id}-more`)));
  }

  take(data) {
    this.now = data.now / 1e6;
    if (data.graph && data.graph.boxes) { this.picture = data.graph; this.draw(); }
    if (this.picture) this.hint();
  }

  // Rows of frames, none wider than the room unless a single frame is; the place of each by its worker.
  arrange(room) {
    const places = new Map();
    let [x, y, tall, width] = [0, 0, 0, 0];
    let row = [];
    const close = () => { for (const place of row) place.h = tall; row = []; };
    for (const frame of this.picture.frames) {
      if (x > 0 && x + frame.w > room) { close(); y += tall + ROW_GAP; [x, tall] = [0, 0]; }
      const place = { frame, x, y, w: frame.w, h: frame.h };
      places.set(frame.worker, place);
      row.push(place);
      x += frame.w + GAP;
      tall = Math.max(tall, frame.h);
      width = Math.max(width, x - GAP);
    }
    close();
    return { places, width, height: y + tall };
  }

  draw() {
    const graph = this.picture;
    if (!graph) return;
    const box = at(`${this.id}-box`);
    const [left, top] = [box.scrollLeft, box.scrollTop];
    const room = box.clientWidth;
    const { places, width, height } = this.arrange(room / WRAPPED);
    const scale = Math.max(SMALLEST, Math.min(1, room / width));
    const picture = svg("svg", { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${graph.boxes.length} nodes on ${graph.frames.length} workers` });
    const most = Math.max(1, ...graph.boxes.map((each) => each.us));
    const drawn = new Drawn(width, height);
    for (const { x, y, w, h } of places.values()) {
      drawn.line([[x, y], [x + w, y], [x + w, y + h], [x, y + h], [x, y]]);
      picture.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: w - 1, height: h - 1, rx: 9, fill: colour("paper"), stroke: colour("line") }));
    }
    const moved = graph.boxes.map((each) => {
      const { frame, x, y } = places.get(each.worker);
      return { ...each, x: each.x - frame.x + x, y: each.y + y, row: y, below: y + places.get(each.worker).h };
    });
    for (const each of moved) drawn.box(each.x - each.w / 2 - 2, each.y - each.h / 2 - 2, each.w + 4, each.h + 4);
    const crossings = [];
    for (const arrow of graph.arrows) {
      if (arrow.crosses) { crossings.push(this.crossing(moved[arrow.from], moved[arrow.to], arrow, crossings.length, drawn)); continue; }
      const { frame, x, y } = places.get(graph.boxes[arrow.from].worker);
      picture.append(this.inner(arrow.points.map(([px, py]) => [px - frame.x + x, py + y]), drawn));
    }
    for (const { path, points, width: thick } of crossings) { picture.append(path); drawn.line(points, thick); }
    for (const each of moved) picture.append(this.node(each, most));
    for (const { frame, x, y, w } of places.values()) picture.append(this.title(frame.worker, x, y, w, drawn));
    for (const { points, width: thick, text } of crossings) {
      const wide = textWidth(text, LABEL.font) + 4;
      const place = drawn.take(beside(points, wide, LABEL.height, thick), wide, LABEL.height);
      if (!place) continue; // the arrow's title has it
      const label = svg("text", { x: place[0], y: place[1] + 3.5, "text-anchor": "middle", class: "soft link" });
      label.textContent = text;
      picture.append(label);
    }
    box.replaceChildren(picture);
    box.scrollTo(left, top);
    tellScroll(box, at(`${this.id}-more`));
    this.hint();
  }

  hint() {
    const graph = this.picture;
    const total = graph.boxes.reduce((sum, each) => sum + each.us, 0);
    const crossed = graph.arrows.filter((arrow) => arrow.crosses).reduce((sum, arrow) => sum + arrow.bytes, 0);
    const nodes = `${graph.nodes}${graph.left_out ? ` of ${graph.nodes + graph.left_out}` : ""} nodes`;
    const missing = graph.missing.length ? `; without ${graph.missing.join(", ")}, whose part was not recorded` : "";
    const age = this.now - graph.at > 10 ? `, ${ago(this.now - graph.at)} ago` : "";
    const text = `${nodes} on ${graph.frames.length} ${graph.frames.length === 1 ? "worker" : "workers"}${age}, ${time(total)} of computation${crossed
      ? `, ${bytes(crossed)} of gradients between workers` : ""}; the warmer, the longer${missing}`;
    if (at("graph-hint").textContent !== text) at("graph-hint").textContent = text;
  }

  // The name of a worker at the top of its frame: to the left or, where arrows enter there, further to the right.
  title(worker, x, y, w, drawn) {
    const wide = textWidth(worker, TITLE.font) + 8;
    const most = Math.max(x + 10 + wide / 2, x + w - 10 - wide / 2);
    const places = [0, 0.25, 0.5, 0.75, 1].map((share) => [x + 10 + wide / 2 + share * (most - x - 10 - wide / 2), y + 20]);
    const [middle, line] = drawn.take(places, wide, TITLE.height) ?? places[0];
    const title = svg("text", { x: middle, y: line + 4.5, "text-anchor": "middle", class: "title" });
    title.textContent = worker;
    const ground = svg("rect", { x: middle - wide / 2, y: line - TITLE.height / 2, width: wide, height: TITLE.height, fill: colour("paper") });
    return svg("g", {}, ground, title);
  }

  node(each, most) {
    const heat = Math.sqrt(each.us / most);
    const name = svg("text", { x: each.x, y: each.y - 4, "text-anchor": "middle" });
    name.textContent = each.name;
    const spent = svg("text", { x: each.x, y: each.y + 11, "text-anchor": "middle", class: "spent" });
    spent.textContent = time(each.us);
    const title = svg("title");
    title.textContent = `${each.name} on ${each.worker}: ${time(each.us)}, gradients of ${bytes(each.bytes)}`;
    const shape = { x: each.x - each.w / 2, y: each.y - each.h / 2, width: each.w, height: each.h, rx: 6 };
    return svg("g", { class: "node" }, svg("rect", { ...shape, fill: colour("card"), stroke: colour("soft"), "stroke-opacity": 0.55 }),
      svg("rect", { ...shape, fill: "#e8743b", "fill-opacity": (heat * 0.75).toFixed(3) }), name, spent, title);
  }

  inner(points, drawn) {
    let way = `M${points[0][0]} ${points[0][1]}`;
    for (let i = 1; i < points.length; i += 1) {
      const [x, y] = points[i];
      const [px, py] = points[i - 1];
      const middle = (py + y) / 2;
      way += i % 2 ? `L${x} ${y}` : `C${px} ${middle} ${x} ${middle} ${x} ${y}`;
      drawn.line(i % 2 ? [points[i - 1], points[i]] : curvePoints([px, py], [px, middle], [x, middle], [x, y], 8), 1.3);
    }
    return svg("path", { d: way, fill: "none", stroke: colour("soft"), "stroke-width": 1.3, "stroke-opacity": 0.7 });
  }

  // From box to box by the way that runs behind the fewest other boxes, and of those the shortest.
  crossing(one, two, arrow, number, drawn) {
    const obstacles = drawn.boxes.map((box) => (contains(box, one) || contains(box, two) ? { x: box.x + 6, y: box.y + 6, w: box.w - 12, h: box.h - 12 } : box));
    const bends = this.picture.arrows.filter((each) => each.crosses).length > MANY ? BENDS.slice(1, 2) : BENDS;
    const ways = SIDES.flatMap((from) => SIDES.filter((to) => one !== two || to !== from).flatMap((to) => bends.map((bend) => this.curve(one, two, from, to, bend))));
    if (one.row !== two.row) ways.push(this.between(one, two, number));
    const cost = ({ points }) => {
      const behind = obstacles.filter((box) => points.some((point, i) => i > 0 && crosses(box, points[i - 1], point))).length;
      const outside = points.some(([x, y]) => x < 4 || y < 4 || x > drawn.width - 4 || y > drawn.height - 4);
      const length = points.reduce((sum, [x, y], i) => sum + (i ? Math.hypot(x - points[i - 1][0], y - points[i - 1][1]) : 0), 0);
      return behind * 1000 + outside * 1e6 + length;
    };
    const { d, points } = ways.map((way) => [cost(way), way]).reduce((best, each) => (each[0] < best[0] ? each : best))[1];
    const width = arrow.bytes === undefined ? 2 : Math.min(9, 2.5 + Math.log10(1 + arrow.bytes / 100));
    return { ...this.look(one, two, arrow, { d, fill: "none", "stroke-width": width, class: "crossing" }, points), width, points };
  }

  // An arrow between workers as it is drawn, and its label.
  look(one, two, arrow, way) {
    const text = bytes(arrow.bytes);
    const title = svg("title");
    title.textContent = `${one.worker} to ${two.worker}: ${text}`;
    return { path: svg("path", { ...way, stroke: colour("send"), "stroke-opacity": 0.75 }, title), text };
  }

  // From a side of a box to a side of another, which it leaves and reaches at right angles.
  curve(one, two, [fx, fy], [tx, ty], share) {
    const start = [one.x + (fx * one.w) / 2, one.y + (fy * one.h) / 2];
    const end = [two.x + (tx * two.w) / 2, two.y + (ty * two.h) / 2];
    const bend = Math.max(36, Math.hypot(end[0] - start[0], end[1] - start[1]) * share);
    const corners = [start, [start[0] + fx * bend, start[1] + fy * bend], [end[0] + tx * bend, end[1] + ty * bend], end];
    return { d: `M${start.join(" ")}C${corners.slice(1).map((corner) => corner.join(" ")).join(" ")}`, points: curvePoints(...corners) };
  }

  // From below a box or above it to a lane between two rows of frames, and from there to a box of another row.
  between(one, two, number) {
    const to = two.row > one.row ? 1 : -1;
    const lane = (to > 0 ? one.below : one.row - ROW_GAP) + ROW_GAP / 2 + ((number % 3) - 1) * LANE;
    const [start, end] = [[one.x, one.y + (to * one.h) / 2], [two.x, two.y - (to * two.h) / 2]];
    const side = Math.sign(end[0] - start[0]);
    const round = Math.min(10, Math.abs(end[0] - start[0]) / 2);
    const points = [start, [start[0], lane], [end[0], lane], end];
    const d = `M${start.join(" ")}V${lane - to * round}Q${start[0]} ${lane} ${start[0] + side * round} ${lane}H${end[0] - side * round}`
      + `Q${end[0]} ${lane} ${end[0]} ${lane + to * round}V${end[1]}`;
    return { d, points: points.slice(1).flatMap((corner, i) => Array.from({ length: 12 }, (_, k) => points[i].map((p, axis) => p + ((corner[axis] - p) * k) / 12)).concat(i === 2 ? [corner] : [])) };
  }
}
