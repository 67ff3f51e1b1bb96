// The cluster: workers with their links as a graph (of many: as tiles), and a table.
import { ago, at, bytes, colour, make, svg } from "/dashboard/draw.js";

const AS_GRAPH = 24;
const MOST_ROWS = 60;
const COLUMNS = [
  ["worker", (worker) => worker.name],
  ["state", (worker, data) => `${worker.state} ${ago(data.now / 1e6 - worker.since)}`],
  ["round trip", (worker, data) => (worker.name === data.here ? "–" : `${worker.round_trip.toFixed(1)} ms`)],
  ["lag p50 / p99", (worker) => `${worker.lag50.toFixed(1)} / ${worker.lag99.toFixed(1)} ms`],
  ["memory", (worker) => bytes(worker.memory)],
  ["device", (worker) => (worker.device_memory ? bytes(worker.device_memory) : "–")],
  ["contexts", (worker) => worker.contexts],
  ["passes begun / committed / aborted", (worker) => `${worker.committed + worker.aborted + worker.passes} / ${worker.committed} / ${worker.aborted}`],
  ["calls served / failed", (worker) => `${worker.served} / ${worker.failed}`],
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
    at("cluster-body").className = workers.length > AS_GRAPH ? "many" : "";
    if (workers.length > AS_GRAPH) this.tiles(workers); else this.map(this.data);
    this.list(workers);
  }

  list(workers) {
    const wanted = at("cluster-find").value.trim().toLowerCase();
    const rank = { lost: 0, silent: 1, running: 2 };
    const found = workers.filter((worker) => worker.name.toLowerCase().includes(wanted));
    if (found.length > 12) found.sort((one, other) => rank[one.state] - rank[other.state]);
    const shown = found.slice(0, MOST_ROWS);
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
      if (row.className !== worker.state) row.className = worker.state;
      row.title = worker.why || worker.url;
      COLUMNS.forEach(([, text], i) => {
        const cell = i === 1 ? row.cells[1].firstChild : row.cells[i];
        const value = worker.memory === undefined && i > 1 ? "–" : String(text(worker, this.data));
        if (cell.textContent !== value) cell.textContent = value;
      });
    });
    let more = at("cluster-more");
    if (found.length > MOST_ROWS) {
      if (!more) { more = make("p", { id: "cluster-more", class: "hint" }); at("cluster-table").append(more); }
      more.textContent = `and ${found.length - MOST_ROWS} more: use Find`;
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
    const { workers, links, here } = data;
    const others = workers.filter((worker) => worker.name !== here);
    const [wide, tall] = [420, others.length < 3 ? 150 : 310];
    const places = new Map([[here, [wide / 2, tall / 2 - 6]]]);
    others.forEach((worker, i) => {
      const turn = (i / others.length) * 2 * Math.PI + (others.length < 3 ? 0 : -Math.PI / 2);
      places.set(worker.name, [wide / 2 + Math.cos(turn) * wide * 0.38, tall / 2 - 6 + Math.sin(turn) * tall * 0.37]);
    });
    const picture = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${workers.length} workers and their links` });
    const drawn = new Map();
    const labels = [];
    for (const [one, other, connected, into, out, trip] of links) {
      if (!places.has(one) || !places.has(other)) continue;
      const key = [one, other].sort().join("\u0000");
      const before = drawn.get(key) ?? { one, other, connected: false, rate: 0, trip: 0 };
      drawn.set(key, { ...before, connected: before.connected || connected, rate: Math.max(before.rate, into + out), trip: Math.max(before.trip, trip) });
    }
    for (const link of drawn.values()) {
      const [x1, y1] = places.get(link.one);
      const [x2, y2] = places.get(link.other);
      const width = Math.min(9, 1.2 + Math.log10(1 + link.rate / 1e3));
      const line = svg("line", { x1, y1, x2, y2, stroke: colour(link.rate > 1 ? "accent" : "line"), "stroke-width": width, "stroke-opacity": 0.65 });
      if (!link.connected) line.setAttribute("stroke-dasharray", "3 5");
      picture.append(line);
      if (link.rate > 1 && drawn.size <= 12) {
        const inner = link.one === here ? 0.56 : link.other === here ? 0.44 : 0.5;
        const [x, y] = [x1 + (x2 - x1) * inner, y1 + (y2 - y1) * inner];
        [`${bytes(link.rate)}/s`, `${link.trip.toFixed(1)} ms`].forEach((words, i) => {
          const text = svg("text", { x, y: y - 6 + i * 17, "text-anchor": "middle", class: "soft halo" });
          text.textContent = words;
          labels.push(text);
        });
      }
    }
    picture.append(...labels);
    for (const worker of workers) {
      const [x, y] = places.get(worker.name);
      const shade = colour({ lost: "bad", silent: "warn" }[worker.state] ?? "good");
      const size = worker.name === here ? 17 : 14;
      picture.append(svg("circle", { cx: x, cy: y, r: size + 3, fill: colour("card") }),
        svg("circle", { cx: x, cy: y, r: size, fill: shade, "data-worker": worker.name, "data-state": worker.state }));
      if (worker.state === "lost") picture.append(svg("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, stroke: colour("card"), "stroke-width": 2.5, "stroke-linecap": "round" }));
      const label = svg("text", { x, y: y + size + 15, "text-anchor": "middle", class: "title halo" });
      label.textContent = worker.name.length > 22 ? `${worker.name.slice(0, 21)}…` : worker.name;
      const title = svg("title");
      title.textContent = `${worker.name}: ${worker.state}${worker.why ? `, ${worker.why}` : ""}`;
      picture.append(label, title);
    }
    at("cluster-map").replaceChildren(picture);
  }
}
