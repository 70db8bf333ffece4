// Gives the samples of a microphone as 16-bit integers, a tenth of a second at a time.

class Recorder extends AudioWorkletProcessor {
  #samples = new Int16Array(Math.round(sampleRate / 10));
  #count = 0;

  process([[channel]]) {
    for (const value of channel ?? []) {
      this.#samples[this.#count++] = Math.max(-1, Math.min(1, value)) * 32767;
      if (this.#count === this.#samples.length) {
        this.port.postMessage(this.#samples.slice().buffer);
        this.#count = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
