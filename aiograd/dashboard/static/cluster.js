// The cluster: workers with their links as a graph (of many: as tiles), and a table.
import { ago, at, beside, bytes, colour, count, Drawn, make, svg, textWidth } from "/dashboard/draw.js";

const [AS_GRAPH, BESIDE] = [24, 8]; // workers up to which there is a graph, and up to which the table stands beside it
const MOST_ROWS = 24; // and of more than can be drawn as a graph where there is little room:
const MOST_CARDS = 10;
const isNarrow = matchMedia("(max-width: 760px)");
const LABEL = { font: '10.5px ui-monospace, "DejaVu Sans Mono", monospace', line: 14 };
const NAME = { font: '650 13px system-ui, "DejaVu Sans", sans-serif', height: 17 };
const shortened = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
const tenths = (value) => (value < 100 ? value.toFixed(1) : String(Math.round(value)));
const milliseconds = (value) => (value === null || value === undefined ? "–" : `${tenths(value)} ms`);
const COLUMNS = [
  ["worker", (worker) => worker.name],
  ["state", (worker, data) => `${worker.state} ${ago(data.now / 1e6 - worker.since)}`],
  ["round trip", (worker) => milliseconds(worker.round_trip)],
  ["lag p50 / p99", (worker) => `${tenths(worker.lag50)} / ${milliseconds(worker.lag99)}`],
  ["memory", (worker) => bytes(worker.memory)],
  ["device", (worker) => (worker.device_memory ? bytes(worker.device_memory) : "–")],
  ["contexts", (worker) => worker.contexts],
  ["passes begun / committed / aborted",
    (worker) => [worker.committed + worker.aborted + worker.passes, worker.committed, worker.aborted].map(count).join(" / ")],
  ["calls served / failed", (worker) => `${count(worker.served)} / ${count(worker.failed)}`],
  ["in / out per s", (worker) => `${bytes(worker.rate_in)} / ${bytes(worker.rate_out)}`],
];

export class Cluster {
  constructor() {
    this.rows = new Map();
    this.data = null;
    this.table = make("table", {}, make("thead", {}, make("tr", {}, ...COLUMNS.map(([name]) => make("th", { scope: "col" }, name)))), make("tbody"));
    at("cluster-table").replaceChildren(this.table);
    at("cluster-find").addEventListener("input", () => this.draw());
  }

  take(data) {
    for (const worker of data.workers) { worker.rate_in = 0; worker.rate_out = 0; }
    const named = new Map(data.workers.map((worker) => [worker.name, worker]));
    for (const [name, , , into, out] of data.links) { const worker = named.get(name); if (worker) { worker.rate_in += into; worker.rate_out += out; } }
    this.data = data;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { workers } = this.data;
    const lost = workers.filter((worker) => worker.state === "lost");
    const silent = workers.filter((worker) => worker.state === "silent").length;
    at("cluster-hint").textContent = `${workers.length} workers${lost.length ? `, ${lost.length} lost` : ""}${silent ? `, ${silent} silent` : ""}`;
    at("cluster-body").className = workers.length > BESIDE ? "many" : "";
    if (workers.length > AS_GRAPH) this.tiles(workers); else this.map(this.data);
    this.list(workers);
  }

  list(workers) {
    const wanted = at("cluster-find").value.trim().toLowerCase();
    const rank = { lost: 0, silent: 1, running: 2 };
    const found = workers.filter((worker) => worker.name.toLowerCase().includes(wanted));
    if (found.length > 12) found.sort((one, other) => rank[one.state] - rank[other.state]);
    const most = workers.length > AS_GRAPH && isNarrow.matches ? MOST_CARDS : MOST_ROWS;
    const shown = found.slice(0, most);
    const keep = new Set(shown.map((worker) => worker.name));
    for (const [name, row] of this.rows) if (!keep.has(name)) { row.remove(); this.rows.delete(name); }
    const body = this.table.tBodies[0];
    shown.forEach((worker, place) => {
      let row = this.rows.get(worker.name);
      if (!row) {
        row = make("tr", {}, ...COLUMNS.map(([name]) => make("td", { "data-label": name })));
        row.cells[1].append(make("span", { class: "state" }));
        this.rows.set(worker.name, row);
      }
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
      const kind = `${worker.state}${worker.memory === undefined ? " bare" : ""}`;
      if (row.className !== kind) row.className = kind;
      row.title = worker.why || worker.url;
      COLUMNS.forEach(([, text], i) => {
        const cell = i === 1 ? row.cells[1].firstChild : row.cells[i];
        const value = worker.memory === undefined && i > 1 ? "–" : String(text(worker, this.data));
        if (cell.textContent !== value) cell.textContent = value;
      });
    });
    let more = at("cluster-more");
    if (found.length > most) {
      if (!more) { more = make("p", { id: "cluster-more", class: "hint" }); at("cluster-table").append(more); }
      more.textContent = `and ${found.length - most} more: use Find`;
    } else if (more) more.remove();
  }

  tiles(workers) {
    let box = at("cluster-map").querySelector(".tiles");
    if (!box) { box = make("div", { class: "tiles" }); at("cluster-map").replaceChildren(box); }
    while (box.children.length > workers.length) box.lastChild.remove();
    workers.forEach((worker, i) => {
      const tile = box.children[i] ?? box.appendChild(make("i"));
      if (tile.className !== worker.state) tile.className = worker.state;
      const title = `${worker.name}: ${worker.state}${worker.why ? `, ${worker.why}` : ""}`;
      if (tile.title !== title) tile.title = title;
    });
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", at("cluster-hint").textContent);
  }

  map(data) {
    const { workers, here } = data;
    if (!workers.length) return;
    const others = workers.filter((worker) => worker.name !== here);
    const wide = Math.max(240, Math.min(workers.length > BESIDE ? 900 : 520, at("cluster-map").clientWidth));
    const few = others.length < 3;
    const longest = Math.max(...others.map((worker) => textWidth(shortened(worker.name), NAME.font)), 0);
    const tall = few ? 130 : Math.min(560, 230 + 14 * others.length);
    const places = new Map([[here, [wide * (others.length === 1 ? 0.2 : 0.5), tall / 2]]]);
    others.forEach((worker, i) => {
      const turn = (i / others.length) * 2 * Math.PI + (few ? 0 : -Math.PI / 2);
      const across = others.length === 1 ? 0.3 : 0.5 - Math.min(0.25, (few ? 52 : longest + 30) / wide, 0.5 - 95 / wide);
      places.set(worker.name, [wide * 0.5 + Math.cos(turn) * wide * across, tall / 2 + (few ? 0 : Math.sin(turn) * (tall / 2 - 36))]);
    });
    const picture = svg("svg", { role: "img", "aria-label": `${workers.length} workers and their links` });
    const drawn = new Drawn(wide, tall);
    const links = this.links(data, places);
    for (const link of links) {
      const [one, two] = [places.get(link.one), places.get(link.other)];
      link.points = Array.from({ length: 25 }, (_, i) => [one[0] + ((two[0] - one[0]) * i) / 24, one[1] + ((two[1] - one[1]) * i) / 24]);
      const share = Math.min(1, 30 / links.length);
      link.width = Math.min(9, 1.2 + Math.log10(1 + link.rate / 1e3)) * Math.sqrt(share);
      const line = svg("line", { x1: one[0], y1: one[1], x2: two[0], y2: two[1], stroke: colour(link.rate > 1 ? "accent" : "line"), "stroke-width": link.width,
        "stroke-opacity": 0.2 + 0.45 * share, class: "crossing" });
      if (!link.connected) line.setAttribute("stroke-dasharray", "3 5");
      const title = svg("title");
      title.textContent = `${link.one} and ${link.other}: ${link.words.join(", ")}`;
      line.append(title);
      picture.append(line);
      drawn.line(link.points, link.width);
    }
    const size = (worker) => (worker.name === here ? 1.2 : 1) * (others.length > 12 ? 10 : 14);
    for (const worker of workers) picture.append(...this.circle(worker, places.get(worker.name), size(worker), drawn));
    for (const worker of workers) this.name(worker, places.get(worker.name), size(worker) + 4, drawn, picture);
    for (const link of links) {
      if (link.rate <= 1 || links.length > 12) continue;
      const size = [Math.max(...link.words.map((words) => textWidth(words, LABEL.font))) + 4, LABEL.line * link.words.length + 2];
      const place = drawn.take(beside(link.points, ...size, link.width), ...size);
      if (!place) continue; // the link's title has it
      const text = svg("text", { "text-anchor": "middle", class: "soft link" });
      link.words.forEach((words, i) => {
        const line = svg("tspan", { x: place[0], y: place[1] + (i - (link.words.length - 1) / 2) * LABEL.line + 3.5 });
        line.textContent = words;
        text.append(line);
      });
      picture.append(text);
    }
    const top = Math.max(0, Math.min(...drawn.boxes.map((box) => box.y)) - 4);
    const bottom = Math.min(tall, Math.max(...drawn.boxes.map((box) => box.y + box.h)) + 4);
    for (const [name, value] of [["viewBox", `0 ${top} ${wide} ${bottom - top}`], ["width", wide], ["height", bottom - top]]) picture.setAttribute(name, value);
    at("cluster-map").replaceChildren(picture);
  }

  // One link for the two directions between workers that are shown.
  links(data, places) {
    const found = new Map();
    for (const [one, other, connected, into, out, trip] of data.links) {
      if (!places.has(one) || !places.has(other)) continue;
      const key = [one, other].sort().join("\u0000");
      const before = found.get(key) ?? { one, other, connected: false, rate: 0 };
      found.set(key, { ...before, connected: before.connected || connected, rate: Math.max(before.rate, into + out), trip });
    }
    return [...found.values()].map((link) => ({ ...link, words: [`${bytes(link.rate)}/s`, ...(link.trip === null ? [] : [milliseconds(link.trip)])] }));
  }

  circle(worker, [x, y], size, drawn) {
    const shade = colour({ lost: "bad", silent: "warn" }[worker.state] ?? "good");
    drawn.box(x - size - 3, y - size - 3, 2 * size + 6, 2 * size + 6);
    const title = svg("title");
    title.textContent = `${worker.name}: ${worker.state}${worker.why ? `, ${worker.why}` : ""}`;
    const parts = [svg("circle", { cx: x, cy: y, r: size + 3, fill: colour("card") }),
      svg("circle", { cx: x, cy: y, r: size, fill: shade, "data-worker": worker.name, "data-state": worker.state }, title)];
    if (worker.state === "lost") parts.push(svg("path", { d: `M${x - size / 3} ${y - size / 3}l${size / 1.5} ${size / 1.5}m0 ${-size / 1.5}l${-size / 1.5} ${size / 1.5}`, stroke: colour("card"), "stroke-width": 2.5, "stroke-linecap": "round" }));
    return parts;
  }

  // The name below its circle, or where else there is room beside it; no line is to run through it.
  name(worker, [x, y], size, drawn, picture) {
    const words = shortened(worker.name);
    const [w, h] = [textWidth(words, NAME.font) + 4, NAME.height];
    const inside = (middle) => Math.max(w / 2, Math.min(drawn.width - w / 2, middle));
    const around = [0, 12, 24].flatMap((further) => Array.from({ length: 12 }, (_, i) => { // to the right and left first
      const turn = (Math.ceil(i / 2) * (i % 2 ? 1 : -1) * Math.PI) / 6;
      return [x + Math.cos(turn) * (size + w / 2 + further), y + Math.sin(turn) * (size + h / 2 + further)];
    }));
    const place = drawn.take([[inside(x), y + size + h / 2], [inside(x), y - size - h / 2], ...around], w, h);
    if (!place) return; // the circle's title has it
    const label = svg("text", { x: place[0], y: place[1] + 4.5, "text-anchor": "middle", class: "title link" });
    label.textContent = words;
    picture.append(label);
  }
}
