"""Folders with the tokenizer files of each family, trained on made-up sentences of many scripts.

A folder is as `save_pretrained` writes it, if its function does not say otherwise.
"""

import dataclasses
import functools
import io
import json
import random
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.utils import sentencepiece_model_pb2_new as protobuf

from seq2seq_serve.bundle.charsmap import HIDDEN
from seq2seq_serve.training.huggingface.tokenizers import ImportedTokenizers, read_tokenizers

_BLOCKS = {
    "latin": (0x61, 0x7A),
    "accents": (0xE0, 0xF6),
    "vietnamese": (0x1EA0, 0x1EF9),
    "greek": (0x3B1, 0x3C9),
    "cyrillic": (0x430, 0x44F),
    "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x627, 0x64A),
    "hindi": (0x905, 0x939),
    "thai": (0xE01, 0xE2E),
    "kana": (0x3041, 0x3093),
    "chinese": (0x4E00, 0x4EFF),
    "korean": (0xAC00, 0xAEFF),
}
# Texts that have found differences between tokenizers.
HARD_TEXTS = (
    "",
    " ",
    "two  spaces",
    "a space at the end ",
    "  and at the beginning",
    "tab\there",
    "a line\nand another\r\n\nlast",
    "no\u00a0break",
    "zero\u200bwidth",
    "soft\u00adhyphen",
    "ﬁne ﬂag",
    "２０２６年",
    "ｶﾞｷﾞｸﾞ ﾊﾟ",
    "e\u0301 a\u0323\u0301 Ａ\u0301 か\u3099",
    unicodedata.normalize("NFD", "오늘은 금요일입니다 각각 힣"),
    "شَّ مُحَمَّد",
    "क़लम ज़मीन",
    "น้ำ กำ",
    "👨‍👩‍👧 🎉🏳️‍🌈 ☎️",
    "\u2581",
    "\u2581a \u2581 b\u2581",
    "a\x00b",
    "\x07bell",
    "\ufeffbom",
    "Ⅷ ㎏ ½ ℡ ™",
    "\ufdd0",
    "\ue000",
    "…—“quoted”",
)
_MARKS = ["</s>", "<pad>", "<unk>", "<s>", "<extra_id_0>", "<mask>"]
CONTROL_TEXTS = [*_MARKS, "a</s>b", "en_XX", "__ko__ a", "kor_Hang"]


@cache
def _lexicon() -> dict[str, list[str]]:
    chance = random.Random(7)
    return {
        name: ["".join(chr(chance.randint(*block)) for _ in range(chance.randint(1, 7))) for _ in range(150)]
        for name, block in _BLOCKS.items()
    }


@cache
def sentences(count: int, seed: int) -> tuple[str, ...]:
    """Sentences of several scripts with digits, marks, and now and then something odd."""
    chance, lexicon = random.Random(seed), _lexicon()
    letters = list(_BLOCKS.values())
    texts = []
    for _ in range(count):
        words: list[str] = []
        for script in chance.sample(sorted(lexicon), chance.randint(1, 2)):
            words += [lexicon[script][int(150 * chance.random() ** 2)] for _ in range(chance.randint(1, 6))]
        for _ in range(chance.randint(0, 2)):
            odd = [
                str(chance.randint(0, 9999)),
                chance.choice(HARD_TEXTS),
                chance.choice("🎉🙂漢Ａｶ½ﬁ・؟ฯ۞Ж"),
            ]
            odd.append("".join(chr(chance.randint(*chance.choice(letters))) for _ in range(3)))
            chosen = chance.choice(odd)
            words.insert(chance.randint(0, len(words)), chosen)
        text = " ".join(words).capitalize() + chance.choice(["", ".", "!", " ?", "。"])
        texts.append(unicodedata.normalize("NFD", text) if chance.random() < 0.15 else text)
    return tuple(texts)


@cache
def spm(kind: str, seed: int = 0, **options: Any) -> bytes:
    """A SentencePiece model with the charsmap of `nmt_nfkc`."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for text in sentences(3000, seed) if not {"\0", HIDDEN} & {*text}),
        model_writer=content,
        model_type=kind,
        vocab_size=1800,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return content.getvalue()


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


def imported(files: Files) -> ImportedTokenizers:
    """The tokenizers that an export reads from the folder."""
    return read_tokenizers(files.folder, files.family, files.config, files.generation)


def marian(folder: Path, *, separate: bool = False, languages: tuple[str, ...] = ()) -> Files:
    """Two models, of which vocab.json has almost all pieces; the source does not know all scripts.

    As published: `save_pretrained` was not called.
    """
    sides = [spm("unigram", 0), spm("unigram", 1, normalization_rule_name="nmt_nfkc_cf")]
    chance = random.Random(3)
    pieces = [[text for text, _ in scored(content) if chance.random() < 0.98] for content in sides]
    vocabs = pieces if separate else [[*pieces[0], *pieces[1]]]
    special, sizes = ["</s>", "<unk>", *(f">>{name}<<" for name in languages)], []
    files = [folder / name for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json")]
    for file, content in zip(files[:2], sides, strict=True):
        file.write_bytes(content)
    for file, texts in zip(files[2:], vocabs, strict=False):
        tokens = dict.fromkeys([*special, *(text for text in texts if text != "<s>"), "<pad>"])
        file.write_text(json.dumps({text: i for i, text in enumerate(tokens)}))
        sizes.append(len(tokens))
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": sizes[0], "decoder_vocab_size": sizes[-1], "pad_token_id": sizes[-1] - 1}
    generation = {"decoder_start_token_id": sizes[-1] - 1, "pad_token_id": sizes[0] - 1}
    given = [str(file) for file in files if file.exists()]
    theirs = transformers.MarianTokenizer(*given, separate_vocabs=separate)
    return Files(folder, "marian", config, generation, theirs)


def m2m100(folder: Path) -> Files:
    """Byte pairs of a SentencePiece model; the languages follow vocab.json."""
    content, files = spm("bpe", bos_id=0, pad_id=1, eos_id=2, unk_id=3), ("vocab.json", _PIECES)
    vocab = {text: i for i, (text, _) in enumerate(scored(content))}
    (folder / files[0]).write_text(json.dumps(vocab))
    (folder / files[1]).write_bytes(content)
    theirs = transformers.M2M100Tokenizer(*(str(folder / name) for name in files), src_lang="en")
    made = _saved(folder, "m2m100", theirs, {"decoder_start_token_id": 2})
    return dataclasses.replace(made, config={"vocab_size": len(vocab) + 108})


_PIECES = "sentencepiece.bpe.model"
_OF_T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def _fairseq(content: bytes) -> list[tuple[str, float]]:
    return [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")] + scored(content)[3:]


def _charsmap(content: bytes) -> dict[str, Any]:
    return {"_spm_precompiled_charsmap": parsed(content).normalizer_spec.precompiled_charsmap}


def _saved(folder: Path, family: str, theirs: Any, generation: dict[str, Any]) -> Files:
    theirs.save_pretrained(folder)
    return Files(folder, family, {"vocab_size": len(theirs) + 5, "model_type": family}, generation, theirs)


def mbart(folder: Path) -> Files:
    languages = transformers.models.mbart.tokenization_mbart.FAIRSEQ_LANGUAGE_CODES
    vocab = _fairseq(spm("unigram")) + [(name, 0.0) for name in [*languages, "<mask>"]]
    return _saved(folder, "mbart", transformers.MBartTokenizer(vocab=vocab), {"pad_token_id": 1})


def mbart50(folder: Path) -> Files:
    content = spm("unigram")
    theirs = transformers.MBart50Tokenizer(vocab=scored(content), **_charsmap(content))
    return _saved(folder, "mbart50", theirs, {"decoder_start_token_id": 2})


def nllb(folder: Path) -> Files:
    content = spm("bpe")
    vocab = {text: i for i, (text, _) in enumerate(_fairseq(content))}
    merges = [
        halves
        for text, _ in scored(content)[3:]
        for halves in ((text[:i], text[i:]) for i in range(1, len(text)))
        if {*halves} <= vocab.keys()
    ]
    theirs = transformers.NllbTokenizer(vocab=vocab, merges=merges, **_charsmap(content))
    return _saved(folder, "nllb", theirs, {"decoder_start_token_id": 2})


def t5(folder: Path, family: str = "t5") -> Files:
    content = spm("unigram", **_OF_T5)
    vocab = scored(content) + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    theirs = transformers.T5Tokenizer(vocab=vocab, **_charsmap(content))
    return _saved(folder, family, theirs, {"decoder_start_token_id": 0})


def pegasus(folder: Path) -> Files:
    content = spm("unigram", **_OF_T5)
    first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103))]
    vocab = [(name, 0.0) for name in first] + scored(content)[2:]
    theirs = transformers.PegasusTokenizer(vocab=vocab, **_charsmap(content))
    return _saved(folder, "pegasus", theirs, {"decoder_start_token_id": 0})


@cache
def _byte_pairs(special: tuple[str, ...] = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")) -> dict[str, Any]:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return _trained(inner, special, vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


@cache
def _byte_fallback_pairs() -> dict[str, Any]:
    """Byte pairs that know some scripts only, with tokens for the bytes of others."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _trained(inner, special, vocab_size=1200, limit_alphabet=300)


def _trained(inner: tokenizers.Tokenizer, special: Iterable[str], **options: Any) -> dict[str, Any]:
    """The arguments of a class of transformers."""
    trainer = trainers.BpeTrainer(special_tokens=list(special), show_progress=False, **options)
    inner.train_from_iterator(sentences(3000, 0), trainer)
    model = json.loads(inner.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def bart(folder: Path) -> Files:
    return _saved(folder, "bart", transformers.BartTokenizer(**_byte_pairs()), {"decoder_start_token_id": 2})


def trocr(folder: Path) -> Files:
    """A model for print, with the settings of its pictures."""
    _picture_settings(folder, resample=2)
    theirs = transformers.RobertaTokenizer(**_byte_pairs())
    return _saved(folder, "trocr", theirs, {"decoder_start_token_id": 2, "eos_token_id": 2})


def trocr_small(folder: Path) -> Files:
    """A small model, with unusual settings of its pictures."""
    _picture_settings(folder, resample=3, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    theirs = transformers.XLMRobertaTokenizer(vocab=[*_fairseq(spm("unigram")), ("<mask>", 0.0)])
    return _saved(folder, "trocr", theirs, {"decoder_start_token_id": 2, "eos_token_id": 2})


def _picture_settings(folder: Path, **settings: Any) -> None:
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessorPil(size=size, **settings).save_pretrained(folder)


def blenderbot(folder: Path) -> Files:
    theirs = transformers.BlenderbotTokenizer(**_byte_pairs())
    return _saved(folder, "blenderbot", theirs, {"decoder_start_token_id": 1})


def whisper(folder: Path) -> Files:
    """With three languages and the times of 0.64 seconds."""
    pairs, languages, tasks = _byte_pairs(()), ["en", "de", "ko"], ["translate", "transcribe"]
    others = ["startoflm", "startofprev", "nospeech", "notimestamps"]
    special = ["endoftext", "startoftranscript", *languages, *tasks, *others]
    names = [f"<|{name}|>" for name in special]
    vocab = pairs["vocab"] | {names[0]: len(pairs["vocab"])}
    theirs = transformers.WhisperTokenizer(vocab, pairs["merges"])
    theirs.add_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    theirs.add_tokens([tokenizers.AddedToken(f"<|{i * 0.02:.2f}|>") for i in range(33)])
    ids = dict(zip(special, theirs.convert_tokens_to_ids(names), strict=True))
    generation = {
        "decoder_start_token_id": ids["startoftranscript"],
        **{f"{name}_token_id": ids["endoftext"] for name in ("bos", "pad", "eos")},
        "no_timestamps_token_id": ids["notimestamps"],
        "max_initial_timestamp_index": 10,
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[name] for name in languages},
        "task_to_id": {name: ids[name] for name in tasks},
        "suppress_tokens": [3, 40, 41, *(ids[name] for name in special[-5:-1])],
        "begin_suppress_tokens": [5, ids["endoftext"]],
    }
    config = {"vocab_size": len(theirs), "model_type": "whisper"}
    return dataclasses.replace(_saved(folder, "whisper", theirs, generation), config=config)


def byt5(folder: Path) -> Files:
    return _saved(folder, "byt5", transformers.ByT5Tokenizer(), {"decoder_start_token_id": 0})


def t5gemma(folder: Path, family: str = "t5gemma") -> Files:
    frame = {"add_bos_token": True, "add_eos_token": True, "extra_special_tokens": ["<mask>"]}
    theirs = transformers.GemmaTokenizer(**_byte_fallback_pairs(), **frame)
    return _saved(folder, family, theirs, {"decoder_start_token_id": 2})


_MAKERS = (marian, m2m100, mbart, mbart50, nllb, t5, pegasus, bart, blenderbot, byt5, trocr, t5gemma)
FAMILIES: dict[str, Callable[[Path], Files]] = {make.__name__: make for make in _MAKERS} | {
    "trocr-small": trocr_small,
    "mt5": functools.partial(t5, family="mt5"),
    "t5gemma2": functools.partial(t5gemma, family="t5gemma2"),
}


def only_pieces(folder: Path, family: str) -> Files:
    """The same checkpoint before 2021: a SentencePiece model and no tokenizer.json."""
    files = FAMILIES[family](folder)
    (folder / "tokenizer.json").unlink()
    ids = _OF_T5 if family in ("t5", "pegasus") else {}
    content = spm("bpe" if family == "nllb" else "unigram", **ids)
    (folder / ("spiece.model" if ids else _PIECES)).write_bytes(content)
    return files
