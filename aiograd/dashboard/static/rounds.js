// Local steps: of each worker that directs a training its figures, and its last rounds, from the scalars that every round logs.
import { at, bytes, count, make, number } from "/dashboard/draw.js";

const PREFIX = "local_steps/";
const MOST_ROUNDS = 10;
const grown = (name) => ({ now, before }) => Math.max(0, (now[name] ?? 0) - (before?.[name] ?? 0));
const busy = (computing, waiting) => (computing + waiting > 0 ? `${Math.round((100 * computing) / (computing + waiting))} %` : "–");
// of a round, from the figures after it and after the round before
const COLUMNS = [
  ["round", ({ step }) => count(step)],
  ["loss", ({ now }) => number(now.loss)],
  ["members", ({ now }) => count(now.members)],
  ["late", (pair) => count(grown("late")(pair))],
  ["lost", (pair) => count(grown("lost")(pair))],
  ["sent", (pair) => bytes(grown("bytes_sent")(pair))],
  ["received", (pair) => bytes(grown("bytes_received")(pair))],
  ["computing", (pair) => busy(grown("seconds_computing")(pair), grown("seconds_waiting")(pair))],
];

// True if the panel of rounds shows a scalar; its loss has a chart as well.
export const isOfRounds = (name) => name.startsWith(PREFIX) && name !== `${PREFIX}loss`;

export class Rounds {
  constructor() { this.trainings = new Map(); }

  take(data) {
    const changed = new Set();
    for (const [worker, name, step, value] of data.scalars) {
      if (!name.startsWith(PREFIX)) continue;
      const training = this.training(worker);
      const key = name.slice(PREFIX.length);
      if (key === "loss") for (const other of training.rounds.keys()) if (other >= step) training.rounds.delete(other); // gone back to a checkpoint
      if (!training.rounds.has(step)) training.rounds.set(step, {});
      training.rounds.get(step)[key] = value;
      while (training.rounds.size > MOST_ROUNDS + 1) training.rounds.delete(training.rounds.keys().next().value);
      changed.add(training);
    }
    for (const training of changed) this.tell(training);
    at("rounds").hidden = !this.trainings.size;
  }

  draw() {}

  training(worker) {
    if (!this.trainings.has(worker)) {
      const [facts, rows] = [make("ul", { class: "facts" }), make("tbody")];
      const head = make("thead", {}, make("tr", {}, ...COLUMNS.map(([column]) => make("th", { scope: "col" }, column))));
      const table = make("div", { class: "table-box rounds" }, make("table", {}, head, rows));
      at("rounds-trainings").append(make("article", { class: "server" }, make("h3", {}, worker), facts, table));
      this.trainings.set(worker, { facts, rows, rounds: new Map() });
      at("rounds-hint").textContent = this.trainings.size === 1 ? "" : `${this.trainings.size} trainings`;
    }
    return this.trainings.get(worker);
  }

  tell({ facts, rows, rounds }) {
    const pairs = [...rounds].map(([step, now]) => ({ step, now, before: rounds.get(step - 1) }));
    const { now } = pairs[pairs.length - 1];
    const shown = [
      ["rounds", count(now.rounds ?? 0)], ["members", count(now.members ?? 0)], ["late", count(now.late ?? 0)], ["lost", count(now.lost ?? 0), now.lost > 0],
      ["sent", bytes(now.bytes_sent ?? 0)], ["received", bytes(now.bytes_received ?? 0)],
      ["computing", `${busy(now.seconds_computing ?? 0, now.seconds_waiting ?? 0)} of the time`],
    ];
    facts.replaceChildren(...shown.map(([name, value, isBad]) => make("li", isBad ? { class: "bad" } : {}, `${name} `, make("b", {}, value))));
    const known = pairs.filter(({ step, before }) => before || step === 1 || pairs.length === 1).slice(-MOST_ROUNDS).reverse();
    rows.replaceChildren(...known.map((pair) => make("tr", {}, ...COLUMNS.map(([, text]) => make("td", {}, text(pair))))));
  }
}
