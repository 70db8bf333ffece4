"""Folders with the tokenizer files of each family, trained on made-up sentences of many scripts."""

import dataclasses
import io
import json
import random
import unicodedata
from collections.abc import Callable
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
CONTROL_TEXTS = (
    "</s>",
    "a</s>b",
    "<pad>",
    "<unk>",
    "<s>",
    "<extra_id_0>",
    "en_XX",
    "__ko__ a",
    "kor_Hang",
    "<mask>",
)


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
            odd = chance.choice(
                [
                    str(chance.randint(0, 9999)),
                    chance.choice(HARD_TEXTS),
                    chance.choice("🎉🙂漢Ａｶ½ﬁ・؟ฯ۞Ж"),
                    "".join(chr(chance.randint(*chance.choice(letters))) for _ in range(3)),
                ]
            )
            words.insert(chance.randint(0, len(words)), odd)
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


def marian(folder: Path, *, separate: bool = False, languages: tuple[str, ...] = ()) -> Files:
    """Two models, of which vocab.json has almost all pieces; the source does not know all scripts."""
    sides = [spm("unigram", 0), spm("unigram", 1, normalization_rule_name="nmt_nfkc_cf")]
    for name, content in zip(["source.spm", "target.spm"], sides, strict=True):
        (folder / name).write_bytes(content)
    chance = random.Random(3)
    pieces = [[text for text, _ in scored(content) if chance.random() < 0.98] for content in sides]
    vocabs = pieces if separate else [[*pieces[0], *pieces[1]]]
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
    pieces = [text for text, _ in scored(content)[3:]]
    merges = [
        (text[:i], text[i:])
        for text in pieces
        for i in range(1, len(text))
        if {text[:i], text[i:]} <= vocab.keys()
    ]
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
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(sentences(3000, 0), trainer)
    model = json.loads(inner.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


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
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=special, limit_alphabet=300, show_progress=False
    )
    inner.train_from_iterator(sentences(3000, 0), trainer)
    model = json.loads(inner.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


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


def only_pieces(folder: Path, family: str) -> Files:
    """The same checkpoint before 2021: a SentencePiece model and no tokenizer.json."""
    files = FAMILIES[family](folder)
    (folder / "tokenizer.json").unlink()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if family in ("t5", "pegasus") else {}
    name = "spiece.model" if ids else "sentencepiece.bpe.model"
    (folder / name).write_bytes(spm("bpe" if family == "nllb" else "unigram", **ids))
    return files
