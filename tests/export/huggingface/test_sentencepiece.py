"""Tokenizers made from SentencePiece models of all kinds against sentencepiece itself."""

import pytest
import sentencepiece

from seq2seq_serve.bundle.charsmap import HIDDEN
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.huggingface.sentencepiece import SPACE, PieceType, SentencePieceModel
from tests.export.huggingface.tokenizer_files import CONTROL_TEXTS, HARD_TEXTS, sentences, spm

KINDS = {
    "plain": {},
    "without a charsmap": {"normalization_rule_name": "identity"},
    "lower case": {"normalization_rule_name": "nmt_nfkc_cf"},
    "all spaces": {"remove_extra_whitespaces": False},
    "no space in front": {"add_dummy_prefix": False},
    "bytes": {"byte_fallback": True},
    "across words": {"split_by_whitespace": False},
    "with control pieces": {"control_symbols": ("<sep>", "<x>")},
}


def written(content: bytes, folder) -> SentencePieceModel:
    path = folder / "a.model"
    path.write_bytes(content)
    return SentencePieceModel.read(path)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_its_ids_and_texts_are_those_of_sentencepiece(kind, options, tmp_path):
    content = spm(kind, **options)
    model = written(content, tmp_path)
    special = {
        p.text: i for i, p in enumerate(model.pieces) if p.type in (PieceType.CONTROL, PieceType.UNKNOWN)
    }
    tokenizer = Tokenizer(model.tokenizer({p.text: i for i, p in enumerate(model.pieces)}, "<unk>", special))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=content)
    texts = [
        text
        for text in (*sentences(150, 11), *HARD_TEXTS, *CONTROL_TEXTS, "<sep> a<x>")
        if not {"\0", HIDDEN} & {*text}
    ]
    differ = 0
    for text in texts:
        ids, expected = tokenizer.encode(text), oracle.encode(text)
        differ += ids != expected
        assert sorted(ids) == sorted(expected), text  # another order of the same pieces is a tie
        if oracle.unk_id() not in ids:
            # sentencepiece drops all spaces at the beginning; here, as in `tokenizers`, one is dropped.
            assert tokenizer.decode(ids).lstrip(" ") == oracle.decode(ids).lstrip(" ")
    assert differ <= 0.01 * len(texts)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_time_is_linear_in_a_run_of_spaces(kind, tmp_path):
    """The pattern of spaces at the end was tried at each place of a run: these would take ten minutes."""
    content = spm(kind)
    model = written(content, tmp_path)
    tokenizer = Tokenizer(model.tokenizer({p.text: i for i, p in enumerate(model.pieces)}, "<unk>", {}))
    assert tokenizer.encode(f"a{' ' * 400_000}b") == tokenizer.encode("a b")
    assert tokenizer.encode(f"a {SPACE * 400_000}") == tokenizer.encode("a")
    assert tokenizer.encode(f" {SPACE} ") == []


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        *((kind, {"use_all_vocab": True}, r"model_type is [34]") for kind in ("char", "word")),
        ("unigram", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix is 1"),
    ],
)
def test_kinds_that_are_not_supported_are_refused(kind, options, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        written(spm(kind, **options), tmp_path)
