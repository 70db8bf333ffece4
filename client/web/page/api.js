// What the page asks the web server.

import { LABELS } from "./labels.js";

async function refuse(response) {
  let text = `${response.status} ${response.statusText}`;
  try {
    text = describe((await response.json()).error);
  } catch {
    /* not JSON: the status says enough */
  }
  throw new Error(text);
}

// The server's words, with the page's names of options: “Several sentences” instead of options.long_source.
export function describe(error) {
  const text = error.message.replace(/\b(?:options\.)?([a-z]+(?:_[a-z]+)*)\b/g, (whole, name) =>
    name in LABELS && (name.includes("_") || whole !== name) ? `“${LABELS[name]}”` : whole,
  );
  return `${text[0].toUpperCase()}${text.slice(1)} (${error.code})`;
}

async function json(path, settings) {
  const response = await fetch(path, settings);
  return response.ok ? response.json() : refuse(response);
}

export const models = () => json("/api/models");
export const metrics = () => json("/api/metrics");
export const frames = (file) => json("/api/frames", { method: "POST", body: file });

// Yields the events of a request: `piece`, `alignment`, `result`; raises an error that the server reports.
export async function* generate(request, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/api/generate", {
    method: "POST",
    headers,
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) await refuse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const content = JSON.parse(event.slice("data: ".length));
      if (content.error) throw new Error(describe(content.error));
      yield content;
    }
  }
}

export async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768)
    text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}
