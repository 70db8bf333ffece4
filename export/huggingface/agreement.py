"""The proof that a checkpoint's own tokenizer gives the same ids, frames and texts as the imported one."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from seq2seq_serve.bundle.errors import first_line
from seq2seq_serve.bundle.manifest import TemplateTokens
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK
from seq2seq_serve.export.exporter import ExportError
from seq2seq_serve.export.huggingface.samples import SENTENCES
from seq2seq_serve.training.huggingface.tokenizers import ImportedTokenizers

_FORGETS_EOS = ("BlenderbotTokenizer",)  # of transformers 5: its frame lacks the end of sequence


_TIME = re.compile(r"<\|\d+\.\d\d\|>")
# The classes whose frame has a language; others leave the frame that the file happens to have.
_WITH_LANGUAGES = {
    "mbart": "MBartTokenizer",
    "mbart50": "MBart50Tokenizer",
    "m2m100": "M2M100Tokenizer",
    "nllb": "NllbTokenizer",
}


def compare_tokenizers(
    folder: Path, family: str, ours: ImportedTokenizers, report: Callable[[str], None], *, reads_texts: bool
) -> None:
    """Compare the built-in sentences by both tokenizers, and report differences that are meant.

    A special token that a text contains is text here. A class of transformers that rebuilds a
    `tokenizer.json` or a SentencePiece model may differ from the file, which the import follows. Where
    transformers cannot read the tokenizer, nothing is compared, and the report says so.

    Raises:
        ExportError: A difference is not meant.
    """
    import transformers  # takes seconds

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each class fails in its own way
        problem = "because transformers cannot read it here"
        report(f"the tokenizer was compared with nothing, {problem}: {first_line(error)}")
        return
    name, is_rebuilt = type(theirs).__name__, isinstance(theirs, transformers.PreTrainedTokenizerFast)
    rows = ours.source.encode_batch(SENTENCES)
    expected = [theirs(text, add_special_tokens=False).input_ids for text in SENTENCES]
    num_different = sum(map(operator.ne, rows, expected))
    if not (is_rebuilt and _follows_file(folder, rows)):
        _compare(name, SENTENCES, rows, expected)
    targets = rows
    if ours.target is not ours.source:
        targets = ours.target.encode_batch(SENTENCES)
        expected = [theirs(text_target=text, add_special_tokens=False).input_ids for text in SENTENCES]
        _compare(name, SENTENCES, targets, expected)
    texts = [
        theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in targets
    ]
    decoded = ours.target.decode_batch(targets)
    _compare(name, targets, [text.strip() for text in decoded], [text.strip() for text in texts])
    has_frame = _WITH_LANGUAGES.get(family, name) == name
    if has_frame:
        given, wanted = _frames(theirs, ours, reads_texts=reads_texts)
        _compare(name, ["the frame of 'a b'"], [given], [wanted])
    _compare_times(theirs, ours)
    report(
        f"the tokenizer equals transformers' {name}: ids, texts{' and frames' * has_frame} of "
        f"{len(rows) - num_different} sentences; special tokens in a text are text"
        + (f"; {num_different} sentences follow the file, which {name} rebuilds" if num_different else "")
    )


def _compare_times(theirs: Any, ours: ImportedTokenizers) -> None:
    """Compare the ids of times with the tokens that are named so; old tokenizers of Whisper do not name them.

    A text would end at a token that somebody added after them, if it were taken for a time.
    """
    named = {one for token, one in theirs.get_vocab().items() if _TIME.fullmatch(token)}
    times = ours.timestamps
    if times is None or not named:
        return
    if wrong := sorted({*range(times.first_id, times.last_id + 1)} - named):
        raise ExportError(
            f"the tokens {wrong[0]} to {wrong[-1]} would be times, and the tokenizer has times from "
            f"{min(named)} to {max(named)}"
        )


def _compare(name: str, given: Sequence[Any], ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for one, result, expected in zip(given, ours, theirs, strict=True):
        if result != expected:
            raise ExportError(
                f"the tokenizer differs from transformers' {name}: {one!r} gives {result!r} and not "
                f"{expected!r}"
            )


def _follows_file(folder: Path, rows: Sequence[Sequence[int]]) -> bool:
    """Whether the ids of the sentences are those of `tokenizer.json`; True without one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return True
    inner = tokenizers.Tokenizer.from_file(str(file))
    return all(
        inner.encode(text, add_special_tokens=False).ids == list(ids)
        for text, ids in zip(SENTENCES, rows, strict=True)
    )


def _frames(theirs: Any, ours: ImportedTokenizers, *, reads_texts: bool) -> tuple[list[int], list[int]]:
    """A text by both tokenizers with the tokens around it, or Whisper's tokens before a target."""
    template, text = ours.template, "a b"
    chosen = {name: choice.default or next(iter(choice.ids)) for name, choice in ours.choices.items()}
    if not reads_texts:
        if not hasattr(theirs, "set_prefix_tokens"):
            return [], []
        if chosen:
            theirs.set_prefix_tokens(language=chosen[SOURCE_LANGUAGE], task=chosen[TASK])
        return _filled(template.start, ours, chosen), theirs.prefix_tokens
    if SOURCE_LANGUAGE in chosen:
        theirs.src_lang = chosen[SOURCE_LANGUAGE]
    is_marked = TARGET_LANGUAGE in template.source_prefix  # Marian's
    expected = theirs(f">>{chosen[TARGET_LANGUAGE]}<< {text}" if is_marked else text).input_ids
    given = [
        *_filled(template.source_prefix, ours, chosen),
        *ours.source.encode(text),
        *_filled(template.source_suffix, ours, chosen),
    ]
    return given[: len(expected)] if type(theirs).__name__ in _FORGETS_EOS else given, expected


def _filled(places: TemplateTokens, ours: ImportedTokenizers, chosen: Mapping[str, str]) -> list[int]:
    return [ours.choices[one].ids[chosen[one]] if isinstance(one, str) else one for one in places]
