// What all panels share: elements, numbers for people, colours, canvases. Texts that came from workers are only ever set as text.

export const at = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < 4) { count /= 1000; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function count(value) {
  return value < 1e5 ? String(value) : value < 1e7 ? `${Math.round(value / 1e3)}k` : `${Math.round(value / 1e6)}M`;
}

export function time(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(us >= 1e7 ? 0 : 2)} s`;
  if (us >= 1e3) return `${(us / 1e3).toFixed(us >= 1e5 ? 0 : us >= 1e4 ? 1 : 2)} ms`;
  return `${us >= 100 ? Math.round(us) : us.toFixed(1)} µs`;
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(Math.round(value * 1e4) / 1e4);
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

let styles = null;
export const colour = (name) => {
  styles ??= getComputedStyle(document.documentElement);
  return styles.getPropertyValue(`--${name}`).trim();
};
const watchers = [];
export const isDark = matchMedia("(prefers-color-scheme: dark)");
isDark.addEventListener("change", () => { styles = null; hues.clear(); for (const watcher of watchers) watcher(); });
export const whenThemeChanges = (callback) => watchers.push(callback);

// A colour for each operation: forward lighter, backward deeper, of one hue, which no other has while there are hues left.
const HUES = 16;
const hues = new Map();
const taken = new Map();
function hueOf(operation) {
  if (!taken.has(operation)) {
    let hash = 2166136261;
    for (const character of operation) hash = Math.imul(hash ^ character.codePointAt(0), 16777619) >>> 0;
    const others = new Set(taken.values());
    let hue = hash % HUES;
    for (let tries = 0; tries < HUES && others.has(hue); tries += 1) hue = (hue + 7) % HUES;
    taken.set(operation, hue);
  }
  return (210 + taken.get(operation) * (360 / HUES)) % 360;
}
export function operationColour(operation, isBackward) {
  const key = operation + (isBackward ? "<" : ">");
  let found = hues.get(key);
  if (!found) {
    const hue = hueOf(operation);
    const [chroma, light] = isDark.matches ? [isBackward ? 0.14 : 0.09, isBackward ? 0.68 : 0.52] : [isBackward ? 0.15 : 0.09, isBackward ? 0.58 : 0.79];
    found = `oklch(${light} ${chroma} ${hue})`;
    hues.set(key, found);
  }
  return found;
}

export const SERIES = ["#3f7ee8", "#e8823f", "#2a9d63", "#c2558f", "#8a6fd1", "#b59a1f", "#3ba3b5", "#d1495b"];

// A canvas at the resolution of the screen; gives its context and size in CSS pixels.
export function prepare(canvas, height) {
  const width = Math.max(50, canvas.parentElement.clientWidth);
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  return { context, width, height };
}

export function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.max(1, Math.floor((text.length * width) / (context.measureText(text).width || 1)));
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

// Round numbers of an axis.
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw) ?? raw;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

// The width of a text as an SVG draws it.
const measure = document.createElement("canvas").getContext("2d");
export function textWidth(text, font) {
  measure.font = font;
  return measure.measureText(text).width;
}

// Points along a cubic curve.
export function curvePoints(one, bend1, bend2, two, count = 24) {
  return Array.from({ length: count + 1 }, (_, i) => {
    const t = i / count;
    const [a, b, c, d] = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
    return [a * one[0] + b * bend1[0] + c * bend2[0] + d * two[0], a * one[1] + b * bend1[1] + c * bend2[1] + d * two[1]];
  });
}

const overlap = (one, other) => one.x < other.x + other.w && other.x < one.x + one.w && one.y < other.y + other.h && other.y < one.y + one.h;

export function crosses({ x, y, w, h }, [x1, y1], [x2, y2]) { // Liang and Barsky: the part of the line that is within the box
  let [from, to] = [0, 1];
  for (const [step, room] of [[x1 - x2, x1 - x], [x2 - x1, x + w - x1], [y1 - y2, y1 - y], [y2 - y1, y + h - y1]]) {
    if (step === 0) { if (room < 0) return false; continue; }
    const at = room / step;
    if (step < 0) from = Math.max(from, at); else to = Math.min(to, at);
  }
  return from < to;
}

// What is drawn already; finds room for labels, so that no line runs through them and none lies over another.
export class Drawn {
  constructor(width, height) { this.width = width; this.height = height; this.boxes = []; this.lines = []; }

  box(x, y, w, h) { this.boxes.push({ x, y, w, h }); }

  line(points, width = 1) { this.lines.push({ points, half: width / 2 + 1.5 }); }

  isFree(label) {
    if (label.x < 0 || label.y < 0 || label.x + label.w > this.width || label.y + label.h > this.height) return false;
    if (this.boxes.some((box) => overlap(box, label))) return false;
    return !this.lines.some(({ points, half }) => {
      const wide = { x: label.x - half, y: label.y - half, w: label.w + 2 * half, h: label.h + 2 * half };
      return points.some((point, i) => i > 0 && crosses(wide, points[i - 1], point));
    });
  }

  // The middle of the first of some places at which a label of this size is free, and which is taken then; null if there is none.
  take(places, w, h) {
    for (const [x, y] of places) {
      const label = { x: x - w / 2, y: y - h / 2, w, h };
      if (this.isFree(label)) { this.boxes.push(label); return [x, y]; }
    }
    return null;
  }
}

// Places beside a line for a label of this size, the middle of the line first.
export function beside(points, w, h, width = 1) {
  const places = [];
  const lengths = points.slice(1).map(([x, y], i) => Math.hypot(x - points[i][0], y - points[i][1]));
  const total = lengths.reduce((sum, each) => sum + each, 0);
  for (const share of [0.5, 0.58, 0.42, 0.66, 0.34, 0.74, 0.26, 0.82, 0.18]) {
    let [i, rest] = [0, share * total];
    while (i < lengths.length - 1 && rest > lengths[i]) { rest -= lengths[i]; i += 1; }
    rest /= lengths[i] || 1;
    const [[x1, y1], [x2, y2]] = [points[i], points[i + 1]];
    const [dx, dy] = [x2 - x1, y2 - y1];
    const length = Math.hypot(dx, dy) || 1;
    const [nx, ny] = dx >= 0 ? [dy / length, -dx / length] : [-dy / length, dx / length]; // up, or to the right
    const [x, y] = [x1 + dx * rest, y1 + dy * rest];
    for (const side of [1, -1]) for (const further of [4, 12]) {
      const away = (Math.abs(nx) * w + Math.abs(ny) * h) / 2 + width / 2 + further;
      places.push([x + side * nx * away, y + side * ny * away]);
    }
  }
  return places;
}

// Says beside a box in which directions there is more to see.
export function tellScroll(box, note) {
  const rest = [
    ["←", box.scrollLeft], ["↑", box.scrollTop],
    ["↓", box.scrollHeight - box.clientHeight - box.scrollTop], ["→", box.scrollWidth - box.clientWidth - box.scrollLeft],
  ].filter(([, pixels]) => pixels > 2).map(([arrow]) => arrow);
  note.hidden = !rest.length;
  const text = `scroll for more ${rest.join(" ")}`;
  if (note.textContent !== text) note.textContent = text;
}
