"""Folders with the tokenizer files of each family, and the ids that they give to texts.

The vocabularies are made of pieces of sentences in thirty languages, equal on every machine. What
transformers and sentencepiece give for `TEXTS` is recorded in `golden.jsonl`, one tokenizer a line;
`python -m tests.export.huggingface.tokenizer_files` records it anew.
"""

import dataclasses
import io
import json
import math
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import pre_tokenizers
from transformers.utils import sentencepiece_model_pb2_new as protobuf

from seq2seq_serve.export.huggingface.samples import SENTENCES
from seq2seq_serve.training.huggingface.sentencepiece import SPACE, PieceType
from seq2seq_serve.training.huggingface.tokenizers import read_tokenizers

GOLDEN = Path(__file__).with_name("golden.jsonl")
# Texts that have found differences between tokenizers.
HARD_TEXTS = tuple(
    "| |two  spaces|a space at the end |  and at the beginning|tab\there|a line\nand another\r\n\nlast|"
    "no\u00a0break|zero\u200bwidth|soft\u00adhyphen|ﬁne ﬂag|２０２６年|ｶﾞｷﾞｸﾞ ﾊﾟ|"
    "e\u0301 a\u0323\u0301 Ａ\u0301 か\u3099|"
    f"{unicodedata.normalize('NFD', '오늘은 금요일입니다 각각 힣')}|"
    "شَّ مُحَمَّد|क़लम ज़मीन|น้ำ กำ|👨‍👩‍👧 🎉🏳️‍🌈 ☎️|\u2581|\u2581a \u2581 b\u2581|a\x00b|\x07bell|\ufeffbom|"
    "Ⅷ ㎏ ½ ℡ ™|\ufdd0|\ue000|…—“quoted”".split("|")
)
_NAMES = "</s> a</s>b <pad> <unk> <s> <extra_id_0> en_XX kor_Hang <mask>"
CONTROL_TEXTS = (*_NAMES.split(), "__ko__ a")
ADDED = ["<sep>", "김치찌개", "①<SEP>"]  # SentencePiece would change the last one
ADDED_TEXTS = (
    *SENTENCES[::9],
    *["a <sep> 김치찌개 b", "<sep>a<sep>b", " <sep>", "김치찌개<sep>①<SEP>", "x ①<SEP>y", "<SEP> 김치"],
)
# NUL ends a text for some versions of sentencepiece.
TEXTS = (
    *SENTENCES[::3],
    *(unicodedata.normalize("NFD", text) for text in SENTENCES[4::9]),
    *(text for text in HARD_TEXTS if "\0" not in text),
    "The 12,345 HOUSES of Göteborg: 여섯 시 반, шесть; ابجد — Բարեւ ጤና 🙂!",
)


def _pieces(words: Iterable[str], *, longest: int = 5) -> list[str]:
    """The characters of words and what occurs in them twice, the most frequent first."""
    counts = Counter(
        word[i : i + n] for word in words for n in range(1, longest + 1) for i in range(len(word) + 1 - n)
    )
    kept = (text for text, count in counts.items() if count > 1 or len(text) == 1)
    return sorted(kept, key=lambda text: (-counts[text], text))


def _merges(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """The byte pairs of pieces, in their order."""
    pieces = list(pieces)
    known = {*pieces}
    return [
        (text[:i], text[i:]) for text in pieces for i in range(1, len(text)) if {text[:i], text[i:]} <= known
    ]


@cache
def spm(kind: str, first: int = 0, every: int = 1, **options: Any) -> bytes:
    """A SentencePiece model with the charsmap of `nmt_nfkc`, and pieces of every n-th sentence."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab cd ab"]),
        model_writer=content,
        model_type=kind,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    model = parsed(content.getvalue())
    special = [piece for piece in model.pieces if piece.type != PieceType.NORMAL]
    del model.pieces[:]
    model.pieces.extend(special)
    words = [SPACE + word for text in SENTENCES[first::every] for word in text.split()]
    if not options.get("split_by_whitespace", True):
        words = [first_word + second for first_word, second in pairwise(words)]
    for rank, text in enumerate(_pieces(words)):
        # Of byte pairs, the one of the lowest rank is merged; a unigram model adds log-probabilities.
        score = -float(rank) if kind == "bpe" else -math.log(10 * (rank + 2)) - 0.1 / len(text)
        model.pieces.add(piece=text, score=score)
    return bytes(model.SerializeToString())


def parsed(content: bytes) -> Any:
    """A model as its generated protobuf module reads it."""
    return protobuf.ModelProto.FromString(content)


def scored(content: bytes) -> list[tuple[str, float]]:
    """The pieces of a model with their scores."""
    return [(piece.piece, piece.score) for piece in parsed(content).pieces]


@dataclass(frozen=True)
class Files:
    """A folder, the arguments of `read_tokenizers` for it, and the tokenizer of `transformers` for it."""

    folder: Path
    family: str
    config: dict[str, Any]
    generation: dict[str, Any]
    theirs: Any


def marian(folder: Path, *, separate: bool = False, languages: tuple[str, ...] = ()) -> Files:
    """Two models, of which vocab.json has almost all pieces; the source does not know all scripts."""
    sides = [spm("unigram", 0, 2), spm("unigram", 1, 2, normalization_rule_name="nmt_nfkc_cf")]
    for name, content in zip(["source.spm", "target.spm"], sides, strict=True):
        (folder / name).write_bytes(content)
    pieces = [[text for i, (text, _) in enumerate(scored(content)) if i % 50 != 49] for content in sides]
    # `generate` pads both sides with one id, so that both have the same number of tokens.
    fewest = min(map(len, pieces))
    vocabs = [one[:fewest] for one in pieces] if separate else [[*pieces[0], *pieces[1]]]
    special, sizes = ["</s>", "<unk>", *(f">>{name}<<" for name in languages)], []
    for name, texts in zip(["vocab.json", "target_vocab.json"], vocabs, strict=False):
        tokens = dict.fromkeys([*special, *(text for text in texts if text != "<s>"), "<pad>"])
        (folder / name).write_text(json.dumps({text: i for i, text in enumerate(tokens)}))
        sizes.append(len(tokens))
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": sizes[0], "decoder_vocab_size": sizes[-1], "pad_token_id": sizes[-1] - 1}
    theirs = transformers.MarianTokenizer(
        str(folder / "source.spm"),
        str(folder / "target.spm"),
        str(folder / "vocab.json"),
        str(folder / "target_vocab.json") if separate else None,
        separate_vocabs=separate,
    )
    return Files(
        folder,
        "marian",
        config,
        {"decoder_start_token_id": sizes[-1] - 1, "pad_token_id": sizes[0] - 1},
        theirs,
    )


def m2m100(folder: Path) -> Files:
    """Byte pairs of a SentencePiece model; the languages follow vocab.json."""
    content = spm("bpe", bos_id=0, pad_id=1, eos_id=2, unk_id=3)
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    vocab = {text: i for i, (text, _) in enumerate(scored(content))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    theirs = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"), src_lang="en"
    )
    theirs.save_pretrained(folder)
    return Files(folder, "m2m100", {"vocab_size": len(vocab) + 108}, {"decoder_start_token_id": 2}, theirs)


def _fairseq(content: bytes) -> list[tuple[str, float]]:
    return [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")] + scored(content)[3:]


def _saved(folder: Path, family: str, theirs: Any, generation: dict[str, Any]) -> Files:
    theirs.save_pretrained(folder)
    return Files(folder, family, {"vocab_size": len(theirs) + 5, "model_type": family}, generation, theirs)


def mbart(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    vocab = _fairseq(spm("unigram"))
    languages = transformers.models.mbart.tokenization_mbart.FAIRSEQ_LANGUAGE_CODES
    vocab += [(name, 0.0) for name in [*languages, "<mask>"]]
    return _saved(folder, "mbart", transformers.MBartTokenizer(vocab=vocab), {"pad_token_id": 1})


def mbart50(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    charsmap = parsed(spm("unigram")).normalizer_spec.precompiled_charsmap
    theirs = transformers.MBart50Tokenizer(vocab=scored(spm("unigram")), _spm_precompiled_charsmap=charsmap)
    return _saved(folder, "mbart50", theirs, {"decoder_start_token_id": 2})


def nllb(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    content = spm("bpe")
    vocab = {text: i for i, (text, _) in enumerate(_fairseq(content))}
    merges = _merges(text for text, _ in scored(content)[3:])
    charsmap = parsed(content).normalizer_spec.precompiled_charsmap
    theirs = transformers.NllbTokenizer(vocab=vocab, merges=merges, _spm_precompiled_charsmap=charsmap)
    return _saved(folder, "nllb", theirs, {"decoder_start_token_id": 2})


def t5(folder: Path, family: str = "t5") -> Files:
    """As `save_pretrained` writes it."""
    content = spm("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    vocab = scored(content) + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    charsmap = parsed(content).normalizer_spec.precompiled_charsmap
    theirs = transformers.T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=charsmap)
    return _saved(folder, family, theirs, {"decoder_start_token_id": 0})


def pegasus(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    content = spm("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103))]
    vocab = [(name, 0.0) for name in first] + scored(content)[2:]
    charsmap = parsed(content).normalizer_spec.precompiled_charsmap
    theirs = transformers.PegasusTokenizer(vocab=vocab, _spm_precompiled_charsmap=charsmap)
    return _saved(folder, "pegasus", theirs, {"decoder_start_token_id": 0})


@cache
def _byte_pairs(
    special: tuple[str, ...] = ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    pieces = _pieces(word for text in SENTENCES for word, _ in split(text))
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*pieces})
    return {text: i for i, text in enumerate([*special, *letters, *pieces])}, _merges(pieces)


def bart(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    vocab, merges = _byte_pairs()
    return _saved(
        folder, "bart", transformers.BartTokenizer(vocab=vocab, merges=merges), {"decoder_start_token_id": 2}
    )


def trocr(folder: Path) -> Files:
    """As `save_pretrained` writes a model for print, with the settings of its pictures."""
    vocab, merges = _byte_pairs()
    _picture_settings(folder, resample=2)
    theirs = transformers.RobertaTokenizer(vocab=vocab, merges=merges)
    return _saved(folder, "trocr", theirs, {"decoder_start_token_id": 2, "eos_token_id": 2})


def trocr_small(folder: Path) -> Files:
    """As `save_pretrained` writes a small model, with unusual settings of its pictures."""
    _picture_settings(folder, resample=3, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    theirs = transformers.XLMRobertaTokenizer(vocab=[*_fairseq(spm("unigram")), ("<mask>", 0.0)])
    return _saved(folder, "trocr", theirs, {"decoder_start_token_id": 2, "eos_token_id": 2})


def _picture_settings(folder: Path, **settings: Any) -> None:
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessorPil(size=size, **settings).save_pretrained(folder)


def blenderbot(folder: Path) -> Files:
    """As `save_pretrained` writes it."""
    vocab, merges = _byte_pairs()
    theirs = transformers.BlenderbotTokenizer(vocab=vocab, merges=merges)
    return _saved(folder, "blenderbot", theirs, {"decoder_start_token_id": 1})


def whisper(folder: Path) -> Files:
    """As `save_pretrained` writes it, with three languages and the times of 0.64 seconds."""
    vocab, merges = _byte_pairs(())
    languages, tasks = ["en", "de", "ko"], ["translate", "transcribe"]
    special = [
        "startoftranscript",
        *languages,
        *tasks,
        "startoflm",
        "startofprev",
        "nospeech",
        "notimestamps",
    ]
    names = ["<|endoftext|>", *(f"<|{name}|>" for name in special)]
    theirs = transformers.WhisperTokenizer(vocab | {names[0]: len(vocab)}, merges)
    theirs.add_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    theirs.add_tokens([tokenizers.AddedToken(f"<|{i * 0.02:.2f}|>") for i in range(33)])
    ids = {name.strip("<|>"): theirs.convert_tokens_to_ids(name) for name in names}
    generation = {
        "decoder_start_token_id": ids["startoftranscript"],
        "bos_token_id": ids["endoftext"],
        "pad_token_id": ids["endoftext"],
        "eos_token_id": ids["endoftext"],
        "no_timestamps_token_id": ids["notimestamps"],
        "max_initial_timestamp_index": 10,
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[name] for name in languages},
        "task_to_id": {name: ids[name] for name in tasks},
        "suppress_tokens": [3, 40, 41, *(ids[name] for name in special[-5:-1])],
        "begin_suppress_tokens": [5, ids["endoftext"]],
    }
    return dataclasses.replace(
        _saved(folder, "whisper", theirs, generation),
        config={"vocab_size": len(theirs), "model_type": "whisper"},
    )


def byt5(folder: Path) -> Files:
    """As `save_pretrained` writes it: no vocabulary."""
    return _saved(folder, "byt5", transformers.ByT5Tokenizer(), {"decoder_start_token_id": 0})


@cache
def _byte_fallback_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte pairs that know some scripts only, with tokens for the bytes of others."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = _pieces(SPACE + word for text in SENTENCES[:20] for word in text.split())
    return {text: i for i, text in enumerate([*special, *pieces])}, _merges(pieces)


def t5gemma(folder: Path, family: str = "t5gemma") -> Files:
    """As `save_pretrained` writes it."""
    vocab, merges = _byte_fallback_pairs()
    theirs = transformers.GemmaTokenizer(
        vocab=vocab, merges=merges, add_bos_token=True, add_eos_token=True, extra_special_tokens=["<mask>"]
    )
    return _saved(folder, family, theirs, {"decoder_start_token_id": 2})


FAMILIES: dict[str, Callable[[Path], Files]] = {
    "marian": marian,
    "m2m100": m2m100,
    "mbart": mbart,
    "mbart50": mbart50,
    "nllb": nllb,
    "t5": t5,
    "mt5": lambda folder: t5(folder, "mt5"),
    "pegasus": pegasus,
    "bart": bart,
    "blenderbot": blenderbot,
    "byt5": byt5,
    "trocr": trocr,
    "trocr-small": trocr_small,
    "t5gemma": t5gemma,
    "t5gemma2": lambda folder: t5gemma(folder, "t5gemma2"),
}


def without_tokenizer_json(files: Files, *, has_times: bool = False) -> None:
    """Byte pairs as before 2023: vocab.json, merges.txt and added_tokens.json."""
    described = json.loads((files.folder / "tokenizer.json").read_text())
    (files.folder / "tokenizer.json").unlink()
    vocab = described["model"]["vocab"]
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    others = {
        name: token_id
        for name, token_id in added.items()
        if name not in vocab and (has_times or "." not in name)
    }
    merges = "".join(f"{first} {second}\n" for first, second in described["model"]["merges"])
    (files.folder / "vocab.json").write_text(json.dumps(vocab))
    (files.folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    (files.folder / "added_tokens.json").write_text(json.dumps(others))


BY_PIECES = ("t5", "pegasus", "mbart", "mbart50", "nllb", "trocr-small")
CAN_ADD = ("marian", "m2m100", "byt5", "bart", "blenderbot", *BY_PIECES[:-1])
ADDED_FORMS = ("added_tokens_decoder", "added_tokens.json")


def only_pieces(folder: Path, family: str) -> Files:
    """The same checkpoint before 2021: a SentencePiece model and no tokenizer.json."""
    files = FAMILIES[family](folder)
    (folder / "tokenizer.json").unlink()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if family in ("t5", "pegasus") else {}
    name = "spiece.model" if ids else "sentencepiece.bpe.model"
    (folder / name).write_bytes(spm("bpe" if family == "nllb" else "unigram", **ids))
    return files


def with_added(folder: Path, family: str, form: str) -> Files:
    """A folder without `tokenizer.json` whose tokenizer somebody added tokens to, the last one special."""
    files = only_pieces(folder, family) if family in BY_PIECES else FAMILIES[family](folder)
    if family in ("bart", "blenderbot"):
        without_tokenizer_json(files)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kept = folder / "added_tokens.json"
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    first = read_tokenizers(folder, family, files.config, files.generation).num_tokens
    ids = {name: first + place for place, name in enumerate([*ADDED, "<task>"])}
    if form == "added_tokens.json":
        kept.write_text(json.dumps(before | ids))
        listed = [*settings.pop("additional_special_tokens", []), *settings.get("extra_special_tokens", [])]
        settings["extra_special_tokens"] = [*dict.fromkeys(listed), "<task>"]
        settings.pop("added_tokens_decoder", None)
    else:
        settings["added_tokens_decoder"] = settings.get("added_tokens_decoder", {}) | {
            str(token_id): {"content": name, "special": name == "<task>"} for name, token_id in ids.items()
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = {"vocab_size": first + len(ids), "decoder_vocab_size": first + len(ids)}
    return dataclasses.replace(files, config=files.config | size)


# By the name of a line in `golden.jsonl`: the folder, and the texts that are cut.
GOLDEN_CASES: dict[str, tuple[Callable[[Path], Files], tuple[str, ...]]] = {
    **{family: (make, TEXTS) for family, make in {**FAMILIES, "whisper": whisper}.items()},
    "marian target": (marian, TEXTS),
    "marian-separate target": (lambda folder: marian(folder, separate=True), TEXTS),
    **{f"{name} pieces": (lambda folder, name=name: only_pieces(folder, name), TEXTS) for name in BY_PIECES},
    **{
        f"{name} added": (lambda folder, name=name: with_added(folder, name, ADDED_FORMS[0]), ADDED_TEXTS)
        for name in CAN_ADD
    },
}


def _record() -> None:
    """Write `golden.jsonl`.

    The oracle is the tokenizer of transformers before it is saved. Where a folder has SentencePiece models
    only, it is sentencepiece: transformers would read them by the `tokenizers` library, which leaves
    decomposed Hangul as it is and drops accents.
    """
    lines = []
    for name, (make, texts) in GOLDEN_CASES.items():
        family, _, form = name.partition(" ")
        with tempfile.TemporaryDirectory() as folder:
            files = make(Path(folder))
            theirs, given = files.theirs, "text_target" if form == "target" else "text"
            if family in BY_PIECES and form:
                ids = [_piecewise(files, text, added=form == "added") for text in texts]
            else:
                if form == "added":
                    theirs = type(theirs).from_pretrained(folder)
                ids = [theirs(**{given: text}, add_special_tokens=False).input_ids for text in texts]
            options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            decoded = None if form == "added" else [theirs.decode(row, **options) for row in ids]
            line = {"family": name, "ids": ids, "texts": decoded}
            lines.append(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
    GOLDEN.write_text("".join(lines), encoding="utf-8")


def _piecewise(files: Files, text: str, *, added: bool) -> list[int]:
    """As classes of transformers 4 do it: sentencepiece cuts what is between added tokens."""
    (file,) = files.folder.glob("*.model")
    model, vocab = sentencepiece.SentencePieceProcessor(model_file=str(file)), files.theirs.get_vocab()
    first = files.config["vocab_size"] - len(ADDED) - 1
    ids: list[int] = []
    for part in re.split("|".join(f"({re.escape(name)})" for name in ADDED), text) if added else [text]:
        if added and part in ADDED:
            ids.append(first + ADDED.index(part))
        elif part:
            ids += [vocab.get(piece, vocab["<unk>"]) for piece in model.encode(part, out_type=str)]
    return ids


if __name__ == "__main__":
    _record()
