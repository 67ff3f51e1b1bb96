// The task stream: a row per worker and thread; computation in the middle of a row, messages above it, passes below.
import { at, bytes, clipped, colour, make, operationColour, prepare, ticks, time } from "/dashboard/draw.js";

const KEPT_US = 60e6;
const MOST = 30000;
const [SHORTEST, LONGEST] = [2e3, 60e6];
const ROW = 40;
const MOST_ROWS = 40;
const COMPUTE = new Set(["forward", "backward"]);
const ABOVE = new Set(["call", "serve", "send", "receive", "commit"]);
const WORDS = {
  forward: "forward", backward: "backward", call: "waits for a call", serve: "serves", send: "sends gradients", receive: "takes gradients",
  commit: "commits", pass: "backward pass", scope: "scope",
};

export class Stream {
  constructor() {
    this.canvas = at("stream-canvas");
    this.tip = at("stream-tip");
    this.events = [];
    this.rows = [];
    this.windows = new Map();
    this.span = 10e6;
    this.end = 0;
    this.now = 0;
    this.received = 0;
    this.paused = false;
    this.follows = true;
    this.selected = null;
    this.listen();
    const frame = () => { if (!this.paused && this.follows && document.visibilityState === "visible") this.draw(); setTimeout(() => requestAnimationFrame(frame), 80); };
    requestAnimationFrame(frame);
  }

  take(data) {
    this.now = data.now;
    this.received = performance.now();
    for (const worker of data.workers) this.windows.set(worker.name, worker.windows ?? []);
    for (const row of data.events) {
      const [worker, name, category, operation, begin, length, thread, task, sequence, pass, shapes, size, line, peer] = row;
      if (category === "lag") continue;
      this.events.push({ worker, name, category, operation, begin, length, thread, task, sequence, pass, shapes, size, line, peer });
    }
    if (data.events.length) {
      this.events.sort((one, other) => one.begin - other.begin);
      const oldest = Math.max(this.paused || !this.follows ? -Infinity : data.now - KEPT_US * 1.2, -Infinity);
      let drop = Math.max(0, this.events.length - MOST);
      while (drop < this.events.length && this.events[drop].begin < oldest) drop += 1;
      this.events.splice(0, drop);
      this.lines = null;
    }
    this.names = data.workers.map((worker) => worker.name);
    this.here = data.here;
    this.dropped = data.dropped;
    this.arrange();
    if (this.paused || !this.follows) return;
    this.draw();
  }

  arrange() {
    const threads = new Map();
    for (const event of this.events) {
      const key = `${event.worker}\u0000${event.thread}`;
      if (!threads.has(key)) threads.set(key, { worker: event.worker, thread: event.thread, events: [] });
      threads.get(key).events.push(event);
    }
    const place = new Map(this.names.map((name, i) => [name, i]));
    this.rows = [...threads.values()].sort((one, other) =>
      (place.get(one.worker) ?? 1e9) - (place.get(other.worker) ?? 1e9) || (other.thread === "MainThread") - (one.thread === "MainThread") || one.thread.localeCompare(other.thread));
    this.hidden = Math.max(0, this.rows.length - MOST_ROWS);
    this.rows.length = Math.min(this.rows.length, MOST_ROWS);
    const spent = new Map();
    for (const event of this.events) if (COMPUTE.has(event.category)) spent.set(event.operation, (spent.get(event.operation) ?? 0) + event.length);
    const top = [...spent].sort((one, other) => other[1] - one[1]).slice(0, 7).map(([name]) => name);
    const kinds = ["call", "serve", "send", "receive", "commit", "pass"].filter((kind) => this.events.some((event) => event.category === kind));
    const key = [...top, "|", ...kinds].join();
    if (key !== this.legendKey) {
      this.legendKey = key;
      const entry = (shade, text) => { const mark = make("i"); mark.style.background = shade; return make("li", {}, mark, text); };
      at("stream-legend").replaceChildren(...top.map((name) => entry(operationColour(name, true), name)), ...kinds.map((kind) => entry(colour(kind), WORDS[kind])));
    }
  }

  latest() { return this.now + (performance.now() - this.received) * 1000 - 1.1e6; }

  draw() {
    if (this.follows && !this.paused) this.end = this.latest();
    const left = Math.min(150, Math.max(84, this.canvas.parentElement.clientWidth * 0.13));
    const height = Math.max(1, this.rows.length) * ROW + 26;
    const { context, width } = prepare(this.canvas, height);
    this.left = left;
    const scale = (width - left) / this.span;
    const begin = this.end - this.span;
    const x = (us) => left + (us - begin) * scale;
    this.x = x;
    context.fillStyle = colour("soft");
    if (!this.rows.length) context.fillText("waiting for the first events …", left, height / 2 - 8);
    this.axis(context, left, width, height, begin, x);
    this.rows.forEach((row, i) => this.row(context, row, i * ROW, left, width, x, begin));
    if (this.selected) this.mark(context, x);
    const shown = this.span >= 1e6 ? `${(this.span / 1e6).toFixed(this.span < 1e7 ? 1 : 0)} s` : `${(this.span / 1e3).toFixed(this.span < 1e4 ? 1 : 0)} ms`;
    const back = (this.latest() - this.end) / 1e6;
    const where = this.paused || !this.follows ? `, ${back.toFixed(1)} s ago` : "";
    at("stream-hint").textContent = `${shown}${where}${this.hidden ? `, ${this.hidden} more rows` : ""}`;
    this.canvas.setAttribute("aria-label", `Task stream: ${this.rows.length} rows, ${this.events.length} events, ${shown}${where}`);
  }

  axis(context, left, width, height, begin, x) {
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    const latest = this.latest();
    const step = Math.max(2, Math.floor((width - left) / 110));
    let end = -Infinity;
    for (const tick of ticks((begin - latest) / 1e6, (this.end - latest) / 1e6, step)) {
      const place = Math.round(x(latest + tick * 1e6)) + 0.5;
      if (place < left || place > width) continue;
      context.beginPath(); context.moveTo(place, 0); context.lineTo(place, height - 20); context.stroke();
      const text = this.span < 2e6 ? `${(tick * 1e3).toFixed(this.span < 2e4 ? 1 : 0)} ms` : `${tick.toFixed(this.span < 5e6 ? 1 : 0)} s`;
      const half = context.measureText(text).width / 2;
      const middle = Math.max(left + half, Math.min(width - half, place));
      if (middle - half < end + 8) continue;
      context.fillText(text, middle, height - 9);
      end = middle + half;
    }
    context.textAlign = "left";
  }

  row(context, row, top, left, width, x, begin) {
    context.save();
    context.beginPath(); context.rect(left, top, width - left, ROW); context.clip();
    this.hatch(context, row.worker, top, left, width, x);
    const ends = new Array(3).fill(-1);
    let from = 0;
    const events = row.events;
    for (let i = from; i < events.length; i += 1) {
      const event = events[i];
      if (event.begin > this.end) break;
      if (event.begin + event.length < begin) continue;
      const [strip, y, tall] = this.strip(event, top);
      const one = Math.max(left, x(event.begin));
      const two = Math.max(one + 0.8, x(event.begin + event.length));
      if (strip === 1 && two - one < 1 && two < ends[1] + 0.4) continue;
      ends[strip] = two;
      context.fillStyle = COMPUTE.has(event.category) ? operationColour(event.operation, event.category === "backward") : colour(event.category);
      context.globalAlpha = strip === 1 ? 1 : 0.75;
      context.fillRect(one, y, two - one, tall);
      context.globalAlpha = 1;
      if (two - one > 46 && tall > 12) {
        context.fillStyle = event.category === "forward" || event.category === "backward" ? "#10151d" : colour("ink");
        context.fillText(clipped(context, event.name, two - one - 8), one + 4, y + tall / 2 + 0.5);
      }
    }
    context.restore();
    context.strokeStyle = colour("line");
    context.beginPath(); context.moveTo(0, top + ROW - 0.5); context.lineTo(width, top + ROW - 0.5); context.stroke();
    context.fillStyle = colour("ink");
    context.font = '600 12px system-ui, "DejaVu Sans", sans-serif';
    context.fillText(clipped(context, row.worker, left - 10), 2, top + 13);
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.fillStyle = colour("soft");
    context.fillText(clipped(context, row.thread === "MainThread" ? "loop" : row.thread.replace(/^aiograd-/, ""), left - 10), 2, top + 28);
    context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  }

  strip(event, top) {
    if (COMPUTE.has(event.category)) return [1, top + 11, 19];
    if (ABOVE.has(event.category)) return [0, top + 3, 7];
    return [2, top + 31, 4];
  }

  // Times in which a worker recorded nothing are not idle: they are hatched.
  hatch(context, worker, top, left, width, x) {
    const windows = this.windows.get(worker) ?? [];
    context.fillStyle = colour("hatch");
    let place = left;
    const gap = (until) => { if (until - place > 1.5) for (let at = Math.floor(place / 6) * 6; at < until; at += 6) context.fillRect(Math.max(at, place), top + 19, Math.min(2, until - at), 3); };
    for (const [one, two] of windows) {
      const from = x(one);
      const to = two ? x(two) : width;
      if (to < left || from > width) continue;
      gap(Math.min(from, width));
      place = Math.max(place, to);
    }
    gap(width);
  }

  mark(context, x) {
    const event = this.selected;
    const index = this.rows.findIndex((row) => row.worker === event.worker && row.thread === event.thread);
    if (index < 0) return;
    const [, y, tall] = this.strip(event, index * ROW);
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(x(event.begin) - 1, y - 1, Math.max(3, (x(event.begin + event.length) - x(event.begin)) + 2), tall + 2);
    context.lineWidth = 1;
  }

  under(px, py) {
    const row = this.rows[Math.floor(py / ROW)];
    if (!row || px < this.left) return null;
    let best = null;
    for (const event of row.events) {
      const [, y, tall] = this.strip(event, Math.floor(py / ROW) * ROW);
      const one = this.x(event.begin) - 2;
      const two = this.x(event.begin + event.length) + 2;
      if (px < one || px > two || py < y - 2 || py > y + tall + 2) continue;
      if (!best || event.length < best.length) best = event;
    }
    return best;
  }

  // The user's line of a backward is that of its forward.
  lineOf(event) {
    if (event.line || event.sequence === null || event.category !== "backward") return event.line;
    if (!this.lines) {
      this.lines = new Map();
      for (const each of this.events) if (each.line && each.sequence !== null) this.lines.set(`${each.worker}\u0000${each.sequence}`, each.line);
    }
    return this.lines.get(`${event.worker}\u0000${event.sequence}`) ?? null;
  }

  facts(event) {
    const facts = [`${WORDS[event.category] ?? event.category} on ${event.worker}, ${time(event.length)}`];
    if (event.peer) facts.push(`with ${event.peer}`);
    if (event.shapes) facts.push(`shape ${event.shapes}`);
    if (event.size) facts.push(bytes(event.size));
    if (event.pass !== null) facts.push(`pass ${event.pass}`);
    const line = this.lineOf(event);
    if (line) facts.push(line);
    return facts;
  }

  show(event, px, py) {
    this.selected = event;
    this.tip.hidden = !event;
    if (!event) return;
    this.tip.replaceChildren(make("b", {}, event.name), ...this.facts(event).map((fact) => make("span", {}, fact)));
    const wide = this.canvas.parentElement.clientWidth;
    this.tip.style.left = `${Math.min(Math.max(0, px + 12), Math.max(0, wide - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${py + 16}px`;
  }

  // Keeps the right edge while live, else the point at `share` of the width.
  zoom(factor, share = 0.5) {
    const span = Math.min(LONGEST, Math.max(SHORTEST, this.span * factor));
    if (!this.isLive()) this.end += (span - this.span) * (1 - share);
    this.span = span;
    this.clamp();
    this.draw();
  }

  isLive() { return this.follows && !this.paused; }

  move(us) {
    if (this.follows) { this.follows = false; this.end = Math.min(this.end, this.latest()); }
    this.end += us;
    this.clamp();
    if (this.end >= this.latest() - this.span * 0.005 && !this.paused) this.follows = true;
    this.buttons();
    this.draw();
  }

  clamp() {
    const latest = this.paused ? this.pausedAt : this.latest();
    this.end = Math.max(Math.min(this.end, latest), latest - KEPT_US + this.span * 0.1);
  }

  pause(paused) {
    this.paused = paused;
    this.pausedAt = paused ? this.latest() : null;
    if (!paused) { this.follows = true; this.show(null); }
    this.buttons();
    this.draw();
  }

  buttons() {
    at("stream-pause").setAttribute("aria-pressed", String(this.paused));
    at("stream-pause").textContent = this.paused ? "Go on" : "Pause";
    at("stream-live").setAttribute("aria-pressed", String(this.isLive()));
  }

  // From event to event, by keys.
  step(direction) {
    if (!this.paused) this.pause(true);
    const shown = this.events.filter((event) => event.begin + event.length >= this.end - this.span && event.begin <= this.end
      && this.rows.some((row) => row.worker === event.worker && row.thread === event.thread));
    if (!shown.length) return;
    const now = this.selected ? shown.indexOf(this.selected) : -1;
    const event = shown[(now + direction + shown.length) % shown.length];
    const index = this.rows.findIndex((row) => row.worker === event.worker && row.thread === event.thread);
    this.show(event, this.x(event.begin), index * ROW + 22);
    at("stream-said").textContent = [event.name, ...this.facts(event)].join(", ");
    this.draw();
  }

  listen() {
    const canvas = this.canvas;
    at("stream-pause").addEventListener("click", () => this.pause(!this.paused));
    at("stream-in").addEventListener("click", () => this.zoom(0.5));
    at("stream-out").addEventListener("click", () => this.zoom(2));
    at("stream-live").addEventListener("click", () => this.pause(false));
    canvas.addEventListener("keydown", (event) => {
      const act = {
        " ": () => this.pause(!this.paused), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.pause(false),
        ArrowLeft: () => this.move(-this.span * 0.15), ArrowRight: () => this.move(this.span * 0.15), ".": () => this.step(1), ",": () => this.step(-1),
        Escape: () => { this.show(null); this.draw(); },
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, (event.offsetX - this.left) / Math.max(50, canvas.clientWidth - this.left)));
      else this.move((event.deltaX / Math.max(100, canvas.clientWidth)) * this.span);
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointercancel", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null && event.buttons) {
        if (Math.abs(event.clientX - held) < 1) return;
        this.move(((held - event.clientX) / Math.max(50, canvas.clientWidth - this.left)) * this.span);
        held = event.clientX;
        return;
      }
      const found = this.under(event.offsetX, event.offsetY);
      this.show(found, event.offsetX, event.offsetY);
      if (!this.isLive()) this.draw();
    });
    canvas.addEventListener("pointerleave", () => { this.show(null); });
    canvas.addEventListener("dblclick", () => this.zoom(0.4));
    this.buttons();
  }
}
