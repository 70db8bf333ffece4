"""Writes the attention of an answer to a file, as numbers or as a drawing that suits the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seq2seq_serve.client.forms import CLIP
from seq2seq_serve.client.output import attention_dict, to_json
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_EOS, Hypothesis

IMAGE, DATA = ".png", ".json"
_WHOLE = 0.999  # weights below this do not add up to 1 because of rounding alone


def save_alignment(hypothesis: Hypothesis, path: Path) -> None:
    """Writes the alignment of a translation, as a heatmap or as numbers.

    Raises:
        OSError: The file cannot be written.
    """
    if (attention := _write_numbers(hypothesis, path)) is None:
        return
    from seq2seq_serve.drawing.heatmap import save_heatmap  # importing matplotlib takes long

    save_heatmap(attention["weights"], attention["target_tokens"], attention["source_tokens"], path)


def save_hops(hypothesis: Hypothesis, question: str, path: Path) -> None:
    """Writes the weights of a story's sentences for the first word of the answer, a column for each hop.

    If the model can also look at no sentence, a last row has the rest of the weights.

    Raises:
        OSError: The file cannot be written.
    """
    if (attention := _write_numbers(hypothesis, path)) is None:
        return
    from seq2seq_serve.drawing.overlay import save_story

    hops = [hop[0] for hop in attention.get("hops", [attention["weights"]])]
    sentences = attention["source_tokens"]
    if min(map(sum, hops)) < _WHOLE:
        hops = [[*hop, 1 - sum(hop)] for hop in hops]
        sentences = [*sentences, "(no sentence)"]
    save_story(hops, sentences, f"{question.strip()} → {hypothesis.text}", path)


def save_looks(hypothesis: Hypothesis, content: bytes, form: str, path: Path) -> None:
    """Writes a picture or a clip once for each word of its caption, with the attention laid over it.

    Raises:
        OSError: The file cannot be written.
        ValueError: The picture cannot be read, or the attention does not fit a picture.
    """
    if (attention := _write_numbers(hypothesis, path)) is None:
        return
    import numpy as np

    from seq2seq_serve.drawing.overlay import save_clip, save_picture

    num_words = len(attention["target_tokens"]) - (hypothesis.finish_reason == FINISH_REASON_EOS)
    words = attention["target_tokens"][:num_words]
    weights = np.asarray(attention["weights"])[:num_words]  # with its number of places, even without words
    save = save_clip if form == CLIP else save_picture
    save(content, weights, words, path)


def _write_numbers(hypothesis: Hypothesis, path: Path) -> dict[str, Any] | None:
    """Writes the numbers if the file's name asks for them; otherwise returns them, to be drawn."""
    attention = attention_dict(hypothesis.attention)
    if path.suffix != DATA:
        return attention
    path.write_text(to_json(attention) + "\n", encoding="utf-8")
    return None
