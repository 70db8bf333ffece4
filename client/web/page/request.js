// The inputs of a model, and the options of a request.

import { base64 } from "./api.js";
import { by, el, replace } from "./dom.js";
import { LABELS } from "./labels.js";

const EXAMPLES = {
  text: "오늘은 금요일 입니다",
  question: "Where is the apple?",
  sentences:
    "Sam walks into the kitchen. Sam picks up an apple. Sam walks into the bedroom. Sam drops the apple.",
};
const FILES = {
  picture: "image/png,image/jpeg,image/webp,image/gif",
  clip: "image/png,image/webp,image/gif",
  sound: "audio/wav,audio/flac,.wav,.flac",
  features: ".npy",
};

export function showInputs(model) {
  const names = Object.keys(model.sources).sort(
    (a, b) => (model.sources[b] === "sentences") - (model.sources[a] === "sentences"),
  );
  replace(
    by("inputs"),
    names.map((name) => {
      const form = model.sources[name],
        id = `source-${name}`;
      const label =
        names.length > 1
          ? name[0].toUpperCase() + name.slice(1)
          : ({ text: "Text", picture: "Picture", clip: "Clip", sound: "Sound", features: "Features (.npy)" }[
              form
            ] ?? name);
      if (form in FILES) return fileInput(id, label, form);
      const isLine = names.length > 1 && form === "text";
      const box = el(isLine ? "input" : "textarea", {
        id,
        name,
        required: true,
        spellcheck: false,
        value: isLine ? EXAMPLES.question : EXAMPLES[form],
      });
      return el("div", {}, el("label", { htmlFor: id }, label), box);
    }),
  );
}

function fileInput(id, label, form) {
  const preview = el(form === "sound" ? "audio" : "img", {
    className: "preview",
    hidden: true,
    alt: "the chosen file",
    controls: true,
  });
  const input = el("input", {
    id,
    type: "file",
    accept: FILES[form],
    required: true,
    onchange: () => {
      if (preview.src) URL.revokeObjectURL(preview.src);
      preview.hidden = form === "features" || !input.files.length;
      if (!preview.hidden) preview.src = URL.createObjectURL(input.files[0]);
    },
  });
  return el("div", {}, el("label", { htmlFor: id }, label), input, preview);
}

export async function readSources(model) {
  const entries = Object.entries(model.sources).map(async ([name, form]) => {
    const input = by(`source-${name}`);
    if (!(form in FILES)) return [name, { text: input.value }];
    if (!input.files.length) throw new Error("choose a file first");
    return [name, { file: await base64(input.files[0]), form }];
  });
  return Object.fromEntries(await Promise.all(entries));
}

export const chosenFile = (model) => by(`source-${Object.keys(model.sources)[0]}`).files?.[0];

// Each field: its option, its label, an input, and when it applies.
export function showFields(model) {
  const number = (name, value, settings = {}) =>
    field(name, LABELS[name], el("input", { type: "number", value, ...settings }));
  const fields = [];
  if (model.command !== "answer") {
    const search = el(
      "select",
      {},
      ["greedy", "beam search", "sampling"].map((one) => el("option", {}, one)),
    );
    search.addEventListener("change", () => {
      by("fields").dataset.search = search.value;
      apply();
    });
    fields.push(
      field("search", "Search", search),
      number("beam_size", 4, { min: 2, max: 16 }),
      number("length_penalty", 0.6, { step: "any" }),
      number("temperature", 1, { min: 0.01, step: "any" }),
      number("top_k", "", { min: 1 }),
      number("seed", 1, { min: 0 }),
      number("num_hypotheses", 1, { min: 1, max: 16 }),
      number("max_new_tokens", "", { min: 1 }),
    );
  }
  for (const [name, choice] of Object.entries(model.choices)) {
    const options = ["", ...choice.names].map((one) =>
      el("option", { value: one }, one || `(${choice.default || "detected"})`),
    );
    fields.push(field(name, name.replace("_", " "), el("select", {}, options)));
  }
  if (model.command === "translate") {
    const ways = {
      split_always: "one by one",
      split: "line by line",
      refuse: "as one text",
      truncate: "as one text, cut if too long",
    };
    const options = Object.entries(ways).map(([value, label]) => el("option", { value }, label));
    const select = el("select", {}, options);
    select.value = model.splits_sentences ? "split_always" : "refuse";
    fields.push(field("long_source", LABELS.long_source, select));
  }
  if (model.command === "transcribe")
    fields.push(field("timestamps", LABELS.timestamps, el("input", { type: "checkbox" })));
  replace(by("fields"), fields);
  by("fields").dataset.search = "greedy";
  by("options").hidden = !fields.length;
  apply();
}

function field(name, label, input) {
  input.id = `option-${name}`;
  return el("div", { id: `field-${name}` }, el("label", { htmlFor: input.id }, label), input);
}

export const countSentences = (text) =>
  [...new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text)].filter(({ segment }) =>
    /[\p{L}\p{N}]/u.test(segment),
  ).length;

const APPLIES = {
  beam_size: "beam search",
  length_penalty: "beam search",
  temperature: "sampling",
  top_k: "sampling",
  seed: "sampling",
};

function apply() {
  for (const [name, search] of Object.entries(APPLIES)) {
    const element = by(`field-${name}`);
    if (element) element.hidden = by("fields").dataset.search !== search;
  }
}

// The same options for another model, as far as it has them, so that the times can be compared.
export function optionsOf(model, options) {
  const others = { ...options };
  if (!model.has_attention) delete others.attention;
  if (!model.has_attention) delete others.word_alignment;
  for (const name of ["source_language", "target_language", "task"])
    if (!model.choices[name]?.names.includes(others[name])) delete others[name];
  return others;
}

export function readOptions(model) {
  const options = {};
  for (const element of by("fields").children) {
    const name = element.id.replace("field-", ""),
      input = by(`option-${name}`);
    if (element.hidden || name === "search") continue;
    if (input.type === "checkbox") {
      if (input.checked) options[name] = true;
    } else if (input.value !== "" && !(name === "num_hypotheses" && input.value === "1")) {
      options[name] = input.type === "number" ? Number(input.value) : input.value;
    }
  }
  if (!options.temperature) delete options.seed;
  if (model.command === "transcribe") return { ...options, long_source: "split" };
  if (model.has_attention) options.attention = true;
  if (model.command === "translate" && model.has_attention) options.word_alignment = true;
  return { ...options, num_alternatives: 6 };
}
