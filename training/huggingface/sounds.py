"""Sounds as sources of published models: their kind, and samples for the proof of int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, WINDOW, Samples, log_mel, read_sound
from seq2seq_serve.bundle.manifest import LengthRule
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.sound_files import SoundTooLongError, opened
from seq2seq_serve.training.data.media import Media
from seq2seq_serve.training.data.sources import Inputs, Numbers
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError
from seq2seq_serve.training.models.fronts import SoundMaps

_NUM_SAMPLES = 4
_FRAMES_PER_POSITION = 2  # the stride of the second convolution
_BLOCK = 2**16  # samples that are decoded at once
_FORMANTS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
"""Hertz, of five vowels of English (Peterson and Barney 1952)."""


@dataclass(frozen=True)
class Sounds(Media):
    """Sounds of one length, padded with silence: `sound` (bands, frames).

    Two frames are one position of memory, also those of the silence.
    """

    num_bands: int
    num_frames: int

    forms: ClassVar[Mapping[str, Form]] = {names.SOUND: Form.SOUND}
    auto_class = "AutoModelForSpeechSeq2Seq"

    @classmethod
    def of(cls, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Sounds:
        """The sounds of a model with this `config.json`, and these settings of the feature extractor.

        Raises:
            CheckpointError: The checkpoint's spectrogram is another one than that of `bundle.audio`.
        """
        num_bands = config.get("num_mel_bins", 80)
        expected = {
            "sampling_rate": SAMPLE_RATE,
            "hop_length": HOP,
            "n_fft": WINDOW,
            "feature_size": num_bands,
            "padding_value": 0,
            "dither": 0,
            "do_normalize": False,
        }
        for name, value in expected.items():
            if settings.get(name, value) != value:
                raise CheckpointError(
                    f"the feature extractor's {name} is {settings[name]}, and {value} is supported"
                )
        return cls(num_bands, _FRAMES_PER_POSITION * config["max_source_positions"])

    @property
    def num_positions(self) -> int:
        return self.num_frames // _FRAMES_PER_POSITION

    @property
    def memory(self) -> LengthRule:
        """Graphs also encode shorter windows than `num_frames`, all of one batch equally long."""
        return LengthRule(names.SOUND, _FRAMES_PER_POSITION, self.num_positions, axis=1)

    @property
    def max_seconds(self) -> float:
        """The longest sound."""
        return self.num_frames * HOP / SAMPLE_RATE

    @property
    def window(self) -> tuple[int, ...]:
        return (3,)

    def drop_reason(self, source: Numbers) -> str | None:
        with self._named(source) as file:
            try:
                with opened(file.read_bytes(), self.max_seconds, _BLOCK):
                    return None
            except SoundTooLongError:
                return "too long"

    def _read(self, file: Path) -> Inputs:
        return self._heard(read_sound(file.read_bytes(), self.max_seconds))

    def _heard(self, samples: Samples) -> Inputs:
        """The spectrogram; resampling may have added a sample to the longest sounds."""
        longest = self.num_frames * HOP
        return {names.SOUND: log_mel(samples[:longest], self.num_bands, self.num_frames)}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        sound = rng.uniform(-1, 1.5, (self.num_bands, self.num_frames))
        return {names.SOUND: sound.astype(np.float32)}

    def make_front(self, d_model: int) -> SoundMaps:
        return SoundMaps(self.num_bands, self.num_frames, d_model)

    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        return {"input_features": source}

    def make(self) -> list[Inputs]:
        return [self._heard(samples) for samples in self.made_samples()]

    def made_samples(self) -> list[Samples]:
        """Sounds that resemble speech: vowels of changing pitch and loudness, hisses, pauses, noise."""
        chance = np.random.default_rng(0)
        sounds = []
        for number in range(_NUM_SAMPLES):
            pitch, pieces = chance.uniform(90, 250), []
            for _ in range(3 + 8 * number):
                pieces += [_vowel(pitch * chance.uniform(0.8, 1.25), chance), _hiss(chance)]
                if chance.random() < 0.3:
                    pieces.append(np.zeros(chance.integers(SAMPLE_RATE // 10, SAMPLE_RATE)))
            sound = np.concatenate(pieces)[: int(self.max_seconds * SAMPLE_RATE)]
            sound *= chance.uniform(0.1, 0.9) / np.abs(sound).max()
            noise = 10 ** chance.uniform(-4, -2) * chance.standard_normal(len(sound))
            sounds.append(np.clip(sound + noise, -1, 1).astype(np.float32))
        return sounds


def _vowel(pitch: float, chance: np.random.Generator) -> NDArray[np.float64]:
    """Harmonics of a pitch, the louder the nearer they are to a formant."""
    times = np.arange(chance.integers(SAMPLE_RATE // 12, SAMPLE_RATE // 3)) / SAMPLE_RATE
    glide = np.cumsum(pitch * (1 + chance.uniform(-0.3, 0.3) * times)) / SAMPLE_RATE
    formants = np.array(_FORMANTS[chance.integers(len(_FORMANTS))])
    harmonics = np.arange(1, int(SAMPLE_RATE / 2 / (1.2 * pitch)))
    nearness = np.exp(-(((pitch * harmonics[:, None] - formants) / 180) ** 2)).sum(axis=1)
    loudness = (0.02 + nearness) / harmonics
    voice: NDArray[np.float64] = loudness @ np.sin(2 * np.pi * harmonics[:, None] * glide)
    return voice * np.hanning(len(voice)) * chance.uniform(0.3, 1)


def _hiss(chance: np.random.Generator) -> NDArray[np.float64]:
    """High noise, as of the consonant s."""
    noise = np.diff(chance.standard_normal(chance.integers(SAMPLE_RATE // 30, SAMPLE_RATE // 8)), prepend=0.0)
    return noise * np.hanning(len(noise)) * chance.uniform(0.01, 0.1)
