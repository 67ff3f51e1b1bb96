// The waits: a frame for each worker, a box for each work that waits or is awaited, an arrow for each wait; red where they go round in a circle.
import { at, colour, make, svg, time } from "/dashboard/draw.js";
import { Graph } from "/dashboard/graph.js";

const [WORKER, TASK, ON, ON_TASK, WHAT, LINE, SECONDS, MESSAGE] = [0, 1, 2, 3, 4, 5, 6, 7];
const seconds = (value) => time(value * 1e6);
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const HEAD = 9; // length of an arrow's head

export class Waits extends Graph {
  constructor() {
    super("waits");
    this.chosen = null; // the first fields of a row
    this.drawn = "";
    const choose = (event) => {
      const place = event.target.closest("[data-row]")?.dataset.row;
      if (place === undefined || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      this.chosen = this.key(this.picture.rows[place]);
      this.show();
    };
    for (const kind of ["click", "keydown"]) at("waits-box").addEventListener(kind, choose);
  }

  key(row) { return row.slice(0, ON_TASK + 1).join("\u0000"); }

  take(data) {
    const { waits } = data;
    this.picture = waits;
    at("waits").hidden = !waits.rows.length && !waits.held.length;
    if (at("waits").hidden) { this.drawn = ""; return; }
    const parts = JSON.stringify([waits.boxes.map(({ us, ...box }) => box), waits.arrows]); // all but the times, which change each time
    if (parts !== this.drawn) { this.drawn = parts; this.draw(); }
    at("waits-box").querySelectorAll(".spent").forEach((text, i) => { text.textContent = this.spent(waits.boxes[i]); });
    at("waits-held").replaceChildren(...waits.held.map(([worker, value, line]) => make("li", { class: "bad" }, `${worker} is held up for ${seconds(value)} by `, make("b", {}, line || "a line that is not known"))));
    this.hint();
    this.show();
  }

  draw() {
    if (this.picture && !at("waits").hidden) super.draw();
  }

  hint() {
    const { rows, waits, cycles } = this.picture;
    const text = [plural(waits, "wait"), ...(rows.length < waits ? [`${rows.length} of them are drawn`] : []), plural(cycles, "cycle")].join(", ");
    if (at("waits-hint").textContent !== text) at("waits-hint").textContent = text;
    at("waits-hint").className = cycles ? "hint bad" : "hint";
  }

  // The row that was clicked, as long as it is there; else the first, which is of a cycle if there is one.
  show() {
    const { rows } = this.picture;
    const place = Math.max(0, rows.findIndex((row) => this.key(row) === this.chosen));
    const row = rows[place];
    const facts = !row ? [] : [["work", `${row[TASK]} on ${row[WORKER]}`], ["waits for", row[ON] ? `${row[ON_TASK] || "its work"} on ${row[ON]}` : "itself"],
      ["for", seconds(row[SECONDS])], ["at", row[WHAT]], ["line", row[LINE]], ["message", row[MESSAGE]]].filter(([, value]) => value);
    at("waits-row").replaceChildren(...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, value))));
    for (const each of at("waits-box").querySelectorAll("g.node")) each.classList.toggle("chosen", each.dataset.row === String(place));
  }

  spent(each) { return each.place === null ? "awaited" : time(each.us); }

  node(each) {
    const name = svg("text", { x: each.x, y: each.y - 4, "text-anchor": "middle" });
    name.textContent = each.name;
    const spent = svg("text", { x: each.x, y: each.y + 11, "text-anchor": "middle", class: "spent" });
    spent.textContent = this.spent(each);
    const shape = { x: each.x - each.w / 2, y: each.y - each.h / 2, width: each.w, height: each.h, rx: 6 };
    const place = each.place === null ? {} : { "data-row": each.place, tabindex: 0, role: "button", "aria-label": `${each.name} on ${each.worker}` };
    return svg("g", { class: "node", ...place }, svg("rect", { ...shape, fill: colour("card"), stroke: colour(each.cycle ? "bad" : "soft"), "stroke-opacity": each.cycle ? 1 : 0.55 }),
      svg("rect", { ...shape, fill: colour(each.cycle ? "bad" : "warn"), "fill-opacity": each.place === null ? 0 : each.cycle ? 0.22 : 0.12 }), name, spent);
  }

  look(one, two, arrow, way, points) {
    const shade = colour(arrow.cycle ? "bad" : "soft");
    const [[px, py], [x, y]] = points.slice(-2);
    const [dx, dy] = [(x - px) / (Math.hypot(x - px, y - py) || 1), (y - py) / (Math.hypot(x - px, y - py) || 1)];
    const corners = [[x, y], [x - HEAD * dx - (HEAD / 2) * dy, y - HEAD * dy + (HEAD / 2) * dx], [x - HEAD * dx + (HEAD / 2) * dy, y - HEAD * dy - (HEAD / 2) * dx]];
    const title = svg("title");
    title.textContent = `${one.name} on ${one.worker} waits for ${two.name} on ${two.worker}`;
    const path = svg("g", { "data-row": arrow.place, "data-cycle": arrow.cycle }, svg("path", { ...way, stroke: shade }),
      svg("path", { d: `M${corners.map((corner) => corner.join(" ")).join("L")}Z`, fill: shade }), title);
    return { path, text: this.picture.rows[arrow.place][WHAT].slice(0, 24) };
  }
}
