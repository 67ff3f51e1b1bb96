"use strict";
const byId = (id) => document.getElementById(id);
const [leaves, moves] = JSON.parse(byId("data").textContent);
const graph = byId("graph");
const boxes = [...graph.querySelectorAll("svg g > g")];
const lines = [...graph.querySelectorAll("path.a")];
const heads = [...graph.querySelectorAll("path.h")];
const articles = [...byId("said").children];
const slider = byId("slider");
const last = articles.length - 1;
const failed = articles[last].querySelector(".bad") !== null;
const badges = boxes.map((box) => {
  const { x, y, width, height } = box.querySelector("rect").getBBox();
  const badge = document.createElementNS("http://www.w3.org/2000/svg", "text");
  badge.setAttribute("class", "badge");
  badge.setAttribute("x", x + width + 4);
  badge.setAttribute("y", y + height / 2 + 4);
  return box.appendChild(badge);
});
let at = 0;
let playing = 0;

function mark(state) {
  boxes.forEach((box, i) => box.setAttribute("class", [state.get(i) ?? "", leaves.includes(i) ? "leaf" : ""].join(" ").trim()));
}

// Position 0 is before the first step, the last one after the pass.
function show(position) {
  at = Math.max(0, Math.min(last, position));
  const state = new Map([[0, "done"]]);
  const counts = new Map();
  const past = moves.slice(0, at);
  for (const [box, , , arrived] of past) {
    state.set(box, "done");
    for (const [target, ...count] of arrived) {
      counts.set(target, count);
      if (count[0] < count[1]) state.set(target, "waits");
    }
  }
  const now = at > 0 && at <= moves.length ? moves[at - 1] : null;
  const ready = now ? now[2] : at === 0 && moves.length ? [moves[0][0]] : [];
  ready.forEach((box, i) => state.set(box, i ? "ready" : "ready following"));
  if (now) state.set(now[0], failed && at === moves.length ? "run failed" : "run");
  mark(state);
  badges.forEach((badge, i) => {
    const count = counts.get(i);
    badge.textContent = count && count[1] > 1 ? `${count[0]}/${count[1]}` : "";
  });
  const over = new Set([0, ...past.flatMap((move) => move[1])]);
  const flowing = new Set(now ? now[1] : at === 0 ? [0] : []);
  lines.forEach((line, i) => {
    for (const [part, name] of [[line, "a"], [heads[i], "h"]]) part.setAttribute("class", flowing.has(i) ? `${name} run` : over.has(i) ? `${name} done` : name);
  });
  articles.forEach((article, i) => (article.hidden = i !== at));
  slider.value = at;
  slider.setAttribute("aria-valuetext", articles[at].querySelector("h2").textContent);
  for (const id of ["first", "back"]) byId(id).disabled = at === 0;
  for (const id of ["next", "last"]) byId(id).disabled = at === last;
  const seen = now ? boxes[now[0]] : at === 0 ? boxes[0] : null;
  const room = graph.querySelector(".scrolls");
  if (seen) {
    const [inner, outer] = [seen.getBoundingClientRect(), room.getBoundingClientRect()];
    room.scrollTop += inner.top + inner.height / 2 - outer.top - outer.height / 2;
    room.scrollLeft += inner.left + inner.width / 2 - outer.left - outer.width / 2;
  }
}

function stop() {
  clearInterval(playing);
  playing = 0;
  byId("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (playing) return stop();
  if (at === last) show(0);
  byId("play").setAttribute("aria-pressed", "true");
  playing = setInterval(() => (at === last ? stop() : show(at + 1)), 1200);
}

function go(position) {
  stop();
  show(position);
}

const acts = { first: () => go(0), back: () => go(at - 1), next: () => go(at + 1), last: () => go(last), play };
for (const [id, act] of Object.entries(acts)) byId(id).addEventListener("click", act);
slider.addEventListener("input", () => go(Number(slider.value)));
const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", " ": "play" };
document.addEventListener("keydown", (event) => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.closest("button")) return;
  event.preventDefault();
  acts[act]();
});
moves.forEach(([box], i) => {
  boxes[box].dataset.step = i + 1;
  boxes[box].addEventListener("click", () => go(i + 1));
});
stop();
show(0);
