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

export function watchServer(modelName) {
  const history = [];
  let before = null,
    name = "";
  const look = async () => {
    if (document.visibilityState === "hidden") return;
    try {
      const now = read((await metrics()).samples, modelName());
      if (name !== modelName()) {
        history.length = 0;
        before = null;
        name = modelName();
      }
      if (before && now.requests >= before.requests) history.push(difference(before, now)); // not after a restart
      if (history.length > MOST) history.shift();
      before = now;
      draw(now, history);
    } catch (error) {
      replace(by("latency"), el("p", { className: "hint" }, error.message));
    }
  };
  look();
  setInterval(look, 1000 * SECONDS);
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
      return [name, { p50: quantile(counts, 0.5), p99: quantile(counts, 0.99) }];
    }),
  );
  return {
    requests: (now.requests - before.requests) / seconds,
    tokens: (now.tokens - before.tokens) / seconds,
    latencies,
  };
}

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

function draw(now, history) {
  const last = history.at(-1);
  const tile = (value, label) => el("div", { className: "tile" }, el("b", {}, value), el("span", {}, label));
  const rate = (value) => (value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
  const tiles = el(
    "div",
    { className: "tiles" },
    tile(rate(last?.requests), "requests/s"),
    tile(rate(last?.tokens), "target tokens/s"),
    tile(now.sum("seq2seq_num_requests_running"), "running"),
    tile(now.sum("seq2seq_num_requests_waiting"), "waiting"),
    tile(`${now.sum("seq2seq_slots_in_use")} / ${now.sum("seq2seq_slots")}`, "slots in use"),
  );
  const rows = HISTOGRAMS.map(([name, label]) => {
    // The newest interval in which there were samples
    const shown = history.findLast((one) => !Number.isNaN(one.latencies[name].p50))?.latencies[name];
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
  replace(
    by("latency"),
    tiles,
    el("table", { className: "latencies" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
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
