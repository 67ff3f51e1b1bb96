// Training: a chart per logged name with a line per worker; and the last step of a pipeline.
import { at, clipped, colour, make, number, prepare, SERIES, ticks, time } from "/dashboard/draw.js";

const MOST_POINTS = 4000;
const MOST_CHARTS = 24;

export class Training {
  constructor() { this.charts = new Map(); }

  take(data) {
    for (const [worker, name, step, value] of data.scalars) {
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
    const { context, width, height } = prepare(chart.canvas, 170);
    const points = [...chart.lines.values()].flat().filter((point) => point[1] !== null);
    if (!points.length) { chart.value.textContent = "not finite"; return; }
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
    chart.value.textContent = texts.join(" · ");
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

const ACTION = /^PP:(\d+)([A-Z_]+?)(\d+)?$/;

// The last step of a pipeline, from its recorded actions: a row per stage, and how much of it is bubble.
export class Pipeline {
  constructor() { this.actions = []; this.plan = null; }

  take(data) {
    let isNew = false;
    for (const event of data.events) {
      const [worker, name, , , begin, length] = event;
      if (name.startsWith("PP:step ")) { this.plan = name.slice(8); isNew = true; this.step = [begin, begin + length]; continue; }
      const match = ACTION.exec(name);
      if (!match) continue;
      this.actions.push({ worker, stage: Number(match[1]), kind: match[2], microbatch: match[3] ?? "", begin, end: begin + length });
      isNew = true;
    }
    if (!isNew) return;
    this.actions.sort((one, other) => one.begin - other.begin);
    if (this.actions.length > 6000) this.actions.splice(0, this.actions.length - 6000);
    at("pipeline").hidden = false;
    this.draw();
  }

  draw() {
    if (!this.actions.length) return;
    const newest = this.step && this.actions.some((each) => each.begin >= this.step[0] && each.end <= this.step[1]) ? this.step : null;
    const end = newest ? newest[1] : this.actions[this.actions.length - 1].end;
    let shown = newest ? this.actions.filter((each) => each.begin >= newest[0] && each.end <= newest[1]) : this.actions;
    if (!newest) { // the last run of actions without a pause that is longer than all of it
      let first = shown.length - 1;
      while (first > 0 && shown[first].begin - shown[first - 1].end < Math.max(2e3, (end - shown[first].begin) * 0.5)) first -= 1;
      shown = shown.slice(first);
    }
    if (!shown.length) return;
    const begin = Math.min(...shown.map((each) => each.begin));
    const until = Math.max(...shown.map((each) => each.end));
    const stages = [...new Set(shown.map((each) => each.stage))].sort((one, other) => one - other);
    const { context, width } = prepare(at("pipeline-canvas"), stages.length * 30 + 22);
    const left = 84;
    const x = (us) => left + ((us - begin) / Math.max(1, until - begin)) * (width - left - 2);
    let busy = 0;
    stages.forEach((stage, i) => {
      context.fillStyle = colour("ink");
      context.fillText(`stage ${stage}`, 2, i * 30 + 14);
      context.fillStyle = colour("grid");
      context.fillRect(left, i * 30 + 3, width - left - 2, 22);
      for (const each of shown) {
        if (each.stage !== stage || /SEND|RECV/.test(each.kind)) continue;
        const [one, two] = [x(each.begin), x(each.end)];
        busy += each.end - each.begin;
        context.fillStyle = each.kind.startsWith("F") ? SERIES[0] : each.kind.startsWith("W") ? SERIES[2] : SERIES[1];
        context.fillRect(one, i * 30 + 3, Math.max(1, two - one - 0.7), 22);
        context.fillStyle = "#ffffff";
        if (two - one > 16) context.fillText(each.microbatch, one + 4, i * 30 + 14.5);
      }
    });
    context.fillStyle = colour("soft");
    for (const tick of ticks(0, until - begin, Math.max(2, width / 130))) context.fillText(time(tick), Math.min(width - 50, x(begin + tick)), stages.length * 30 + 12);
    const bubble = 1 - busy / Math.max(1, (until - begin) * stages.length);
    at("pipeline-hint").textContent = `last step: ${time(until - begin)}, ${(Math.max(0, bubble) * 100).toFixed(0)} % bubble${this.plan ? `; ${this.plan}` : ""}`;
  }
}
