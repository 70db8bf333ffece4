"""Decodes a sound in a short window, and once more in a whole one if the model repeats itself.

In short windows a model hears the same words, but repeats itself more often where a sound breaks off.
`benchmarks.quality.short_windows` measures both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Result
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.read.windows import WindowRules, compression_ratio
from seq2seq_serve.server.service.seq2seq.windows import Decode


async def decode_short(
    decode: Decode, model: ServedModel, rules: WindowRules, request: Request, is_repeated: bool
) -> Result:
    """Returns the result of a request, or that of its sound in a whole window.

    Args:
        decode: Decodes a request.
        model: Its model.
        rules: When a text repeats itself.
        request: Silence follows its sound in its window.
        is_repeated: As for `decode`.
    """
    [(name, spectrogram)] = request.sources.items()
    result = await decode(request, is_repeated)
    num_left = model.max_memory_length - request.memory_length
    if not num_left or request.is_score or not _is_loop(result, model, rules):
        return result
    num_frames = model.sources[name].axes[1]
    assert isinstance(num_frames, int)
    silence = (0, 0), (0, num_frames - spectrogram.shape[1])
    sources = {name: np.pad(spectrogram, silence, mode="edge")}
    return await decode(replace(request, sources=sources, memory_length=model.max_memory_length), True)


def _is_loop(result: Result, model: ServedModel, rules: WindowRules) -> bool:
    """Whether a text repeats itself, or does not end: live speech has room for more than anyone says."""
    best, times = result.best, model.manifest.timestamps
    assert times is not None
    said = [token_id for token_id in best.token_ids if not times.has(token_id)]
    repeats = compression_ratio(model.target_tokenizer.decode(said)) > rules.max_compression_ratio
    return best.finish_reason is FinishReason.LENGTH or repeats
