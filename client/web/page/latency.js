// The panel of the server: rates and latencies between two looks at its metrics.

import { metrics } from "./api.js";
import { by, el, milliseconds, replace } from "./dom.js";

const SECONDS = 2,
  MOST = 60;
const HISTOGRAMS = [
  ["seq2seq_time_to_first_token_seconds", "first token"],
  ["seq2seq_inter_token_latency_seconds", "between tokens"],
  ["seq2seq_e2e_request_latency_seconds", "whole request"],
];

// Returns a function that shows the numbers of a model, those that are known at once.
export function watchServer() {
  const known = new Map(); // by the name of a model: its newest numbers, and their history
  let name = "",
    problem = "";
  const show = () => draw(known.get(name), problem);
  const look = async () => {
    if (document.visibilityState === "hidden") return;
    try {
      const { samples } = await metrics();
      for (const model of new Set(samples.map((sample) => sample.labels.model_name))) {
        const now = read(samples, model),
          { now: before, history } = known.get(model) ?? { history: [] };
        if (before && now.requests >= before.requests) history.push(difference(before, now)); // not after a restart
        if (history.length > MOST) history.shift();
        known.set(model, { now, history });
      }
      problem = "";
    } catch (error) {
      problem = error.message;
    }
    show();
  };
  look().then(() => setTimeout(look, 500)); // rates need two looks
  setInterval(look, 1000 * SECONDS);
  return (model) => {
    name = model;
    show();
  };
}

function read(samples, model) {
  const its = samples.filter((sample) => sample.labels.model_name === model);
  const sum = (name) =>
    its.filter((sample) => sample.name === name).reduce((total, sample) => total + sample.value, 0);
  const buckets = (name) => {
    const by = new Map();
    for (const sample of its) {
      if (sample.name === `${name}_bucket`) {
        const bound = Number(sample.labels.le.replace("+Inf", "Infinity"));
        by.set(bound, (by.get(bound) ?? 0) + sample.value);
      }
    }
    return [...by].sort((a, b) => a[0] - b[0]);
  };
  return {
    time: performance.now() / 1000,
    sum,
    requests: sum("seq2seq_e2e_request_latency_seconds_count"),
    tokens: sum("seq2seq_generation_tokens_total"),
    histograms: Object.fromEntries(HISTOGRAMS.map(([name]) => [name, buckets(name)])),
  };
}

function difference(before, now) {
  const seconds = now.time - before.time;
  const latencies = Object.fromEntries(
    HISTOGRAMS.map(([name]) => {
      const counts = now.histograms[name].map(([bound, count], place) => [
        bound,
        count - (before.histograms[name][place]?.[1] ?? 0),
      ]);
      return [name, quantiles(counts)];
    }),
  );
  return {
    requests: (now.requests - before.requests) / seconds,
    tokens: (now.tokens - before.tokens) / seconds,
    latencies,
  };
}

const quantiles = (counts) => ({ p50: quantile(counts, 0.5), p99: quantile(counts, 0.99) });

// Linear between the bounds of a bucket, as Prometheus' histogram_quantile; NaN without samples.
function quantile(counts, share) {
  const total = counts.at(-1)?.[1] ?? 0,
    rank = share * total;
  if (!total) return NaN;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= rank)
      return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (count - below || 1);
    [low, below] = [bound, count];
  }
  return low;
}

function draw({ now, history } = { history: [] }, problem) {
  const last = history.at(-1);
  const tile = (value, label) => el("div", { className: "tile" }, el("b", {}, value), el("span", {}, label));
  const rate = (value) => (value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
  const sum = (name) => now?.sum(name) ?? "–";
  const tiles = el(
    "div",
    { className: "tiles" },
    tile(rate(last?.requests), "requests/s"),
    tile(rate(last?.tokens), "target tokens/s"),
    tile(sum("seq2seq_num_requests_running"), "running"),
    tile(sum("seq2seq_num_requests_waiting"), "waiting"),
    tile(`${sum("seq2seq_slots_in_use")} / ${sum("seq2seq_slots")}`, "slots in use"),
  );
  let isNew = false;
  const rows = HISTOGRAMS.map(([name, label]) => {
    // The newest interval in which there were samples
    const newest = history.findLast((one) => !Number.isNaN(one.latencies[name].p50))?.latencies[name];
    if (newest) isNew = true;
    const shown = newest ?? (now && quantiles(now.histograms[name]));
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      el("td", {}, milliseconds(shown?.p50)),
      el("td", {}, milliseconds(shown?.p99)),
      el("td", {}, line(history.map((one) => one.latencies[name].p50))),
    );
  });
  const head = ["", "p50", "p99", "p50 over two minutes"].map((text) => el("th", { scope: "col" }, text));
  const since = isNew ? "Times of the newest requests." : "Times of all requests since the server's start.";
  replace(
    by("latency"),
    problem && el("p", { className: "hint" }, problem),
    tiles,
    el("table", { className: "latencies" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
    el("p", { className: "hint" }, now?.requests ? since : "No requests yet."),
  );
}

function line(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const most = Math.max(...values.filter((value) => !Number.isNaN(value)), 1e-9);
  const points = values.map((value, place) => [place, value]).filter(([, value]) => !Number.isNaN(value));
  svg.setAttribute("viewBox", `0 0 ${MOST} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  path.setAttribute(
    "points",
    points
      .map(([x, value]) => [x + MOST - values.length, 19 - (17 * value) / most])
      .map(([x, y]) => `${x},${y} ${x + 0.9},${y}`) // so that a single one is seen, too
      .join(" "),
  );
  svg.append(path);
  return svg;
}
