// Asks for what is new, twice a second while the page is visible, and hands it to the panels.
import { ago, at, bytes, make, whenThemeChanges } from "/dashboard/draw.js";
import { Cluster } from "/dashboard/cluster.js";
import { Graph } from "/dashboard/graph.js";
import { Rounds } from "/dashboard/rounds.js";
import { Serving } from "/dashboard/serving.js";
import { Stream } from "/dashboard/stream.js";
import { Pipeline, Training } from "/dashboard/training.js";
import { Waits } from "/dashboard/waits.js";

const panels = { stream: new Stream(), cluster: new Cluster(), graph: new Graph(), waits: new Waits(), training: new Training(), rounds: new Rounds(), serving: new Serving(), pipeline: new Pipeline() };
const INTERVAL = 500;
const cursors = { after: 0, scalars: 0, graph: 0, pipeline: 0, serving: 0 };
let failures = 0;
let committed = null;

function connection(text, kind) {
  at("connection").textContent = text;
  at("connection").className = kind;
}

function summary(data) {
  const running = data.workers.filter((worker) => worker.state === "running").length;
  const driver = data.workers.find((worker) => worker.name === data.here) ?? {};
  const moved = data.links.filter((link) => link[0] === data.here).reduce((sum, link) => sum + link[3] + link[4], 0);
  let rate = 0;
  if (committed && data.now > committed.now) rate = ((driver.committed ?? 0) - committed.count) / ((data.now - committed.now) / 1e6);
  committed = { now: data.now, count: driver.committed ?? 0, rate: committed ? 0.7 * (committed.rate ?? 0) + 0.3 * rate : rate };
  const facts = [
    ["workers", `${running} of ${data.workers.length}`], ["passes/s", Math.max(0, committed.rate).toFixed(1)],
    ["committed", String(driver.committed ?? 0)], ["aborted", String(driver.aborted ?? 0)], ["traffic", `${bytes(moved)}/s`],
  ];
  at("summary").replaceChildren(...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, value))));
  at("here").textContent = data.here;
  document.title = running < data.workers.length ? `(${data.workers.length - running} down) aiograd` : "aiograd";
}

async function ask() {
  const query = Object.entries(cursors).map(([name, value]) => `${name}=${value}`).join("&");
  const answer = await fetch(`/dashboard/data?${query}`, { credentials: "same-origin" });
  if (answer.status === 401) { connection("locked: open the URL with the token again", "gone"); return; }
  if (answer.status === 429) return;
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const data = await answer.json();
  if (data.cursor < cursors.after || data.scalar_cursor < cursors.scalars || data.serving_cursor < cursors.serving) { location.reload(); return; }
  cursors.after = data.cursor;
  cursors.scalars = data.scalar_cursor;
  cursors.serving = data.serving_cursor;
  if (data.graph) cursors.graph = data.graph.version ?? 0;
  if (data.pipeline) cursors.pipeline = data.pipeline.version ?? 0;
  failures = 0;
  connection("live", "live");
  summary(data);
  for (const panel of Object.values(panels)) panel.take(data);
}

let lastSeen = Date.now();
async function loop() {
  if (document.visibilityState === "visible") {
    try {
      await ask();
      lastSeen = Date.now();
    } catch {
      failures += 1;
      connection(`no answer for ${ago((Date.now() - lastSeen) / 1000)}`, "gone");
    }
  }
  setTimeout(loop, failures ? Math.min(5000, INTERVAL * 2 ** failures) : INTERVAL);
}

whenThemeChanges(() => { for (const panel of Object.values(panels)) panel.draw(); });
addEventListener("resize", () => { for (const panel of Object.values(panels)) panel.draw(); });
connection("connecting", "");
loop();
