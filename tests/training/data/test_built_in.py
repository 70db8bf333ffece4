"""The built-in corpora of stories, pictures, captions and clips; `test_korean_english` has that of texts."""

from pathlib import Path

import pytest

from seq2seq_serve.bundle.pictures import count_frames, read_picture
from seq2seq_serve.training.builtin import shapes
from seq2seq_serve.training.data import built_in
from seq2seq_serve.training.data.built_in import built_in_parts
from seq2seq_serve.training.data.corpus import built_in_corpus
from seq2seq_serve.training.data.sources import NOTHING, STORIES, Clips, Pictures, SourceKind

SIZES = {"train": 4, "dev": 2, "test": 3}
KINDS: dict[str, SourceKind] = {
    "built-in pictures": Pictures(56),
    "captions of the built-in pictures": NOTHING,
    "built-in clips": Clips(56),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_NUM_PICTURES", "_NUM_CLIPS"):
        monkeypatch.setattr(built_in, name, SIZES)


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of each file by its name from the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", KINDS)
def test_a_corpus_and_its_hash_are_the_same_in_every_folder(name, tmp_path):
    here, there = (built_in_corpus(KINDS[name], tmp_path / folder) for folder in ("here", "there"))
    assert here.description == name
    assert [len(part) for part in (here.train, here.dev, here.test)] == list(SIZES.values())
    assert (here.train, here.dev, here.test) == (there.train, there.dev, there.test)
    assert here.sha256() == there.sha256()
    assert files_in(tmp_path / "here") == files_in(tmp_path / "there")


@pytest.mark.parametrize("kind", [Pictures(56), Clips(56)])
def test_a_corpus_names_each_file_that_it_wrote(kind, tmp_path):
    _, parts = built_in_parts(kind, tmp_path)
    expected = [f"{split}/{number:05d}.png" for split, size in SIZES.items() for number in range(size)]
    assert [pair.source for part in parts.values() for pair in part] == expected
    files = files_in(tmp_path)
    assert sorted(files) == sorted(expected)
    assert len(set(files.values())) == len(files)
    for content in files.values():
        assert (count_frames(content) > 1) == isinstance(kind, Clips)


def test_pictures_are_the_scenes_of_their_captions(tmp_path):
    _, parts = built_in_parts(Pictures(56), tmp_path)
    for split, pairs in parts.items():
        for pair, scene in zip(pairs, shapes.generate(len(pairs), split=split), strict=True):
            picture = read_picture((tmp_path / pair.source).read_bytes(), shapes.SIZE_PIXELS)
            assert (picture == scene.picture).all()
            assert shapes.is_right(scene, pair.target)


def test_a_language_model_gets_the_captions_without_files(tmp_path):
    _, parts = built_in_parts(NOTHING, tmp_path / "none")
    _, pictures = built_in_parts(Pictures(56), tmp_path)
    for split in SIZES:
        assert [pair.target for pair in parts[split]] == [pair.target for pair in pictures[split]]
    sources = [pair.source for part in parts.values() for pair in part]
    assert len(set(sources)) == len(sources)
    assert not (tmp_path / "none").exists()


def test_the_stories_are_those_of_the_published_scores():
    corpus = built_in_corpus(STORIES)
    assert corpus.sha256() == "e508c3fd9dda114c8e8299a58c2debcb147983ef57d537b22935068013dcf9de"
