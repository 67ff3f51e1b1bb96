"use strict";
const byId = (id) => document.getElementById(id);
const [leaves, moves] = JSON.parse(byId("data").textContent);
const room = document.querySelector("#graph .scrolls");
const boxes = [...room.querySelectorAll("svg g > g")];
const lines = [...room.querySelectorAll("path.a")].map((line, i) => [["a", line], ["h", room.querySelectorAll("path.h")[i]]]);
const articles = [...byId("said").children];
const slider = byId("slider");
const last = articles.length - 1;
const failed = articles[last].querySelector(".bad") !== null;
const badges = boxes.map((box) => {
  const { x, y, width, height } = box.querySelector("rect").getBBox();
  const badge = document.createElementNS("http://www.w3.org/2000/svg", "text");
  for (const [name, value] of [["class", "badge"], ["x", x + width + 4], ["y", y + height / 2 + 4]]) badge.setAttribute(name, value);
  return box.parentNode.appendChild(badge);
});
let at = 0;
let playing = 0;

// Position 0 is before the first step, the last one after the pass.
function show(position) {
  at = Math.max(0, Math.min(last, position));
  const past = moves.slice(0, at);
  const [running, flows, ready] = at === 0 ? [-1, [0], moves.slice(0, 1).map(([box]) => box)] : at <= moves.length ? moves[at - 1] : [-1, [], []];
  const state = new Map([[0, "done"]]);
  const counts = new Map();
  for (const [box, , , arrived] of past) {
    state.set(box, "done");
    for (const [target, count, all] of arrived) {
      if (all > 1) counts.set(target, `${count}/${all}`);
      if (count < all) state.set(target, "waits");
    }
  }
  ready.forEach((box, i) => state.set(box, i ? "ready" : "ready following"));
  state.set(running, failed && at === moves.length ? "run failed" : "run");
  boxes.forEach((box, i) => box.setAttribute("class", `${state.get(i) ?? ""} ${leaves.includes(i) ? "leaf" : ""}`));
  badges.forEach((badge, i) => (badge.textContent = counts.get(i) ?? ""));
  const over = new Set([0, ...past.flatMap((move) => move[1])]);
  lines.forEach((parts, i) => {
    for (const [name, part] of parts) part.setAttribute("class", `${name} ${flows.includes(i) ? "run" : over.has(i) ? "done" : ""}`);
  });
  articles.forEach((article, i) => (article.hidden = i !== at));
  slider.value = at;
  slider.setAttribute("aria-valuetext", articles[at].querySelector("h2").textContent);
  for (const id of ["first", "back"]) byId(id).disabled = at === 0;
  for (const id of ["next", "last"]) byId(id).disabled = at === last;
  const [inner, outer] = [(boxes[running] ?? boxes[0]).getBoundingClientRect(), room.getBoundingClientRect()];
  if (at === last) return;
  room.scrollTop += inner.top + inner.height / 2 - outer.top - outer.height / 2;
  room.scrollLeft += inner.left + inner.width / 2 - outer.left - outer.width / 2;
}

function play(starts) {
  clearInterval(playing);
  playing = starts ? setInterval(() => (at === last ? play(false) : show(at + 1)), 1200) : 0;
  byId("play").setAttribute("aria-pressed", String(starts));
  if (starts && at === last) show(0);
}

function go(position) {
  play(false);
  show(position);
}

const acts = { first: () => go(0), back: () => go(at - 1), next: () => go(at + 1), last: () => go(last), play: () => play(!playing) };
const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", " ": "play" };
for (const [id, act] of Object.entries(acts)) byId(id).addEventListener("click", act);
slider.addEventListener("input", () => go(Number(slider.value)));
addEventListener("resize", () => show(at));
document.addEventListener("keydown", (event) => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey || (event.key === " " && event.target.closest("button"))) return;
  event.preventDefault();
  acts[act]();
});
moves.forEach(([box], i) => {
  boxes[box].dataset.step = i + 1;
  boxes[box].addEventListener("click", () => go(i + 1));
});
go(0);
