// What a program does with OpenAI's client for JavaScript: run with the URL of a server, a sound, and the name of a
// call. Prints JSON.
import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [url, path, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
const buffer = () => toFile(fs.readFileSync(path), "speech.wav");
const create = async (options) =>
  client.audio.transcriptions.create({ model: "whisper-1", language: "ko", file: await buffer(), ...options });

const calls = {
  text: () => create({}),
  words: () => create({ response_format: "verbose_json", timestamp_granularities: ["word", "segment"] }),
  logprobs: () => create({ include: ["logprobs"] }),
  vad: () => create({ chunking_strategy: { type: "server_vad", threshold: 0.4, silence_duration_ms: 300 } }),
  subtitles: () => create({ response_format: "srt" }),
  stream: async () => {
    const events = [];
    for await (const event of await create({ stream: true })) events.push(event);
    return events;
  },
  error: () => create({ language: "fr" }).catch(({ status, param, error }) => ({ status, param, error })),
  models: async () => (await client.models.list()).data,
  read_stream: () => create({ file: fs.createReadStream(path) }),
};
process.stdout.write(JSON.stringify(await calls[name]()));
