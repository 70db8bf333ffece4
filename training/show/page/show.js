// The page of runs: their curves in one picture each, and beside each other what they write at a step.

const SECONDS = 5;
const CHARTS = [
  { title: "Loss, nats a token", curves: { "train loss": "training", "dev loss": "dev" }, low: 0 },
  {
    title: "Dev score",
    curves: {
      "dev bleu": "BLEU",
      "dev chrf": "chrF",
      "dev accuracy": "accuracy in %",
      "dev wer": "WER in %",
      "dev cer": "CER in %",
    },
    low: 0,
  },
  { title: "Learning rate", curves: { "train learning_rate": "" }, low: 0 },
  { title: "Tokens a second", curves: { "train tokens_per_second": "" }, low: 0 },
];
const HEIGHT = 230,
  EDGE = { left: 52, right: 10, top: 8, bottom: 24 };
const DASHES = ["", "6 4", "2 3"];

const by = (id) => document.getElementById(id);
const state = { runs: [], sample: 0, step: Infinity };

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const short = (value) =>
  value && Math.abs(value) < 0.01
    ? Number(value.toPrecision(2)).toExponential()
    : Number(value.toPrecision(3)).toLocaleString("en");

function clock(seconds) {
  const minutes = Math.round(seconds / 60);
  return minutes < 60
    ? `${minutes} min`
    : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// Round numbers from 0 to about `most`, at most five.
function ticks(most) {
  const size = 10 ** Math.floor(Math.log10(most / 4 || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => most / one <= 5);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, place) => place * step);
}

const color = (run) => `run-${run % 4}`;

function showRuns() {
  by("about").textContent = state.runs
    .map((run) =>
      run.result ? `${run.name}: finished` : `${run.name}: step ${run.step} of ${run.max_steps}`,
    )
    .join(" · ");
  by("runs").replaceChildren(
    el(
      "ul",
      { className: "runs" },
      state.runs.map((run, number) =>
        el(
          "li",
          {},
          el("i", { className: color(number) }),
          el("b", {}, run.name),
          ` ${run.preset}, step ${run.step.toLocaleString("en")} of ${run.max_steps.toLocaleString("en")}, ${clock(run.seconds)}`,
          el(
            "span",
            { className: "hint" },
            [run.result, run.parent && `from ${run.parent}`, run.corpus].filter(Boolean).join(" · "),
          ),
        ),
      ),
    ),
  );
}

function chart({ title, curves }) {
  const WIDTH = innerWidth < 700 ? 340 : 560; // so that the numbers at its edges are as large as other texts
  const lines = state.runs
    .flatMap((run, number) =>
      Object.entries(curves).map(([name, label], kind) => ({
        points: run.curves[name],
        label,
        kind,
        number,
        run,
      })),
    )
    .filter(({ points }) => points.length);
  if (!lines.length) return null;
  const all = lines.flatMap(({ points }) => points);
  const right = Math.max(...all.map(([step]) => step), 1);
  // The first losses are far above all others.
  const sorted = all.map(([, value]) => value).sort((a, b) => a - b);
  const top = Math.max(sorted[Math.floor(0.99 * (sorted.length - 1))] * 1.08, 1e-9);
  const x = (step) => EDGE.left + ((WIDTH - EDGE.left - EDGE.right) * step) / right;
  const y = (value) =>
    HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * Math.min(value, top)) / top;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const value of ticks(top)) {
    picture.append(
      svg("line", { class: "rule", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    );
  }
  for (const value of ticks(right).slice(1))
    picture.append(
      svg("text", { class: "tick", x: x(value), y: HEIGHT - 7, "text-anchor": "middle" }, short(value)),
    );
  for (const { points, kind, number } of lines) {
    const path = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const shown =
      points.length > 1
        ? svg("polyline", { points: path })
        : svg("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3 });
    shown.setAttribute("class", color(number));
    shown.setAttribute("stroke-dasharray", DASHES[kind % DASHES.length]);
    picture.append(shown);
  }
  const kinds = Object.values(curves).filter(
    (label, kind) => label && lines.some((line) => line.kind === kind),
  );
  const legend = el(
    "ul",
    { className: "legend" },
    lines
      .filter(({ label }) => label || state.runs.length > 1)
      .map(({ run, label, kind, number, points }) =>
        el(
          "li",
          {},
          mark(number, kind),
          [state.runs.length > 1 && run.name, label].filter(Boolean).join(", "),
          el("span", { className: "value" }, ` ${short(points.at(-1)[1])}`),
        ),
      ),
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, title),
    picture,
    kinds.length || state.runs.length > 1 ? legend : null,
  );
}

function mark(number, kind) {
  const line = svg("line", {
    class: color(number),
    x1: 0,
    x2: 22,
    y1: 5,
    y2: 5,
    "stroke-dasharray": DASHES[kind],
  });
  return svg("svg", { class: "mark", viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
}

// All steps at which a run wrote samples, in order.
const steps = () =>
  [...new Set(state.runs.flatMap((run) => run.samples.map((line) => line.step)))].sort((a, b) => a - b);

function showSamples() {
  const known = steps(),
    slider = by("step");
  document.querySelector(".controls").hidden = by("pair").hidden = !known.length;
  if (!known.length) {
    by("samples").replaceChildren(
      el("p", { className: "hint" }, "No samples yet: a run records them with each checkpoint."),
    );
    return;
  }
  slider.max = known.length - 1;
  const place =
    state.step === Infinity
      ? known.length - 1
      : Math.max(
          known.findLastIndex((step) => step <= state.step),
          0,
        );
  slider.value = place;
  by("at").textContent = `step ${known[place].toLocaleString("en")}`;
  const newest = state.runs.map((run) => run.samples.findLast((line) => line.step <= known[place]));
  const first = newest.find(Boolean).samples;
  const chosen = by("sample");
  if (chosen.options.length !== first.length)
    chosen.replaceChildren(...first.map((_, number) => el("option", { value: number }, number + 1)));
  chosen.value = state.sample;
  const { source, reference } = first[state.sample];
  by("pair").replaceChildren(
    el("dt", {}, "Source"),
    el("dd", {}, source),
    el("dt", {}, "Reference"),
    el("dd", {}, reference),
  );
  by("samples").replaceChildren(
    ...state.runs.map((run, number) => {
      const line = newest[number],
        sample = line?.samples[state.sample];
      const head = el(
        "h3",
        {},
        el("i", { className: color(number) }),
        run.name,
        line ? ` · step ${line.step.toLocaleString("en")}` : "",
      );
      if (!sample)
        return el("article", {}, head, el("p", { className: "hint" }, "No samples until this step."));
      const other = sample.source === source ? null : el("p", { className: "hint" }, sample.source);
      return el(
        "article",
        {},
        head,
        other,
        el("p", { className: "text" }, sample.target || "(empty)"),
        heatmap(sample),
      );
    }),
  );
}

const visible = (token) => token.trim() || (token === "" ? "∅" : "␣");

function heatmap({ weights, source_tokens: sources, target_tokens: targets }) {
  if (!weights) return null;
  const head = el(
    "tr",
    {},
    el("th"),
    sources.map((token) => el("th", { scope: "col" }, el("span", {}, visible(token)))),
  );
  const rows = targets.map((token, row) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, visible(token)),
      weights[row].map((weight, column) => {
        const cell = el("td", {
          title: `${token} looks at ${sources[column]}: ${(100 * weight).toFixed(1)} %`,
        });
        cell.style.setProperty("--share", `${(100 * Math.sqrt(weight)).toFixed(0)}%`);
        return cell;
      }),
    ),
  );
  const label = "attention of each target token, a row, over the source tokens";
  return el(
    "div",
    { className: "scroll" },
    el("table", { className: "grid", "aria-label": label }, el("thead", {}, head), el("tbody", {}, rows)),
  );
}

async function look() {
  try {
    const response = await fetch("/api/runs");
    const content = await response.json();
    if (content.error) throw new Error(content.error);
    const text = JSON.stringify(content.runs);
    if (text !== state.text) {
      Object.assign(state, { runs: content.runs, text });
      showRuns();
      by("curves").replaceChildren(...CHARTS.map(chart).filter(Boolean));
      showSamples();
    }
    by("error").hidden = true;
  } catch (error) {
    by("error").textContent = `${error.message}; trying again`;
    by("error").hidden = false;
  }
  setTimeout(look, 1000 * SECONDS);
}

by("sample").addEventListener("change", () => {
  state.sample = Number(by("sample").value);
  showSamples();
});
by("step").addEventListener("input", () => {
  const known = steps(),
    place = Number(by("step").value);
  state.step = place === known.length - 1 ? Infinity : known[place]; // at the end it follows the run
  showSamples();
});
look();
