// The text of an answer, its other hypotheses, and its times.

import { by, el, milliseconds, replace } from "./dom.js";
import { LABELS, unitOf } from "./labels.js";

const EMPTY = "(empty)";
const ENDS = {
  FINISH_REASON_LENGTH: "It ended at its length limit.",
  FINISH_REASON_STOP: "It ended at a stop sequence.",
};

// Words of source and target that belong together are marked while one of them has the pointer or the focus.
export function showText(text, isDecoding, words = null, end = "") {
  if (!words) {
    replace(
      by("answer"),
      el("p", { className: "text" }, text, isDecoding ? el("span", { className: "caret" }) : null),
      note(end),
    );
    return;
  }
  const make = (word) => el("span", { className: "word", tabIndex: 0, role: "listitem" }, word);
  const sources = words.source_words.map(make),
    targets = words.target_words.map(make);
  const join = (element, others) => {
    const mark = (is) => () => [element, ...others].forEach((one) => one.classList.toggle("is-linked", is));
    for (const name of ["pointerenter", "focus"]) element.addEventListener(name, mark(true));
    for (const name of ["pointerleave", "blur"]) element.addEventListener(name, mark(false));
  };
  targets.forEach((element, place) => {
    const links = words.links.filter((link) => link.target_word === place);
    element.title = links
      .map((link) => `${words.source_words[link.source_word]}: ${link.weight.toFixed(2)}`)
      .join(", ");
    element.setAttribute("aria-label", `${words.target_words[place]}, from ${element.title || "no word"}`);
    join(
      element,
      links.map((link) => sources[link.source_word]),
    );
  });
  sources.forEach((element, place) => {
    join(
      element,
      words.links.filter((link) => link.source_word === place).map((link) => targets[link.target_word]),
    );
  });
  const line = (elements) => elements.flatMap((element) => [element, " "]);
  replace(
    by("answer"),
    el("p", { className: "text", id: "target-words", role: "list" }, line(targets)),
    el("p", { className: "text source", id: "source-words", role: "list" }, line(sources)),
    note(end),
  );
}

// Of speech: segments that are complete, and the present one, of which the end may still change.
export function showLive({ finished, stable, unstable, lag }) {
  const said = [...finished, stable.join("").trimStart()].filter(Boolean).join(" ");
  replace(
    by("answer"),
    el(
      "p",
      { className: "text", id: "live" },
      el("span", {}, said),
      el("span", { className: "unstable" }, said ? unstable : unstable.trimStart()),
    ),
    el("p", { className: "hint", id: "lag" }, lag === null ? "" : `${lag.toFixed(1)} s behind the speaker`),
  );
}

const note = (end) => (ENDS[end] ? el("p", { className: "hint" }, ENDS[end]) : null);

export function showHypotheses(hypotheses, shown, choose) {
  const list = by("hypotheses");
  list.hidden = hypotheses.length < 2;
  replace(
    list,
    hypotheses.map((one, place) =>
      el(
        "li",
        {},
        el(
          "button",
          { type: "button", "aria-pressed": String(place === shown), onclick: () => choose(place) },
          one.text || EMPTY,
          el("span", { className: "score" }, one.score?.toFixed(3) ?? ""),
        ),
      ),
    ),
  );
}

// Of a text that was split: the whole target and the whole source, with their paragraphs. A sentence that is
// chosen, or has the pointer or the focus, is marked in both. The chosen one has its hypothesis `shown`.
export function showSentences({ sentences, hypotheses }, source, noun, chosen, shown, choose) {
  const targets = spans(
    hypotheses[0].text,
    sentences.map((one) => one.hypotheses[0].text),
  );
  targets.elements[chosen].textContent = sentences[chosen].hypotheses[shown].text || EMPTY;
  const sources = spans(
    source,
    sentences.map((one) => one.source_text),
  );
  for (const elements of [targets.elements, sources.elements])
    elements.forEach((element, place) => {
      const both = [targets.elements[place], sources.elements[place]];
      const mark = (is) => () =>
        both.forEach((one) => one.classList.toggle("is-linked", is || place === chosen));
      for (const name of ["pointerenter", "focus"]) element.addEventListener(name, mark(true));
      for (const name of ["pointerleave", "blur"]) element.addEventListener(name, mark(false));
      const take = () => {
        choose(place);
        by(element.parentElement.id).querySelectorAll(".sentence")[place].focus();
      };
      element.addEventListener("click", take);
      element.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        take();
      });
      mark(false)();
    });
  const hint = `${sentences.length} ${noun}, each decoded by itself (Options: “${LABELS.long_source}”).`;
  replace(
    by("answer"),
    el("p", { className: "text", id: "target-sentences" }, targets.nodes),
    el("p", { className: "text source", id: "source-sentences" }, sources.nodes),
    el("p", { className: "hint" }, hint),
  );
}

// The parts of a text as buttons, and the nodes of the whole text, with what is between the parts.
function spans(text, parts) {
  const elements = parts.map((part) =>
      el("span", { className: "sentence", role: "button", tabIndex: 0 }, part || EMPTY),
    ),
    nodes = [];
  let end = 0;
  parts.forEach((part, place) => {
    const start = text.indexOf(part, end);
    if (start > end) nodes.push(text.slice(end, start));
    if (start >= end) end = start + part.length;
    nodes.push(elements[place]);
  });
  return { elements, nodes: [...nodes, text.slice(end)] };
}

// Of a text that was not split.
export function warnOfSentences(number, split) {
  by("answer").append(
    el(
      "p",
      { className: "hint", id: "warning" },
      `${number} sentences, decoded as one text. A model of single sentences leaves some out. `,
      el("button", { type: "button", onclick: split }, "One by one"),
    ),
  );
}

export function warnOfUnknownWords(words) {
  const text = `The model does not know ${words.join(", ")}: an answer about these is a guess.`;
  by("answer").append(el("p", { className: "hint", id: "unknown" }, text));
}

export function showTimings(place, model, result, seconds) {
  const {
    queue_seconds: queue,
    encode_seconds: encode,
    first_token_seconds: first,
    total_seconds: total,
  } = result.timings;
  const decode = Math.max(0, total - queue - encode),
    tokens = result.usage.target_tokens,
    number = (result.sentences[0] ?? result).hypotheses.length;
  const parts = [
    ["queue", queue],
    ["encode", encode],
    ["decode", decode],
  ];
  const bar = el(
    "div",
    {
      className: "bar",
      role: "img",
      "aria-label": parts.map(([name, time]) => `${name} ${milliseconds(time)}`).join(", "),
    },
    parts.map(([name, time]) => el("div", { className: name, style: { width: `${(100 * time) / total}%` } })),
  );
  const item = (text, name) =>
    el("li", {}, name ? el("i", { className: name, style: { background: `var(--${name})` } }) : null, text);
  replace(
    place,
    bar,
    el(
      "ul",
      { className: "legend" },
      parts.map(([name, time]) => item(`${name} ${milliseconds(time)}`, name)),
      item(`first token ${milliseconds(first)}`),
      item(`total ${milliseconds(total)}`),
      item(`${result.usage.source_tokens} ${unitOf(model)}`),
      item(`${tokens} target tokens${number > 1 ? ` in ${number} answers` : ""}`),
      item(`${(tokens / total).toFixed(0)} tokens/s`),
      item(`seen by this page ${milliseconds(seconds)}`),
    ),
  );
}
