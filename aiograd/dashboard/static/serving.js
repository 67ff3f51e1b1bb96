// Serving: of each server its versions, and over time its latency, queue, promotions, rollbacks and steps.
import { ago, at, bytes, clipped, colour, count, make, number, prepare, SERIES, ticks, time } from "/dashboard/draw.js";

const WINDOW = 180; // seconds on the time axis
const MOST_SERVERS = 12;
const [PLOT, FOOT, STRIP] = [160, 22, 30]; // heights of the plot, of its foot for promotions, and of each strip below it
const [LEFT, RIGHT] = [56, 8];
const AT = 0, P50 = 1, P99 = 2, QUEUED = 3, VERSION = 4, PROMOTIONS = 5, ROLLBACKS = 6, ANSWERS = 7, STEPS = 8; // places in a sample
const LEGEND = [["p50", SERIES[0]], ["p99", SERIES[1]], ["promotion", "var(--good)"], ["rollback", "var(--bad)"], ["rows in the queue", SERIES[4]], ["steps/s", SERIES[6]]];
const COLUMNS = [
  ["version", ([number]) => number],
  ["state", ([, state]) => make("span", { class: "state" }, state.replace(/(\w) /g, "$1\u00a0"))],
  ["parent", ([, , parent]) => parent ?? "–"],
  ["published", ([, , , age]) => `${ago(age)} ago`],
  ["answers", ([, , , , answers]) => count(answers)],
  ["metrics", ([, , , , , metrics]) => (metrics.length ? make("span", {}, ...metrics.map(([name, value]) => make("span", {}, `${name} ${number(value)}`))) : "–")],
];
const microseconds = (value) => (value === null || value === undefined ? "–" : time(value));

export class Serving {
  constructor() {
    this.cards = new Map();
    at("serving-legend").replaceChildren(...LEGEND.map(([name, shade]) => { const mark = make("i"); mark.style.background = shade; return make("li", {}, mark, name); }));
  }

  take(data) {
    for (const [worker, name, ...sample] of data.serving) {
      const card = this.card(worker, name);
      card.samples.push(sample);
      while (card.samples[0][AT] < sample[AT] - WINDOW) card.samples.shift();
    }
    const shown = data.servers.slice(0, MOST_SERVERS);
    const box = at("serving-servers");
    for (const card of this.cards.values()) card.isShown = false;
    shown.forEach((server, place) => {
      const card = this.card(server.worker, server.name);
      card.isShown = true;
      if (box.children[place] !== card.root) box.insertBefore(card.root, box.children[place] ?? null);
      this.tell(card, server);
    });
    for (const [key, card] of this.cards) if (!card.isShown) { card.root.remove(); this.cards.delete(key); }
    at("serving").hidden = !shown.length;
    const more = data.servers.length - shown.length;
    at("serving-hint").textContent = `${data.servers.length} ${data.servers.length === 1 ? "server" : "servers"}${more > 0 ? `, of which ${more} are not shown` : ""}`;
    this.draw();
  }

  draw() { for (const card of this.cards.values()) if (card.root.isConnected) this.paint(card); }

  card(worker, name) {
    const key = `${worker}\u0000${name}`;
    if (!this.cards.has(key)) {
      const [canvas, facts, value] = [make("canvas", { role: "img" }), make("ul", { class: "facts" }), make("span")];
      const head = make("thead", {}, make("tr", {}, ...COLUMNS.map(([column]) => make("th", { scope: "col" }, column))));
      const [rows, more] = [make("tbody"), make("p", { class: "hint" })];
      const figure = make("figure", {}, make("figcaption", {}, make("span", {}, "latency"), value), make("div", { class: "canvas-box" }, canvas));
      const body = make("div", { class: "server-body" }, figure, make("div", { class: "table-box versions" }, make("table", {}, head, rows), more));
      const root = make("article", { class: "server" }, make("h3", {}, name, make("span", { class: "hint" }, ` on ${worker}`)), facts, body);
      const card = { name, root, canvas, facts, rows, more, value, samples: [], at: null, hasTrainer: false };
      canvas.addEventListener("pointermove", (event) => { card.at = event.offsetX; this.paint(card); });
      canvas.addEventListener("pointerleave", () => { card.at = null; this.paint(card); });
      this.cards.set(key, card);
    }
    return this.cards.get(key);
  }

  tell(card, server) {
    const { trainer, follower } = server;
    const last = card.samples[card.samples.length - 1] ?? [];
    card.hasTrainer = trainer !== null;
    const facts = [
      ["version", server.version], ["answers/s", number(last[ANSWERS])], ["queue", `${server.queued} of ${server.max_queue} rows`],
      ...(follower ? [] : [["published", count(server.published)], ["promoted", count(server.promoted)], ["rollbacks", count(server.rollbacks)]]),
      ...["refused", "expired", "failed"].filter((name) => server[name]).map((name) => [name, count(server[name]), true]),
    ];
    if (trainer) facts.push(["steps", `${count(trainer.steps)}, ${number(last[STEPS])}/s`], ["candidates dropped", trainer.rejected]);
    if (trainer?.failures) facts.push(["failed steps", `${count(trainer.failures)}${trainer.error ? `, the last with ${trainer.error}` : ""}`, trainer.error !== null]);
    if (follower) {
      facts.push([follower.connected ? "follows" : "not connected to", follower.leader, !follower.connected]);
      facts.push(["behind", follower.behind === null ? "–" : time(1000 * follower.behind)], ["received", bytes(follower.bytes)]);
    }
    card.facts.replaceChildren(...facts.map(([name, value, isBad]) => make("li", isBad ? { class: "bad" } : {}, `${name} `, make("b", {}, String(value)))));
    card.rows.replaceChildren(...server.versions.map((version) => make("tr", { class: version[1].split(",")[0].split(" ")[0] }, ...COLUMNS.map(([name, text]) =>
      make("td", { "data-label": name }, text(version))))));
    const hidden = server.kept - server.versions.length;
    card.more.textContent = hidden > 0 ? `and ${hidden} more that ${hidden === 1 ? "is" : "are"} kept` : "";
  }

  paint(card) {
    const { samples } = card;
    const strips = [["queue", QUEUED, SERIES[4]], ...(card.hasTrainer ? [["steps/s", STEPS, SERIES[6]]] : [])];
    const { context, width, height } = prepare(card.canvas, PLOT + strips.length * (STRIP + 8) + 20);
    const last = samples.length ? samples[samples.length - 1][AT] : 0;
    const first = Math.min(samples.length ? samples[0][AT] : 0, last - 10);
    const x = (seconds) => LEFT + ((seconds - first) / (last - first)) * (width - LEFT - RIGHT);
    const known = samples.flatMap((sample) => [sample[P50], sample[P99]]).filter((value) => value !== null);
    const [low, high] = known.length ? [Math.log10(Math.max(1, Math.min(...known)) / 1.3), Math.log10(Math.max(...known) * 1.3)] : [2, 4];
    const y = (us) => PLOT - FOOT - ((Math.log10(Math.max(1, us)) - low) / (high - low)) * (PLOT - FOOT - 16);
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.lineWidth = 1;
    const rule = (top, text) => {
      context.strokeStyle = colour("grid");
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      context.beginPath(); context.moveTo(LEFT, top); context.lineTo(width - RIGHT, top); context.stroke();
      context.fillText(clipped(context, text, LEFT - 6), LEFT - 6, top);
    };
    for (let power = 0; power < 8; power += 1) {
      for (const factor of high - low < 2.2 ? [1, 2, 5] : [1]) {
        const us = factor * 10 ** power;
        if (Math.log10(us) >= low && Math.log10(us) <= high) rule(y(us), time(us).replace(/\.0+ /, " "));
      }
    }
    strips.forEach(([name, place, shade], i) => {
      const bottom = PLOT + (i + 1) * (STRIP + 8);
      const most = Math.max(0, ...samples.map((sample) => sample[place]));
      rule(bottom, name);
      if (!most) return;
      context.fillText(clipped(context, number(most), LEFT - 6), LEFT - 6, bottom - STRIP + 8);
      context.fillStyle = shade;
      context.beginPath();
      context.moveTo(x(first), bottom);
      for (const sample of samples) context.lineTo(x(sample[AT]), bottom - (sample[place] / most) * STRIP);
      context.lineTo(x(last), bottom);
      context.globalAlpha = 0.55; context.fill(); context.globalAlpha = 1;
    });
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (const tick of ticks(first - last, 0, Math.max(2, (width - LEFT) / 110))) context.fillText(tick ? `−${ago(-tick)}` : "now", Math.min(width - 14, x(last + tick)), height - 8);
    this.changes(context, samples, x, width);
    for (const [place, shade] of [[P99, SERIES[1]], [P50, SERIES[0]]]) this.line(context, samples, place, shade, x, y);
    let shown = samples[samples.length - 1];
    if (card.at !== null && shown) {
      const seconds = first + ((card.at - LEFT) / Math.max(1, width - LEFT - RIGHT)) * (last - first);
      shown = samples.reduce((best, sample) => (Math.abs(sample[AT] - seconds) < Math.abs(best[AT] - seconds) ? sample : best), shown);
      context.strokeStyle = colour("soft");
      context.beginPath(); context.moveTo(x(shown[AT]), 4); context.lineTo(x(shown[AT]), height - 18); context.stroke();
    }
    const text = shown ? `p50 ${microseconds(shown[P50])}, p99 ${microseconds(shown[P99])}${card.at === null ? "" : `, version ${shown[VERSION]}, ${shown[QUEUED]} rows queued, ${ago(last - shown[AT])} ago`}` : "";
    if (card.value.textContent !== text) card.value.textContent = text;
    const sum = (place) => samples.reduce((total, sample) => total + sample[place], 0);
    card.canvas.setAttribute("aria-label", `${card.name}: ${text}; in ${ago(last - first)} ${sum(PROMOTIONS)} promotions, ${sum(ROLLBACKS)} rollbacks`);
  }

  // Promotions as marks at the foot of the plot, rollbacks as lines through it, with the version where there is room.
  changes(context, samples, x, width) {
    const free = { promotion: LEFT, rollback: LEFT };
    for (const sample of samples.filter((each) => each[ROLLBACKS] || each[PROMOTIONS])) {
      const kind = sample[ROLLBACKS] ? "rollback" : "promotion";
      context.fillStyle = colour(sample[ROLLBACKS] ? "bad" : "good");
      if (sample[ROLLBACKS]) context.fillRect(x(sample[AT]) - 0.75, 14, 1.5, PLOT - 14);
      else context.fillRect(x(sample[AT]) - 1, PLOT - 7, 2, 7);
      const text = sample[ROLLBACKS] ? `back to ${sample[VERSION]}` : String(sample[VERSION]);
      const half = context.measureText(text).width / 2;
      const middle = Math.max(LEFT + half, Math.min(width - half, x(sample[AT])));
      if (middle - half < free[kind]) continue;
      context.fillText(text, middle, sample[ROLLBACKS] ? 7 : PLOT - 13);
      free[kind] = middle + half + 6;
    }
  }

  line(context, samples, place, shade, x, y) {
    context.strokeStyle = shade;
    context.lineWidth = 1.8;
    context.beginPath();
    let before = null;
    for (const sample of samples) {
      if (sample[place] === null) { before = null; continue; }
      if (before === null) { context.moveTo(x(sample[AT]) - 1.5, y(sample[place])); }
      context.lineTo(x(sample[AT]), y(sample[place]));
      before = sample;
    }
    context.stroke();
    context.lineWidth = 1;
  }
}
