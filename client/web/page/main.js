// The page: which model is asked, what is sent, and what of the answer is shown where.

import * as api from "./api.js";
import { by, el, replace } from "./dom.js";
import {
  chosenFile,
  countSentences,
  optionsOf,
  readOptions,
  readSources,
  showFields,
  showInputs,
} from "./request.js";
import { showAlignment, showHops, showLooks, showSegments } from "./attention.js";
import {
  showHypotheses,
  showLive,
  showSentences,
  showText,
  showTimings,
  warnOfSentences,
  warnOfUnknownWords,
} from "./answer.js";
import { watchServer } from "./latency.js";
import { listen } from "./microphone.js";

// `other` is the model whose answer is shown beside the first one's.
const state = { models: [], model: null, request: null, stopping: null, result: null, prefix: [] };
const NOTHING = { result: null, shown: 0, sentence: 0 };
const VERBS = { translate: "Translate", caption: "Describe", answer: "Answer", transcribe: "Transcribe" };

function choose(name) {
  state.model = state.models.find((model) => model.name === name) ?? state.models[0];
  const { model } = state;
  by("about").textContent =
    `${model.kind}, version ${model.version}, ${model.precision} on ${model.provider}, ` +
    `${model.num_slots} slots, ${model.has_attention ? "with" : "without"} attention`;
  by("go").textContent = VERBS[model.command] ?? "Send";
  by("speak").hidden = model.command !== "transcribe";
  showInputs(model);
  showFields(model);
  showOthers();
  forget();
  state.showServer(model.name);
}

// The models that take the same sources as the chosen one.
function showOthers() {
  const { model } = state;
  const kinds = (one) => JSON.stringify(Object.entries(one.sources).sort());
  const others = state.models.filter((one) => one !== model && kinds(one) === kinds(model));
  replace(
    by("beside"),
    el("option", { value: "" }, "no other"),
    others.map((one) => el("option", { value: one.name }, one.name)),
  );
  by("beside").parentElement.hidden = !others.length;
}

// Names both models over their answers, or hides the place of the other one.
function showOther(other) {
  const title = (model) => `${model.name} (${model.kind}, ${model.precision} on ${model.provider})`;
  by("other").hidden = !other;
  by("answer-title").textContent = other ? title(state.model) : "Answer";
  by("other-name").textContent = other ? title(other) : "";
}

// Asks the other model at the same time, and shows its answer and times.
async function sendToOther(options, signal) {
  const other = state.models.find((one) => one.name === by("beside").value);
  showOther(other);
  if (!other) return;
  const began = performance.now();
  let text = "",
    result = null;
  const request = { ...state.request, model: other.name, options: optionsOf(other, options) };
  replace(by("other-timings"));
  try {
    for await (const event of api.generate(request, signal)) {
      if (event.piece?.hypothesis === 0) text += event.piece.text;
      result = event.result ?? result;
      replace(by("other-answer"), el("p", { className: "text" }, result?.hypotheses[0].text ?? text));
    }
    if (result) showTimings(by("other-timings"), other, result, (performance.now() - began) / 1000);
  } catch (error) {
    if (!signal.aborted) replace(by("other-answer"), el("p", { className: "hint" }, error.message));
  }
}

function forget() {
  state.stopping?.abort();
  Object.assign(state, { ...NOTHING, stopping: null, request: null, prefix: [] });
  replace(by("answer"), el("p", { className: "hint" }, "The answer appears here while it is decoded."));
  replace(by("timings"));
  by("hypotheses").hidden = by("look").hidden = by("prefix").hidden = by("error").hidden = true;
  showOther(null);
  by("stop").disabled = true;
}

async function send(prefix) {
  state.stopping?.abort();
  const stopping = new AbortController();
  Object.assign(state, { ...NOTHING, stopping, prefix });
  by("error").hidden = by("look").hidden = by("hypotheses").hidden = true;
  by("stop").disabled = false;
  replace(by("timings"));
  let text = "",
    alignment = null;
  const began = performance.now();
  const draw = () => {
    showText(text, true);
    if (alignment) {
      by("look").hidden = false;
      showAlignment(alignment, [], [], null);
    }
  };
  try {
    const { model } = state;
    if (!prefix.length) {
      const request = { model: model.name, sources: await readSources(model) };
      if (stopping.signal.aborted) return;
      Object.assign(state, { request, file: chosenFile(model) });
    }
    showPrefix();
    draw();
    const options = readOptions(model);
    if (prefix.length) {
      options.target_prefix = prefix;
      options.long_source = "refuse"; // of a single sentence
    }
    if (prefix.length)
      showOther(null); // token ids are those of one model
    else sendToOther(options, stopping.signal);
    state.splits = options.long_source;
    state.numSentences = model.command === "translate" ? countSentences(sourceText()) : 1;
    const grows =
      model.command === "translate" &&
      Boolean(options.attention) &&
      (state.numSentences === 1 || !state.splits.startsWith("split"));
    for await (const event of api.generate({ ...state.request, options, grows }, stopping.signal)) {
      if (event.piece?.hypothesis === 0) text += event.piece.text;
      if (event.alignment) alignment = event.alignment;
      if (event.result) {
        state.result = event.result;
        break;
      }
      draw();
    }
    if (!state.result) throw new Error("the answer broke off");
    state.seconds = (performance.now() - began) / 1000;
    by("announcement").textContent = state.result.hypotheses[0].text;
    show();
    if (prefix.length) by("prefix").querySelector("button").focus();
  } catch (error) {
    if (!stopping.signal.aborted) fail(error, text);
    else if (state.stopping === stopping) {
      showText(`${text} …`, false);
      by("go").focus();
    }
  } finally {
    if (state.stopping === stopping) by("stop").disabled = true;
  }
}

// Shows what is said while it is said. The button that stops it ends the sound; its last words still come.
async function speak() {
  state.stopping?.abort();
  const stopping = new AbortController();
  Object.assign(state, { ...NOTHING, stopping, request: null, prefix: [] });
  by("error").hidden = by("look").hidden = by("hypotheses").hidden = true;
  by("stop").disabled = false;
  by("speak").disabled = true;
  replace(by("timings"));
  showOther(null);
  const live = { finished: [], stable: [], unstable: "", lag: null };
  const { model } = state;
  showLive(live);
  try {
    const { long_source: _way, timestamps: _times, ...options } = readOptions(model);
    for await (const event of listen({ model: model.name, options }, stopping.signal)) {
      if (state.stopping !== stopping) return;
      if (event.text) {
        live.stable.push(...event.text.stable.map((word) => word.text));
        live.unstable = event.text.unstable;
        if (event.text.stable.length) live.lag = event.text.lag_seconds;
      } else if (event.segment) {
        live.finished.push(event.segment.text.trim());
        live.stable.splice(0, event.segment.words.length);
      } else if (event.result) {
        const [best] = event.result.hypotheses;
        by("announcement").textContent = best.text;
        Object.assign(live, { stable: [], unstable: "", lag: null });
        if (best.segments.length) {
          by("look").hidden = false;
          showSegments(best.segments);
        }
      }
      showLive(live);
    }
  } catch (error) {
    if (state.stopping === stopping) fail(error, [...live.finished, live.stable.join("")].join(" "));
  } finally {
    by("speak").disabled = false;
    if (state.stopping === stopping) by("stop").disabled = true;
  }
}

function fail(error, text = "") {
  replace(by("answer"), text && el("p", { className: "text" }, `${text} …`));
  by("error").textContent = error.message;
  by("error").hidden = false;
}

const sourceText = () => Object.values(state.request.sources)[0].text ?? "";

function show(changes = {}) {
  Object.assign(state, changes);
  const { result, model, shown } = state;
  const isSplit = result.sentences.length > 0 && model.command === "translate";
  const { hypotheses } = isSplit ? result.sentences[state.sentence] : result;
  const best = hypotheses[shown];
  if (isSplit) {
    const noun = state.splits === "split_always" ? "sentences" : "parts";
    const chooseSentence = (sentence) => show({ sentence, shown: 0 });
    showSentences(result, sourceText(), noun, state.sentence, shown, chooseSentence);
  } else {
    showText(best.text, false, best.word_alignment, best.finish_reason);
    if (state.numSentences > 1 && state.splits !== "split_always" && !state.prefix.length)
      warnOfSentences(state.numSentences, () => {
        by("option-long_source").value = "split_always";
        send([]);
      });
  }
  if (result.unknown_words.length) warnOfUnknownWords(result.unknown_words);
  showHypotheses(hypotheses, shown, (place) => show({ shown: place }));
  showTimings(by("timings"), state.model, result, state.seconds);
  by("look").hidden = !(best.attention || best.segments.length || (best.alternatives.length && !isSplit));
  const form = Object.values(model.sources)[0];
  const isShown = () => state.result === result && state.shown === shown;
  if (best.segments.length) showSegments(best.segments);
  else if (model.command === "answer") showHops(best);
  else if (best.attention && (form === "picture" || form === "clip")) {
    showLooks(best, form, state.file, isShown).catch((error) => isShown() && fail(error));
  } else showAlignment(best.attention ?? null, isSplit ? [] : tokensOf(best), model.eos_ids, goOn);
}

// The tokens of a hypothesis, each with its alternatives; the end of sequence is the last one if there was one.
function tokensOf(best) {
  const ended = best.finish_reason === "FINISH_REASON_EOS" ? 1 : 0;
  const first = best.token_ids.length + ended - best.alternatives.length;
  return Array.from({ length: best.token_ids.length + ended }, (_, place) => ({
    alternatives: best.alternatives[place - first]?.tokens ?? [],
    before: best.token_ids.slice(0, place),
    id: best.token_ids[place],
  }));
}

function goOn(token, alternative, text) {
  state.prefixText = text;
  send([...token.before, alternative.token_id]);
}

function showPrefix() {
  by("prefix").hidden = !state.prefix.length;
  const clear = el("button", { type: "button", onclick: () => send([]) }, "without it");
  replace(by("prefix"), `The answer begins with “${state.prefixText}”. Decode it again `, clear);
}

async function begin() {
  try {
    const { models, address, version } = await api.models();
    state.models = models.filter((model) => model.command);
    if (!state.models.length) throw new Error(`the server at ${address} has no model that this page can ask`);
    replace(
      by("model"),
      state.models.map((model) => el("option", { value: model.name }, model.name)),
    );
    by("model").title = `served at ${address}, seq2seq-serve ${version}`;
    state.showServer ??= watchServer();
    choose(state.models[0].name);
    by("error").hidden = true;
    by("go").disabled = false;
  } catch (error) {
    fail(new Error(`${error.message}; trying again`));
    setTimeout(begin, 3000);
  }
}

by("model").addEventListener("change", () => choose(by("model").value));
by("beside").addEventListener("change", () => showOther(null));
by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.model) send([]);
});
by("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (state.model) send([]);
  }
});
by("speak").addEventListener("click", speak);
by("stop").addEventListener("click", () => state.stopping?.abort());
begin();
