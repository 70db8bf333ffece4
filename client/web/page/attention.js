// Where a model looked: over the tokens of a text, the sentences of a story, a picture, or the frames of a clip.

import { frames } from "./api.js";
import { by, el, replace, scrolling, spaced, visible } from "./dom.js";

const say = (text) => {
  by("status").textContent = text;
};
const WHOLE = 0.001; // a smaller rest comes from rounding
const percent = (share) =>
  0 < share && share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
const shade = (weight) =>
  `color-mix(in oklab, var(--decode) ${(100 * Math.sqrt(weight)).toFixed(0)}%, var(--ground))`;
const LEGEND = [0, 0.1, 0.25, 0.5, 1];

// Rows are target tokens; columns source tokens. Tokens have buttons that show their alternatives.
export function showAlignment(attention, tokens, eosIds, goOn) {
  const sources = attention?.source_tokens ?? [],
    weights = attention?.weights ?? [];
  const labels =
    attention?.target_tokens ??
    tokens.map(
      (token) =>
        token.alternatives.find((one) => one.token_id === token.id)?.text ??
        (token.id === undefined ? "(end)" : `#${token.id}`),
    );
  const heads = sources.map((token) => el("th", { scope: "col" }, el("span", {}, visible(token))));
  const choices = el("div", { id: "choices" });
  const rows = labels.map((label, row) => {
    const before = labels.slice(0, row).join(""),
      token = tokens[row];
    const button = !token?.alternatives.length
      ? el("span", {}, visible(label))
      : el(
          "button",
          {
            type: "button",
            title: "what else the model might have written",
            onclick: () => showAlternatives(choices, { before, label, token, eosIds, goOn }),
          },
          visible(label),
        );
    const head = el("th", { scope: "row" }, button);
    const cells = sources.map((source, column) => {
      const weight = weights[row]?.[column];
      const cell = el("td", {
        className: weight === undefined ? "waits" : "",
        tabIndex: row || column ? -1 : 0,
        role: "gridcell",
        "aria-label":
          weight === undefined ? "not known yet" : `${label} looks at ${source}: ${percent(weight)}`,
      });
      if (weight !== undefined) cell.style.background = shade(weight);
      const mark = (is) => () => {
        head.classList.toggle("is-linked", is);
        heads[column].classList.toggle("is-linked", is);
        say(is ? cell.getAttribute("aria-label") : "");
      };
      for (const name of ["pointerenter", "focus"]) cell.addEventListener(name, mark(true));
      for (const name of ["pointerleave", "blur"]) cell.addEventListener(name, mark(false));
      return cell;
    });
    return el("tr", {}, head, cells);
  });
  const body = el("tbody", {}, rows);
  body.addEventListener("keydown", (event) => move(event, body));
  const table = el(
    "table",
    {
      className: "grid",
      role: attention ? "grid" : "table",
      "aria-label": attention
        ? "attention of each target token over the source tokens"
        : "tokens, each with its alternatives",
    },
    el("thead", {}, el("tr", {}, el("th"), heads)),
    body,
  );
  table.style.setProperty("--columns", sources.length);
  const legend = LEGEND.map((weight) =>
    el("li", {}, el("i", { style: { background: shade(weight) } }), percent(weight)),
  );
  replace(
    by("attention"),
    scrolling("heatmap", table),
    attention && el("ul", { className: "legend", id: "shades" }, el("li", {}, "Share of attention"), legend),
    choices,
  );
}

// Arrow keys move through the cells, of which one can be reached by Tab.
function move(event, body) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step || event.target.tagName !== "TD") return;
  event.preventDefault();
  const row = event.target.parentElement;
  const next = body.rows[row.sectionRowIndex + step[0]]?.cells[event.target.cellIndex + step[1]];
  if (next?.tagName !== "TD") return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function showAlternatives(place, { before, label, token, eosIds, goOn }) {
  const most = Math.exp(token.alternatives[0].log_probability);
  const items = token.alternatives.map((one) => {
    const share = Math.exp(one.log_probability);
    const bar = el("span", { className: "share", style: { width: `${(100 * share) / most}%` } });
    return el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          onclick: () => goOn(token, one, (before + one.text).trim()),
          // The chosen one is there already, and nothing follows an end.
          disabled: one.token_id === token.id || eosIds.includes(one.token_id),
        },
        el("span", {}, spaced(one.text)),
        bar,
        el("span", {}, percent(share)),
      ),
    );
  });
  const opener = document.activeElement;
  const close = (event) => {
    if (event.key !== "Escape") return;
    replace(place);
    opener.focus();
  };
  replace(
    place,
    el(
      "div",
      {
        className: "alternatives",
        role: "group",
        "aria-label": `alternatives to ${label}`,
        onkeydown: close,
      },
      el("p", { className: "hint" }, `In place of “${visible(label)}”: choose one to go on from it.`),
      el("ol", {}, items),
    ),
  );
  (place.querySelector("button:not(:disabled)") ?? place).focus();
}

// The weights of a story's sentences for the answer, a column for each hop.
export function showHops(best) {
  const answers = (best.alternatives[0]?.tokens ?? []).map((one) => {
    const share = Math.exp(one.log_probability);
    const bar = el("span", { className: "share", style: { width: `${100 * share}%` } });
    return el("li", {}, el("span", {}, one.text), bar, el("span", {}, percent(share)));
  });
  const top = el(
    "div",
    { className: "alternatives" },
    el("p", { className: "hint" }, "The most probable answers"),
    el("ol", {}, answers),
  );
  if (!best.attention) {
    replace(by("attention"), top);
    return;
  }
  const { hops = [best.attention.weights], source_tokens: sentences } = best.attention;
  const columns = hops.map(([weights]) => {
    const rest = 1 - weights.reduce((sum, weight) => sum + weight, 0);
    return rest > WHOLE ? [...weights, rest] : weights;
  });
  const labels = columns.some((weights) => weights.length > sentences.length)
    ? [...sentences, "(no sentence)"]
    : sentences;
  const rows = labels.map((label, row) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      columns.map((weights) => {
        const weight = weights[row] ?? 0;
        const background = `color-mix(in oklab, var(--decode) ${(55 * weight).toFixed(0)}%, var(--ground))`;
        return el("td", { style: { background } }, percent(weight));
      }),
    ),
  );
  const heads = columns.map((_, hop) => el("th", { scope: "col" }, `hop ${hop + 1}`));
  const table = el(
    "table",
    { className: "grid hops", "aria-label": "attention of each hop over the sentences" },
    el("thead", {}, el("tr", {}, el("th"), heads)),
    el("tbody", {}, rows),
  );
  replace(by("attention"), scrolling("", table), top);
}

// A picture or a film strip for each word, bright where the model looked.
export async function showLooks(best, form, file, isShown) {
  const ended = best.finish_reason === "FINISH_REASON_EOS" ? 1 : 0;
  const { target_tokens: labels, weights } = best.attention;
  const words = labels.slice(0, labels.length - ended);
  const isClip = form === "clip";
  replace(by("attention"));
  let draw;
  if (isClip) {
    const { frames: pictures } = await frames(file);
    draw = (row) =>
      scrolling(
        "film",
        pictures.map((src, place) =>
          el("img", {
            src,
            alt: `frame ${place + 1}: ${percent(row[place] ?? 0)}`,
            style: { opacity: 0.12 + (0.88 * (row[place] ?? 0)) / Math.max(...row) },
          }),
        ),
      );
  } else {
    const picture = await createImageBitmap(file);
    draw = (row) => lookAt(picture, row);
  }
  if (!isShown()) return;
  replace(
    by("attention"),
    el("p", { className: "hint" }, "Once for each token of the answer: bright where the model looked."),
    el(
      "div",
      { className: isClip ? "looks clip" : "looks" },
      words.map((word, place) => el("figure", {}, draw(weights[place]), el("figcaption", {}, visible(word)))),
    ),
  );
}

function lookAt(picture, row) {
  const size = Math.floor(Math.sqrt(row.length)),
    places = row.slice(row.length - size * size),
    most = Math.max(...places);
  const mask = new ImageData(size, size);
  places.forEach((weight, place) => {
    mask.data[4 * place + 3] = 200 * (1 - weight / most);
  });
  const small = el("canvas", { width: size, height: size });
  small.getContext("2d").putImageData(mask, 0, 0);
  const canvas = el("canvas", {
    width: 320,
    height: Math.round((320 * picture.height) / picture.width),
    role: "img",
    "aria-label": "the picture, bright where the model looked",
  });
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  return canvas;
}

export function showSegments(segments) {
  const clock = (seconds) => `${Math.floor(seconds / 60)}:${(seconds % 60).toFixed(2).padStart(5, "0")}`;
  replace(
    by("attention"),
    el(
      "table",
      { className: "segments" },
      el(
        "tbody",
        {},
        segments.map((one) =>
          el(
            "tr",
            {},
            el("td", {}, `${clock(one.begin_seconds)} – ${clock(one.end_seconds)}`),
            el("td", {}, one.text.trim()),
          ),
        ),
      ),
    ),
  );
}
