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

// A colour for each operation: forward lighter, backward deeper, of one hue.
const hues = new Map();
export function operationColour(operation, isBackward) {
  const key = operation + (isBackward ? "<" : ">");
  let found = hues.get(key);
  if (!found) {
    let hash = 2166136261;
    for (const character of operation) hash = Math.imul(hash ^ character.codePointAt(0), 16777619) >>> 0;
    const hue = (210 + (hash % 16) * 22.5) % 360;
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
