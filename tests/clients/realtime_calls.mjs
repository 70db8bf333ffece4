// What a program does with OpenAI's client for JavaScript and a live sound: run with the ports of a server, of itself,
// the files of a certificate for localhost and its key, a file of samples, and the name of a call. Prints JSON.
// The client speaks TLS only, as with a proxy before the server, which this program is itself.
import fs from "node:fs";
import net from "node:net";
import tls from "node:tls";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { OpenAIRealtimeWebSocket } from "openai/realtime/websocket";
import { WebSocket } from "ws";

const [port, certificate, key, path, name] = process.argv.slice(2);
const proxy = tls.createServer({ cert: fs.readFileSync(certificate), key: fs.readFileSync(key) }, (client) => {
  const server = net.connect(Number(port), "127.0.0.1");
  client.pipe(server).pipe(client);
  for (const one of [client, server]) one.on("error", () => {});
});
await new Promise((resolve) => proxy.listen(0, "localhost", resolve));
const client = new OpenAI({ baseURL: `https://localhost:${proxy.address().port}/v1`, apiKey: "any" });
const sound = fs.readFileSync(path);

const transcribe = (realtime, { turnDetection, isNode }) =>
  new Promise((resolve, reject) => {
    const events = [];
    realtime.on("event", (event) => events.push(event));
    realtime.on("error", reject);
    realtime.on("session.created", () =>
      realtime.send({
        type: "session.update",
        session: {
          type: "transcription",
          audio: {
            input: {
              format: { type: "audio/pcm", rate: 24000 },
              transcription: { model: "whisper-1", language: "ko" },
              turn_detection: turnDetection,
            },
          },
        },
      }),
    );
    realtime.on("session.updated", () => {
      for (let first = 0; first < sound.length; first += 4800)
        realtime.send({
          type: "input_audio_buffer.append",
          audio: sound.subarray(first, first + 4800).toString("base64"),
        });
      realtime.send({ type: "input_audio_buffer.commit" });
    });
    realtime.on("conversation.item.input_audio_transcription.completed", () => realtime.close());
    realtime.socket[isNode ? "on" : "addEventListener"]("close", () => resolve(events));
  });

const calls = {
  ws: () =>
    transcribe(new OpenAIRealtimeWS({ intent: "transcription" }, client), { turnDetection: null, isNode: true }),
  websocket: () => {
    globalThis.WebSocket = WebSocket; // Node has its own from version 22 on
    return transcribe(new OpenAIRealtimeWebSocket({ model: "whisper-1" }, client), { turnDetection: null });
  },
  error: () =>
    new Promise((resolve) => {
      const realtime = new OpenAIRealtimeWS({ intent: "transcription" }, client);
      realtime.on("session.created", () => realtime.send({ type: "response.create", event_id: "mine" }));
      realtime.on("error", ({ error }) => {
        realtime.close();
        resolve(error);
      });
    }),
};
process.stdout.write(JSON.stringify(await calls[name]()));
proxy.close();
