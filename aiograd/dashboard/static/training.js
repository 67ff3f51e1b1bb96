// Training: a chart per logged name with a line per worker; and the last whole step of a pipeline.
import { at, clipped, colour, make, number, prepare, SERIES, ticks, time } from "/dashboard/draw.js";
import { isOfRounds } from "/dashboard/rounds.js";

const MOST_POINTS = 4000;
const MOST_CHARTS = 24;

export class Training {
  constructor() { this.charts = new Map(); }

  take(data) {
    for (const [worker, name, step, value] of data.scalars) {
      if (isOfRounds(name)) continue;
      if (!this.charts.has(name)) {
        if (this.charts.size >= MOST_CHARTS) { this.hidden = true; continue; }
        this.charts.set(name, this.chart(name));
      }
      const chart = this.charts.get(name);
      if (!chart.lines.has(worker)) chart.lines.set(worker, []);
      const line = chart.lines.get(worker);
      line.push([step, value]);
      if (line.length > MOST_POINTS) chart.lines.set(worker, line.filter((_, i) => i % 2 || i > line.length - 500));
      chart.isNew = true;
    }
    if (this.charts.size) at("training-hint").textContent = `${this.charts.size} ${this.charts.size === 1 ? "scalar" : "scalars"}${this.hidden ? " shown, more are logged" : ""}`;
    for (const chart of this.charts.values()) if (chart.isNew) this.paint(chart);
  }

  draw() { for (const chart of this.charts.values()) this.paint(chart); }

  chart(name) {
    const canvas = make("canvas", { role: "img" });
    const value = make("span");
    const figure = make("figure", {}, make("figcaption", {}, make("span", {}, name), value), make("div", { class: "canvas-box" }, canvas));
    at("training-charts").append(figure);
    const chart = { name, canvas, value, lines: new Map(), isNew: true, at: null };
    canvas.addEventListener("pointermove", (event) => { chart.at = event.offsetX; this.paint(chart); });
    canvas.addEventListener("pointerleave", () => { chart.at = null; this.paint(chart); });
    return chart;
  }

  paint(chart) {
    chart.isNew = false;
    const points = [...chart.lines.values()].flat().filter((point) => point[1] !== null);
    chart.canvas.parentElement.hidden = !points.length;
    if (!points.length) { chart.value.textContent = "not finite"; return; }
    const { context, width, height } = prepare(chart.canvas, 170);
    let [low, high, first, last] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [step, value] of points) { low = Math.min(low, value); high = Math.max(high, value); first = Math.min(first, step); last = Math.max(last, step); }
    if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
    const [left, bottom] = [46, height - 20];
    const x = (step) => left + ((step - first) / Math.max(1, last - first)) * (width - left - 6);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 8);
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("soft");
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.textAlign = "right";
    for (const tick of ticks(low, high, 4)) {
      context.beginPath(); context.moveTo(left, y(tick)); context.lineTo(width, y(tick)); context.stroke();
      context.fillText(clipped(context, number(tick), left - 6), left - 6, y(tick));
    }
    context.textAlign = "center";
    for (const tick of ticks(first, last, Math.max(2, width / 110))) if (Number.isInteger(tick)) context.fillText(String(tick), Math.min(width - 14, x(tick)), height - 7);
    const texts = [];
    [...chart.lines].forEach(([worker, line], i) => {
      const shade = SERIES[i % SERIES.length];
      context.strokeStyle = shade;
      context.lineWidth = line.length > 60 ? 1 : 2;
      context.globalAlpha = line.length > 60 ? 0.35 : 1;
      this.path(context, line, x, y);
      context.globalAlpha = 1;
      if (line.length > 60) { context.lineWidth = 2; this.path(context, smooth(line), x, y); }
      let shown = line[line.length - 1];
      if (chart.at !== null) {
        const step = first + ((chart.at - left) / Math.max(1, width - left - 6)) * (last - first);
        shown = line.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best), shown);
        if (shown[1] !== null) { context.fillStyle = shade; context.beginPath(); context.arc(x(shown[0]), y(shown[1]), 3.5, 0, 7); context.fill(); }
      }
      if (i < 4) texts.push(`${chart.lines.size > 1 ? `${worker} ` : ""}${number(shown[1])}${chart.at !== null ? ` at ${shown[0]}` : ""}`);
    });
    const many = chart.lines.size > 1; // then each name has a mark in the colour of its line
    chart.value.replaceChildren(...texts.flatMap((text, i) => {
      const mark = make("i");
      mark.style.background = SERIES[i % SERIES.length];
      return many ? [make("span", {}, mark, text)] : [text];
    }));
    chart.canvas.setAttribute("aria-label", `${chart.name}: ${texts.join(", ")}, from ${number(low)} to ${number(high)}`);
  }

  path(context, line, x, y) {
    context.beginPath();
    let isOn = false;
    for (const [step, value] of line) {
      if (value === null) { isOn = false; continue; }
      if (isOn) context.lineTo(x(step), y(value)); else context.moveTo(x(step), y(value));
      isOn = true;
    }
    context.stroke();
  }
}

function smooth(line) {
  const weight = 0.85;
  let mean = null;
  return line.map(([step, value]) => {
    if (value === null) return [step, null];
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return [step, mean];
  });
}

const ACTIONS = { F: ["#6da5e6", "F forward"], I: ["#f2a45e", "I input backward"], W: ["#7dc078", "W weight backward"], B: ["#de808c", "B full backward"] };
const FIRST_STAGE = 0.5; // how much of its colour the first of several stages of a rank has
const [ROW, TALL] = [30, 22];

// The last whole step of a pipeline: a row per rank, and how much of it is bubble.
export class Pipeline {
  constructor() { this.step = null; }

  take(data) {
    if (!data.pipeline || !data.pipeline.boxes) return;
    this.step = data.pipeline;
    at("pipeline").hidden = false;
    const kinds = Object.keys(ACTIONS).filter((kind) => this.step.boxes.some((box) => box[3] === kind));
    at("pipeline-legend").replaceChildren(...kinds.map((kind) => { const mark = make("i"); mark.style.background = ACTIONS[kind][0]; return make("li", {}, mark, ACTIONS[kind][1]); }));
    this.draw();
  }

  draw() {
    const step = this.step;
    if (!step) return;
    const { ranks, boxes, us } = step;
    const { context, width } = prepare(at("pipeline-canvas"), ranks.length * ROW + 22);
    const isSpread = new Set(ranks.map((rank) => rank.worker)).size > 1;
    const left = isSpread ? Math.min(170, width * 0.3) : 66;
    const x = (place) => left + (place / Math.max(1, us)) * (width - left - 2);
    const stages = ranks.map((_, row) => [...new Set(boxes.filter((box) => box[0] === row).map((box) => box[5]))].sort((one, other) => one - other));
    ranks.forEach((rank, row) => {
      context.fillStyle = colour("ink");
      context.fillText(clipped(context, isSpread ? `${rank.label}  ${rank.worker}` : rank.label, left - 8), 2, row * ROW + 14);
      context.fillStyle = colour("grid");
      context.fillRect(left, row * ROW + 3, width - left - 2, TALL);
    });
    for (const [row, part, parts, kind, microbatch, stage, begin, length] of boxes) {
      const [one, two] = [x(begin), x(begin + length)];
      const [top, tall] = [row * ROW + 3 + (part * TALL) / parts, TALL / parts];
      const later = stages[row].length > 1 ? stages[row].indexOf(stage) / (stages[row].length - 1) : 1;
      context.fillStyle = "#ffffff";
      context.fillRect(one, top, Math.max(1, two - one - 0.7), tall);
      context.globalAlpha = FIRST_STAGE + (1 - FIRST_STAGE) * later;
      context.fillStyle = ACTIONS[kind]?.[0] ?? colour("soft");
      context.fillRect(one, top, Math.max(1, two - one - 0.7), tall);
      context.globalAlpha = 1;
      context.fillStyle = "#10151d";
      if (two - one > context.measureText(microbatch).width + 6) context.fillText(microbatch, one + 3, top + tall / 2 + 0.5);
    }
    context.fillStyle = colour("soft");
    for (const tick of ticks(0, us, Math.max(2, width / 130))) {
      const text = time(tick);
      context.fillText(text, Math.min(width - context.measureText(text).width - 2, x(tick)), ranks.length * ROW + 12);
    }
    const text = `last step: ${time(us)}, ${(step.bubble * 100).toFixed(0)} % bubble; ${step.name}${step.promise ? `: ${step.promise}` : ""}`;
    at("pipeline-hint").textContent = text;
    at("pipeline-canvas").setAttribute("aria-label", `${ranks.length} ranks, ${text}`);
  }
}
