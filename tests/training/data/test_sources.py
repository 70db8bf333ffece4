"""Each kind of sources: from a corpus' text to the arrays of a request and of a batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.sentences import MAX_WORDS
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import EOS_ID, PAD_ID
from seq2seq_serve.training.data import sources
from seq2seq_serve.training.data.encoded import passing_pairs
from seq2seq_serve.training.data.filters import CorpusFilters
from seq2seq_serve.training.data.sources import (
    NOTHING,
    STORIES,
    TOKENS,
    Clips,
    Features,
    Pictures,
    SourceKind,
)
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.data.tokenizer import train_tokenizer, train_word_tokenizer

V = 50
KINDS: dict[str, SourceKind] = {
    "tokens": TOKENS,
    "stories": STORIES,
    "pictures": Pictures(8),
    "clips": Clips(8),
    "features": Features(3),
    "nothing": NOTHING,
}
SOURCES = {
    "tokens": ["ab", "abcde"],
    "stories": ["Sam goes to the garden. Sam is there? Where is Sam?", "Sam goes. Where?"],
    "pictures": ["a.png", "그림.png"],
    "clips": ["a.png", "그림.png"],
    "features": ["a.npy", "둘.npy"],
    "nothing": ["0", "1"],
}
LENGTHS = {
    "tokens": [3, 6],
    "stories": [2, 1],
    "pictures": [4, 4],
    "clips": [3, 2],
    "features": [5, 1],
    "nothing": [1, 1],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_word_tokenizer(SOURCES["stories"], V)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of `SOURCES`: clips of three and two frames, and features of five and one."""
    rng = np.random.default_rng(0)
    for name, num_frames, num_annotations in (("a", 3, 5), ("그림", 2, 1)):
        first, *others = map(Image.fromarray, rng.integers(0, 256, (num_frames, 8, 8, 3), np.uint8))
        first.save(tmp_path / f"{name}.png", save_all=True, append_images=others)
        name = "둘" if name == "그림" else name
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((num_annotations, 3)))
    return tmp_path


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_has_the_inputs_of_its_rows_and_zeros_after_them(name, tokenizer, folder):
    kind = KINDS[name].in_folder(folder)
    encoded = kind.encode(SOURCES[name], tokenizer if kind.has_word_tokens else train_tokenizer([], 260))
    assert [kind.length(source) for source in encoded] == LENGTHS[name]
    rows = [kind.inputs(source) for source in encoded]
    *columns, mask = kind.collate(encoded)
    assert mask.tolist() == [
        [position < length for position in range(max(LENGTHS[name]))] for length in LENGTHS[name]
    ]
    assert list(rows[0]) == list(kind.forms)
    for column, form in zip(columns, kind.forms, strict=True):
        for padded, row in zip(column.numpy(), rows, strict=True):
            assert padded.dtype == row[form].dtype
            here = tuple(map(slice, row[form].shape))
            np.testing.assert_array_equal(padded[here], row[form])
            padded[here] = 0
            assert not padded.any()
    for tensor, again in zip(kind.collate(encoded), kind.tensors(rows), strict=True):
        assert torch.equal(tensor, again)


@pytest.mark.parametrize("name", KINDS)
def test_random_sources_have_the_length_and_are_the_same_for_the_same_seed(name):
    kind = KINDS[name]
    lengths = [4, 1, 6]
    batches = []
    for _ in range(2):
        rng = np.random.default_rng(5)
        rows = [kind.random(rng, length, V) for length in lengths]
        assert all(list(row) == list(kind.forms) for row in rows)
        batches.append(kind.tensors(rows))
    for tensor, again in zip(*batches, strict=True):
        assert torch.equal(tensor, again)
    fixed = kind.memory.constant
    assert batches[0][-1].sum(1).tolist() == ([fixed] * 3 if fixed else lengths)


def test_a_text_ends_with_eos():
    tokenizer = train_tokenizer([], 260)
    encoded = TOKENS.encode(["ab"], tokenizer)
    assert encoded == [[*tokenizer.encode("ab"), EOS_ID]]
    assert TOKENS.inputs(encoded[0])[names.SOURCE_IDS].tolist() == encoded[0]


def test_the_last_sentence_of_a_story_is_the_question(tokenizer):
    (encoded,) = STORIES.encode(["Sam goes to the garden. Sam goes. Where is Sam?"], tokenizer)
    inputs = STORIES.inputs(encoded)
    story = [tokenizer.encode(text) for text in ("sam goes to the garden", "sam goes")]
    assert inputs[names.STORY].tolist() == [story[0], story[1] + [PAD_ID] * 3]
    assert inputs[names.QUESTION].tolist() == tokenizer.encode("where is sam")


def test_stories_that_the_server_refuses_are_dropped(tokenizer):
    longest, too_long = "sam " * MAX_WORDS, "sam " * (MAX_WORDS + 1)
    texts = [f"{longest}. {longest}?", f"{too_long}. Where?", f"Sam goes. {too_long}?", "Where?"]
    pairs = [SentencePair(text, "sam") for text in texts]
    kept, report = passing_pairs(pairs, tokenizer, CorpusFilters(9, 9, max_characters=400), STORIES)
    assert kept == [SentencePair(tokenizer.normalize(texts[0]), "sam")]
    assert (report.dropped["too long"], report.dropped["empty"]) == (2, 1)


def test_relative_names_start_from_the_folder_and_absolute_ones_stay(tokenizer, folder, monkeypatch):
    pictures = Pictures(8).in_folder(folder)
    relative, absolute = pictures.encode(["a.png", str(folder / "a.png")], tokenizer)
    assert bytes(relative) == b"a.png"
    expected = pictures.inputs(absolute)[names.PICTURE]
    np.testing.assert_array_equal(pictures.inputs(relative)[names.PICTURE], expected)
    monkeypatch.chdir(folder)
    np.testing.assert_array_equal(Pictures(8).inputs(relative)[names.PICTURE], expected)


@pytest.mark.parametrize("kind", [Pictures(8), Clips(8), Features(3)])
def test_a_missing_file_is_named_when_it_is_encoded_and_when_it_is_read(kind, tokenizer, folder):
    kind = kind.in_folder(folder)
    with pytest.raises(ValueError, match=r"/gone\.png: no such file"):
        kind.encode(["a.png", "gone.png"], tokenizer)
    (source,) = kind.encode(["a.png"], tokenizer)
    (folder / "a.png").unlink()
    with pytest.raises(ValueError, match=r"/a\.png: No such file or directory"):
        kind.inputs(source)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (Pictures(8), b"", "not PNG, JPEG, WebP or GIF"),
        (Clips(8), b"a text", "not PNG, JPEG, WebP or GIF"),
        (Features(3), b"", "EOF: reading magic string"),
        (Features(3), b"PK\3\4 an archive of arrays", "the magic string is not correct"),
    ],
)
def test_a_file_of_another_format_is_refused_with_its_name(kind, content, message, tmp_path):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=f"/bad: .*{message}"):
        kind.in_folder(tmp_path).inputs(list(b"bad"))


def test_a_damaged_clip_is_named_when_its_frames_are_counted(tmp_path):
    (tmp_path / "bad").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="/bad: "):
        Clips(8).in_folder(tmp_path).length(list(b"bad"))


def test_a_clip_with_too_many_frames_is_refused_when_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_FRAMES", 2)
    with pytest.raises(ValueError, match=r"/a\.png: the clip has 3 frames, and at most 2 are read"):
        Clips(8).in_folder(folder).inputs(list(b"a.png"))


def test_features_that_are_python_objects_are_refused(tmp_path):
    np.save(tmp_path / "bad.npy", np.array([[{}]]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"/bad\.npy: Array can.t be memory-mapped"):
        Features(1).in_folder(tmp_path).inputs(list(b"bad.npy"))
