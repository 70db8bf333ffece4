"""Text to ids and back, whole and piece by piece."""

import re

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from seq2seq_serve.bundle import tokenizer as tokenizer_module
from seq2seq_serve.bundle.characters import UNSPACED
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

TEXTS = [
    "오늘은 금요일입니다",
    "Today is Friday.",
    " two  spaces ",
    "🎉👨‍👩‍👧",
    "\n\t",
    "e\u0301",
    "\ufffd",
    "\x00",
]


@pytest.fixture(scope="session")
def tokenizer(random_trained) -> Tokenizer:
    return random_trained.tokenizer


any_text = st.text(max_size=40)
# Any ids, and halves of characters among whole ones.
any_ids = st.lists(
    st.one_of(st.integers(0, 299).map(str), st.tuples(st.sampled_from(TEXTS), st.integers(0, 9))), max_size=8
)


@pytest.mark.parametrize("text", TEXTS)
def test_hard_texts_come_back(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text)
    assert tokenizer.encode_source(text) == [*tokenizer.encode(text), EOS_ID]


def test_many_texts_at_once_are_the_same_as_one_by_one(tokenizer):
    sources = tokenizer.encode_sources(TEXTS)
    assert sources == [tokenizer.encode_source(text) for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.decode_batch(sources) == [tokenizer.normalize(text) for text in TEXTS]


@pytest.mark.parametrize("text", ["<eos>", "a<pad>b", "<bos><bos>", "<unk>"])
def test_a_special_token_that_a_user_types_is_text(text, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for each in (tokenizer, Tokenizer.load(tmp_path / "tokenizer.json")):
        for token_ids in (
            each.encode(text),
            each.encode_batch([text])[0],
            each.encode_sources([text])[0][:-1],
        ):
            assert not {PAD_ID, BOS_ID, EOS_ID, UNK_ID} & set(token_ids)
            assert each.decode(token_ids) == text


def test_special_tokens_have_no_text(tokenizer):
    token_ids = [BOS_ID, *tokenizer.encode("오늘"), EOS_ID, PAD_ID]
    assert tokenizer.decode(token_ids) == "오늘"
    stream = tokenizer.stream()
    assert stream.push(token_ids) + stream.finish() == "오늘"


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push([token_id]) for token_id in token_ids), stream.finish()]


@given(any_ids)
def test_streamed_pieces_joined_are_the_whole_text(tokenizer, parts):
    token_ids: list[int] = []
    for part in parts:
        token_ids += [int(part)] if isinstance(part, str) else tokenizer.encode(part[0])[part[1] :]
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(any_text)
@example("🎉👨‍👩‍👧 오늘")
def test_streamed_pieces_are_whole_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.normalize(text)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


@given(any_text, st.lists(st.integers(1, 5), min_size=1))
def test_it_does_not_matter_how_many_ids_come_at_once(tokenizer, text, sizes):
    token_ids = tokenizer.encode(text)
    stream, joined = tokenizer.stream(), ""
    while token_ids:
        size = sizes[len(joined) % len(sizes)]
        joined += stream.push(token_ids[:size])
        token_ids = token_ids[size:]
    assert joined + stream.finish() == tokenizer.normalize(text)


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer):
    token_ids = tokenizer.encode("ab") + tokenizer.encode("힣")[:-1]
    pieces = streamed(tokenizer, token_ids)
    assert "".join(pieces[:-1]) == "ab"
    assert pieces[-1] == tokenizer.decode(token_ids)[2:] == "\ufffd"
    stream = tokenizer.stream()
    stream.push(token_ids)
    stream.finish()
    assert stream.finish() == ""


@given(any_text)
@example("\ufffd")
@example("a\ufffd\ufffd")
@example("\ufffd 힣\ufffd")
def test_pieces_say_which_token_completes_what(tokenizer, text):
    token_ids = tokenizer.encode(text)
    pieces = tokenizer.pieces(token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == tokenizer.normalize(text)


def test_pieces_name_special_tokens_and_leave_half_characters_empty(tokenizer):
    hangul = tokenizer.encode("힣")
    assert len(hangul) == 3  # its bytes: the tokenizer never saw it
    pieces = tokenizer.pieces([BOS_ID, *hangul, EOS_ID, *tokenizer.encode("<eos>")])
    assert pieces[:5] == ["<bos>", "", "", "힣", "<eos>"]
    assert "".join(pieces[5:]) == "<eos>"
    replacement = tokenizer.encode("\ufffd")
    assert "".join(tokenizer.pieces([*replacement, EOS_ID])) == "\ufffd<eos>"
    assert tokenizer.pieces([*replacement, *hangul[:2]])[-2:] == ["", ""]


@given(any_ids)
def test_the_text_of_byte_level_pairs_is_what_the_library_decodes(tokenizer, parts):
    token_ids: list[int] = []
    for part in parts:
        token_ids += [int(part)] if isinstance(part, str) else tokenizer.encode(part[0])[part[1] :]
    expected = tokenizer._inner.decode(token_ids, skip_special_tokens=True)
    joined = b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids)
    assert tokenizer.decode(token_ids) == joined.decode("utf-8", "replace") == expected


def with_byte_fallback() -> Tokenizer:
    """Whole words with their space, single characters, and bytes for all others."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "\u2581a", "\u2581ab", "b", "금", "\u2581\u2581", "é"]
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *byte_tokens, *words])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    space = decoders.Replace("\u2581", " ")
    inner.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(inner)


@given(st.lists(st.one_of(st.integers(0, 265), st.sampled_from("금é힣🎉")), max_size=8))
@example(["a", 0xE2 + 2, 0x82 + 2, 0xAC + 2, 0xFF + 2, 3])  # "Invalid prefix" from the library's stream
def test_with_byte_fallback_the_text_is_that_of_the_bytes(parts):
    tokenizer, token_ids = FALLBACK, list[int]()
    for part in parts:
        token_ids += [part] if isinstance(part, int) else [byte + 2 for byte in part.encode()]
    joined = b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids)
    text = joined.removeprefix(b" ").decode("utf-8", "replace")
    assert tokenizer.decode(token_ids) == "".join(streamed(tokenizer, token_ids)) == text
    if "\ufffd" not in text:
        assert text == tokenizer._inner.decode(token_ids, skip_special_tokens=True)


FALLBACK = with_byte_fallback()


def test_the_id_of_a_token_is_known_or_refused_by_name(tokenizer):
    assert tokenizer.token_id("<eos>") == EOS_ID
    with pytest.raises(ValueError, match="no token '<sep>'"):
        tokenizer.token_id("<sep>")


@given(st.text())
def test_words_are_what_white_space_separates_and_share_out_the_tokens(tokenizer, text):
    ids = tokenizer.encode_source(text)
    words = tokenizer.words(ids)
    assert "".join(word for word, _ in words) == "".join(tokenizer.decode(ids).split())
    if not re.search(f"[{UNSPACED}]", text):
        assert [word for word, _ in words] == tokenizer.decode(ids).split()
    places = [place for _, places in words for place in places]
    assert places == sorted(set(places))
    assert len(ids) - 1 not in places  # the end of sequence
    for word, places in words:
        assert word in tokenizer.decode([ids[place] for place in places])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("私は学生です。", ["私", "は", "学", "生", "で", "す。"]),
        ("「私」は Python だ", ["「私」", "は", "Python", "だ"]),
        ("བོད་ཡིག", ["བོ", "ད་", "ཡི", "ག"]),
        ("々Go々", ["々", "Go", "々"]),
        ("ภาษาไทย", ["ภ", "า", "ษ", "า", "ไ", "ท", "ย"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("오늘은 금요일", ["오늘은", "금요일"]),
    ],
)
def test_words_of_scripts_without_spaces_end_with_their_tokens(text, words):
    tokenizer = FALLBACK
    found = tokenizer.words(tokenizer.encode(text))
    assert [word for word, _ in found] == words


@given(st.text(min_size=1), st.integers(2, 30))
def test_a_source_is_left_out_beyond_its_length_and_keeps_its_frame(tokenizer, text, max_length):
    inside = tokenizer.encode(text)
    room = max_length - 2
    ids, num_over = tokenizer.encode_truncated(text, max_length, [7], [EOS_ID])
    assert num_over == max(len(inside) - room, 0)
    assert ids == [7, *inside[:room], EOS_ID]


def test_a_very_long_text_is_cut_so_that_the_work_can_end(tokenizer):
    text = " ".join(TEXTS[:2] * 600)
    num_pieces = 0

    def before_piece():
        nonlocal num_pieces
        num_pieces += 1

    ids, num_over = tokenizer.encode_truncated(text, 16, [], [], before_piece)
    whole = tokenizer.encode(text)
    assert (ids, num_over) == (whole[:16], len(whole) - 16)
    assert 4 < num_pieces < 12

    def end_before_the_second():
        before_piece()
        if num_pieces == 2:
            raise InterruptedError

    num_pieces = 0
    with pytest.raises(InterruptedError):
        tokenizer.encode_truncated(text, 16, [], [], end_before_the_second)
    ids, num_over = tokenizer.encode_truncated("x" * 10_000, 16)  # without white space
    assert ids == tokenizer.encode("x" * 10_000)[:16]
    assert num_over > 0


def test_a_text_inside_a_longer_one_is_written_after_a_space_after_a_mark_and_first():
    inner = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "(": 3, "▁a": 4}, [("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(inner)
    assert tokenizer.spellings(["ab", "x", " "]) == [[(4, 2), (1, 2)], [], []]


def test_spellings_are_kept_up_to_a_bound(random_trained, monkeypatch):
    tokenizer, cut = Tokenizer.from_bytes(random_trained.tokenizer.to_json().encode(), "copy"), list[str]()
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: cut.extend(texts) or encode(texts))
    expected = tokenizer.spellings(["ab", "c", "ab"])
    del cut[:]
    assert tokenizer.spellings(["c", "ab"]) == [expected[1], expected[0]]
    assert not cut
    monkeypatch.setattr(tokenizer_module, "_MOST_KEPT", 1000)
    for number in range(50):
        tokenizer.spellings([f"{number} of many"])
    assert len(tokenizer._spellings) < 15
    assert tokenizer.spellings(["ab"]) == expected[:1]
    assert "(ab" in cut
