"""Reads sounds into log-mel spectrograms, as speech models read them, for export and for the server alike.

Files are those of `bundle.sound_files`, of usual rates, with one or several channels. Only samples at
`SAMPLE_RATE` are kept.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.bundle.sound_files import (
    SoundError as SoundError,
)
from seq2seq_serve.bundle.sound_files import (
    SoundTooLongError as SoundTooLongError,
)
from seq2seq_serve.bundle.sound_files import (
    opened,
)

Samples = NDArray[np.float32]  # of one channel; full loudness is -1 and 1
Span = tuple[int, int]  # of a sound: its first sample, and the one after its last

SAMPLE_RATE = 16_000  # samples a second of a spectrogram's sound
HOP = 160  # samples from one frame of a spectrogram to the next
WINDOW = 400  # samples of the Fourier transform
SPEECH_MARGIN = SAMPLE_RATE * 4 // 10  # samples that are kept on either side of speech, for soft sounds
LEAST_SHARE = 0.9  # of the longest piece, on average; what is left is for the choice of the cuts
_CUT_BLOCK = SAMPLE_RATE // 10  # samples whose mean power is a level
_CUT_BLOCKS = 7  # whose levels say how quiet a place is: a consonant has shorter gaps
_SILENCE = 1e-9  # a lower mean power counts as silence
_BLOCK = 65_536  # samples of each channel that are decoded at once
_LIVE_FRAMES = 25  # of a spectrogram that are computed together while a sound comes
_FRAMES = 500  # of a spectrogram that are computed at once, in about 25 ms
# The mel scale of Slaney (1998, "Auditory Toolbox"): linear up to 1,000 Hz, logarithmic above
_LINEAR_HERTZ, _MELS_PER_HERTZ = 1000.0, 3 / 200
_MELS_PER_OCTAVE = 27 * math.log(2) / math.log(6.4)
_FLOOR, _DYNAMIC_RANGE = 1e-10, 8.0  # of power, and of its logarithm
_PIXELS_PER_SAMPLE = 2  # of a picture, which take as long to decode as a sample of each channel
_PIXELS_PER_SECOND = 50_000  # of a picture, which take as long to decode as a second's spectrogram to compute
LOUDEST = 1e4  # of a sample; 1 is the usual limit, which files of floats may exceed


class Part(NamedTuple):
    """A span of a sound of which only some are left, one after the other.

    Attributes:
        end_seconds: Where it ends among those that are left.
        delay_seconds: How much later it is in the sound itself.
    """

    end_seconds: float
    delay_seconds: float


def read_sound(
    content: bytes,
    max_seconds: float,
    after_block: Callable[[], None] = lambda: None,
    file_type: str = "",
) -> Samples:
    """Returns the mean of a file's channels at `SAMPLE_RATE`.

    Args:
        content: The file.
        max_seconds: The limit.
        after_block: Is called after each block of samples; an error that it raises ends the work.
        file_type: See `sound_files.opened`.

    Raises:
        SoundError: The bytes are not a whole sound.
        SoundTooLongError: The sound is longer than `max_seconds`.
    """
    import soxr  # not by servers of other models

    num_samples = 0
    with opened(content, max_seconds, _BLOCK, file_type) as file:
        resample = soxr.ResampleStream(file.rate, SAMPLE_RATE, num_channels=1).resample_chunk
        # Takes memory only where it is written to.
        samples = np.empty(file.max_samples * SAMPLE_RATE // file.rate + _BLOCK, np.float32)

        def keep(piece: Samples) -> None:
            nonlocal num_samples
            samples[num_samples : num_samples + len(piece)] = piece
            num_samples += len(piece)

        for block in file.blocks:
            if not (block.min() >= -LOUDEST and block.max() <= LOUDEST):  # NaN is not
                raise SoundError(
                    f"the sound has samples that are not numbers from -{LOUDEST:g} to {LOUDEST:g}"
                )
            # Four times as fast as a mean over so short an axis
            keep(resample(np.einsum("sc->s", block) / np.float32(file.num_channels)))
            after_block()
        keep(resample(np.zeros(0, np.float32), last=True))
    if not num_samples:
        raise SoundError("the sound has no samples")
    return samples[:num_samples]


def split_sound(samples: Samples, longest: int) -> list[Samples]:
    """Returns pieces of at most `longest` samples and of about one length, cut in the pauses of a sound.

    A cut is looked for around the place that would make all lengths equal, as far as no piece gets too long.
    """
    length = len(samples)
    num_pieces = math.ceil(length / (LEAST_SHARE * longest)) if length > longest else 1
    each = length / num_pieces
    most_moved = min((longest - each) / 2, 0.4 * each)
    cuts = [
        quietest(samples, math.ceil(place * each - most_moved), int(place * each + most_moved))
        for place in range(1, num_pieces)
    ]
    return [samples[begin:end] for begin, end in pairwise([0, *cuts, length])]


def quietest(samples: Samples, first: int, last: int) -> int:
    """Returns the middle of the block from `first` to `last` that is quietest with those around it.

    Their levels are averaged, not their powers: in a pause all are low.
    """
    size = min(_CUT_BLOCK, max((last - first) // _CUT_BLOCKS, 1))
    blocks = samples[first : last - (last - first) % size].reshape(-1, size)
    levels = np.log(np.maximum(np.square(blocks).mean(axis=1), _SILENCE))
    around = np.convolve(np.pad(levels, _CUT_BLOCKS // 2, "edge"), np.ones(_CUT_BLOCKS), "valid")
    return first + int(around.argmin()) * size + size // 2


def pieces_of(
    samples: Samples, spans: Iterable[Span], longest: int, before_look: Callable[[], None] = lambda: None
) -> list[Span]:
    """Returns pieces of at most `longest` samples with all spans of a sound: several, or parts of one.

    There are as few as can be, of about one length: a model hears a few seconds worse than half a minute.
    `before_look` is called before each look at all spans, and before each is cut.
    """

    def number_of(most: int) -> int:
        before_look()
        return len(_joined(cut, most))

    cut: list[Span] = []
    for begin, end in spans:
        before_look()
        ends = list(accumulate(map(len, split_sound(samples[begin:end], longest)), initial=begin))
        cut += pairwise(ends)
    least = max((end - begin for begin, end in cut), default=0)
    num_pieces = number_of(longest)
    most = bisect_left(range(longest), -num_pieces, lo=least, key=lambda most: -number_of(most))
    return _joined(cut, most)


def _joined(spans: Iterable[Span], longest: int) -> list[Span]:
    """Returns spans of at most `longest` samples that each join as many of the given ones as they can."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and end - joined[-1][0] <= longest:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def joined_spans(samples: Samples, spans: Sequence[Span]) -> tuple[Samples, list[Span], tuple[Part, ...]]:
    """Returns the sound of some spans, one after the other, where each of them is in it, and its parts."""
    ends = list(accumulate(end - begin for begin, end in spans))
    joined = [(after - (end - begin), after) for (begin, end), after in zip(spans, ends, strict=True)]
    parts = tuple(
        Part(end / SAMPLE_RATE, (span[0] - begin) / SAMPLE_RATE)
        for span, (begin, end) in zip(spans, joined, strict=True)
    )
    return np.concatenate([samples[begin:end] for begin, end in spans]), joined, parts


def times_in_sound(
    begin: float, end: float, parts: Sequence[Part], margin: float = 0.0
) -> tuple[float, float]:
    """Returns when something was said in a sound, from its times in the joined spans of the sound.

    If it lies in several spans, a side of less than half of its length and of `margin` is left out.

    Args:
        begin: In seconds of the joined spans.
        end: Not before `begin`.
        parts: Those of the sound; none if it is whole.
        margin: In seconds.
    """
    if not parts:
        return begin, end
    ends = [part.end_seconds for part in parts[:-1]]
    first, last, most = bisect_right(ends, begin), bisect_left(ends, end), min(margin, (end - begin) / 2)
    from_, to = begin, end
    while first < last and ends[first] - begin < most:
        from_, first = ends[first], first + 1
    while first < last and end - ends[last - 1] <= most:
        last -= 1
        to = ends[last]
    last = max(first, last)
    return from_ + parts[first].delay_seconds, to + parts[last].delay_seconds


class SoundCost(NamedTuple):
    """The cost of reading a sound.

    Attributes:
        num_pixels: The number of a picture's pixels that take as long to decode.
        max_seconds: The most seconds of it that are read.
    """

    num_pixels: int
    max_seconds: float


def cost(content: bytes, max_seconds: float, file_type: str = "") -> SoundCost:
    """Returns what it costs to read a sound, by its header.

    Raises:
        SoundError: As `read_sound`, as far as the header tells.
    """
    with opened(content, max_seconds, _BLOCK, file_type) as file:
        num_samples, seconds = file.num_samples * file.num_channels, file.num_samples / file.rate
        num_pixels = int(num_samples * _PIXELS_PER_SAMPLE + seconds * _PIXELS_PER_SECOND)
        return SoundCost(num_pixels, file.max_samples / file.rate)


def log_mel(
    samples: Samples, num_mels: int, num_frames: int, after_block: Callable[[], None] = lambda: None
) -> NDArray[np.float32]:
    """Returns the logarithm of the power in each band of the mel scale, `(num_mels, num_frames)`.

    It is the input of Whisper (Radford et al. 2022, arXiv:2212.04356, section 2.2): the logarithm's largest
    8 units, scaled to about -1 to 1; silence follows a short sound.

    Args:
        samples: At `SAMPLE_RATE`, at most `num_frames * HOP`.
        num_mels: The number of bands.
        num_frames: The number of windows of `WINDOW` samples; their centres are `HOP` samples apart.
        after_block: Is called after each block of windows; an error that it raises ends the work.
    """
    assert len(samples) <= num_frames * HOP
    half, length = WINDOW // 2, num_frames * HOP
    num_heard = min(num_frames, -(-(len(samples) + half) // HOP))  # later windows are silent
    if len(samples) > length - WINDOW:
        num_heard = num_frames
    levels = np.full((num_mels, num_heard), np.log10(_FLOOR))
    for first in range(0, num_heard, _FRAMES):
        end = min(first + _FRAMES, num_heard)
        begin, stop = first * HOP - half, (end - 1) * HOP + half
        signal = samples[max(begin, 0) : stop]
        if len(signal) < stop - begin:  # silence follows the sound, and it is mirrored at the ends
            places = np.arange(begin, stop)
            places = np.abs(np.where(places < length, places, 2 * (length - 1) - places))
            signal = np.zeros(len(places), samples.dtype)
            is_heard = places < len(samples)
            signal[is_heard] = samples[places[is_heard]]
        levels[:, first:end] = _levels(signal, num_mels)
        after_block()
    return _spectrogram(levels, num_frames)


def _levels(signal: Samples, num_mels: int) -> NDArray[np.float64]:
    """Returns the logarithm of the power in each band, `(num_mels, frames)`, of all whole windows."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    windows = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::HOP]  # (frames, WINDOW)
    power = np.ascontiguousarray((np.abs(np.fft.rfft(windows * hann)) ** 2).T)  # (WINDOW / 2 + 1, frames)
    levels = np.empty((num_mels, len(windows)))
    # No product of matrices: after one, the threads of BLAS wait busily for the next, beside those of graphs.
    for level, (first, weights) in zip(levels, _mel_bands(num_mels), strict=True):
        np.einsum("f,ft->t", weights, power[first : first + len(weights)], out=level)
    return np.log10(np.maximum(levels, _FLOOR))


def _spectrogram(levels: NDArray[Any], num_frames: int) -> NDArray[np.float32]:
    """Returns levels on the scale that models read, with silence after them."""
    loudest = max(levels.max(initial=-math.inf), math.log10(_FLOOR))
    spectrogram: NDArray[np.float32] = np.full(
        (len(levels), num_frames), _scaled(np.array(math.log10(_FLOOR)))
    )
    spectrogram[:, : levels.shape[1]] = _scaled(levels)
    np.maximum(spectrogram, _scaled(np.array(loudest - _DYNAMIC_RANGE)), out=spectrogram)
    return spectrogram


class GrowingSound:
    """A sound that comes piece by piece, and its spectrogram, of which no window is computed twice.

    Owned by the stream of a caller. The pieces do not change the spectrogram. What is not needed any more is
    dropped.

    Args:
        num_mels: The number of bands.

    Attributes:
        num_samples: The samples that have come.
    """

    def __init__(self, num_mels: int) -> None:
        self._num_mels = num_mels
        self.num_samples = 0
        self._first_frame = 0  # whose level is kept
        self._levels = list[NDArray[np.float32]]()  # (num_mels, _LIVE_FRAMES) each, without a gap
        self._begin = -(WINDOW // 2)  # of the samples that are kept; there is silence before the sound
        self._kept: Samples = np.zeros(_BLOCK, np.float32)  # and room for further ones
        self._length = WINDOW // 2

    def push(self, samples: Samples) -> None:
        """Read the next samples, of any number."""
        self.num_samples += len(samples)
        if self._length + len(samples) > len(self._kept):
            grown = np.zeros(2 * (self._length + len(samples)), np.float32)
            grown[: self._length] = self._kept[: self._length]
            self._kept = grown
        self._kept[self._length : self._length + len(samples)] = samples
        self._length += len(samples)
        while (self._num_levels + _LIVE_FRAMES - 1) * HOP + WINDOW // 2 <= self.num_samples:
            self._levels.append(self._computed(self._num_levels, self._num_levels + _LIVE_FRAMES))

    def drop(self, num_samples: int) -> None:
        """Forget what is before this number of samples of the sound, or most of it."""
        num_blocks = max(num_samples // HOP - self._first_frame, 0) // _LIVE_FRAMES
        num_blocks = min(num_blocks, len(self._levels))
        del self._levels[:num_blocks]
        self._first_frame += num_blocks * _LIVE_FRAMES
        num_old = self._first_frame * HOP - WINDOW // 2 - self._begin
        if num_old > self._length // 2:
            self._kept = np.concatenate([self._kept[num_old : self._length], np.zeros(_BLOCK, np.float32)])
            self._length -= num_old
            self._begin += num_old

    def samples(self, begin: int, end: int) -> Samples:
        """Returns the samples of a part of the sound, which must not be changed."""
        assert self._begin <= begin <= end <= self.num_samples
        return self._kept[begin - self._begin : end - self._begin]

    def log_mel(self, begin: int, end: int, num_frames: int) -> NDArray[np.float32]:
        """Returns the spectrogram of a part of the sound, as `log_mel` of its samples.

        Windows at its beginning have what was heard before it, and silence follows its end.

        Args:
            begin: Of its samples, a multiple of `HOP`; not dropped.
            end: Of its samples, at most `num_samples`.
            num_frames: As for `log_mel`.
        """
        assert begin % HOP == 0
        first, half = begin // HOP, WINDOW // 2
        last = min(-(-(end + half) // HOP), first + num_frames)
        # Later windows have samples after `end`, and are computed with silence in their place.
        num_whole = max(min((end - half) // HOP + 1, self._num_levels, last), first)
        of_blocks = np.concatenate([np.zeros((self._num_mels, 0), np.float32), *self._levels], axis=1)
        levels = of_blocks[:, first - self._first_frame : num_whole - self._first_frame]
        if num_whole < last:
            levels = np.concatenate([levels, self._computed(num_whole, last, end)], axis=1)
        return _spectrogram(levels, num_frames)

    @property
    def _num_levels(self) -> int:
        """The number of frames from the beginning of the sound whose levels are computed."""
        return self._first_frame + len(self._levels) * _LIVE_FRAMES

    def _computed(self, first: int, last: int, end: int | None = None) -> NDArray[np.float32]:
        """Returns the levels of frames, with silence after `end`."""
        begin, stop = first * HOP - WINDOW // 2, (last - 1) * HOP + WINDOW // 2
        signal = self._kept[begin - self._begin : min(stop, stop if end is None else end) - self._begin]
        if len(signal) < stop - begin:
            signal = np.concatenate([signal, np.zeros(stop - begin - len(signal), np.float32)])
        return _levels(signal, self._num_mels).astype(np.float32)


def _scaled(levels: Any) -> Any:
    return ((levels + 4) / 4).astype(np.float32)


@functools.cache
def _mel_bands(num_mels: int) -> list[tuple[int, NDArray[np.float64]]]:
    """Triangles of equal area over the `WINDOW / 2 + 1` frequencies up to `SAMPLE_RATE / 2`.

    Each is the place of its first frequency, and the weights of its frequencies; outside they are 0.
    """
    edges = _hertz(np.linspace(0, _mels(SAMPLE_RATE / 2), num_mels + 2))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    slopes = edges[:, None] - frequencies
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    bands = triangles * (2 / (edges[2:] - edges[:-2]))[:, None]
    first, stop = np.searchsorted(frequencies, edges[:-2], "right"), np.searchsorted(frequencies, edges[2:])
    return [(begin, band[begin:end]) for begin, end, band in zip(first.tolist(), stop, bands, strict=True)]


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _MELS_PER_HERTZ
    return _LINEAR_HERTZ * _MELS_PER_HERTZ + _MELS_PER_OCTAVE * math.log2(hertz / _LINEAR_HERTZ)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    corner = _LINEAR_HERTZ * _MELS_PER_HERTZ
    above = _LINEAR_HERTZ * 2 ** ((mels - corner) / _MELS_PER_OCTAVE)
    return np.where(mels < corner, mels / _MELS_PER_HERTZ, above)
