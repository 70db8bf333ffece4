// The microphone: its samples go to the page's server, and events come back while somebody speaks.

import { describe } from "./api.js";

const MOST_WAITING_BYTES = 2 ** 23; // of sound that the page's server does not take: a minute at least

// Yields the events of `seq2seq.v1`. When the signal aborts, the sound ends, and the rest of its text comes.
export async function* listen(request, signal) {
  if (!navigator.mediaDevices)
    throw new Error("the browser gives its microphone only to pages at localhost: open the page there");
  const media = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const context = new AudioContext();
  const socket = new WebSocket(`ws://${location.host}/api/live`);
  const events = [];
  let wake = null;
  const put = (event) => {
    events.push(event);
    wake?.();
  };
  const stop = () => {
    media.getTracks().forEach((track) => track.stop());
    context.close();
    if (socket.readyState === WebSocket.OPEN) socket.send("end");
  };
  socket.onmessage = ({ data }) => put(JSON.parse(data));
  const opened = new Promise((resolve) => {
    socket.onopen = resolve;
    socket.onclose = () => {
      put(new Error("the connection to the page's server broke off"));
      resolve();
    };
  });
  try {
    await context.audioWorklet.addModule("/page/recorder.js");
    await opened;
    if (socket.readyState === WebSocket.OPEN)
      socket.send(JSON.stringify({ ...request, sample_rate: context.sampleRate }));
    const recorder = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    recorder.port.onmessage = ({ data }) => {
      if (signal.aborted || socket.readyState !== WebSocket.OPEN) return;
      if (socket.bufferedAmount <= MOST_WAITING_BYTES) socket.send(data);
      else put(new Error("the sound is not taken as fast as it is spoken"));
    };
    context.createMediaStreamSource(media).connect(recorder);
    await context.resume();
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { once: true });
    for (;;) {
      if (!events.length) await new Promise((resolve) => (wake = resolve));
      const event = events.shift();
      if (event instanceof Error) throw event;
      if (event.error) throw new Error(describe(event.error));
      yield event;
      if (event.result) return;
    }
  } finally {
    signal.removeEventListener("abort", stop);
    media.getTracks().forEach((track) => track.stop());
    if (context.state !== "closed") context.close();
    socket.close();
  }
}
