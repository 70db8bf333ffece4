import dataclasses
import unicodedata
from pathlib import Path
from random import Random

import pytest

from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, load_corpus
from seq2seq_serve.training.data.sources import STORIES, Pictures
from seq2seq_serve.training.data.text_files import SentencePair


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_corpus_of_files_with_dev_files(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", b"a\tb\nc\td\n")
    source, target = write(tmp_path / "s", b"e\n"), write(tmp_path / "t", b"f\n")
    corpus = load_corpus(CorpusFiles(tsv=str(train), dev_source=str(source), dev_target=str(target)), seed=0)
    assert list(corpus.train) == [("a", "b"), ("c", "d")]
    assert len(corpus.train) == 2
    assert ("c", "d") in corpus.train
    assert corpus.dev == (("e", "f"),)
    assert corpus.test == ()


def test_held_out_pairs_share_no_side_with_training(tmp_path: Path) -> None:
    lines = [f"s{i % 90}\tt{i % 70}" for i in range(200)]
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", "\n".join(lines).encode())))
    corpus = load_corpus(files, seed=1)
    assert len(list(corpus.train)) == len(corpus.train)
    assert len(corpus.dev) == 10
    assert not {pair.source for pair in corpus.dev} & {pair.source for pair in corpus.train}
    assert not {pair.target for pair in corpus.dev} & {pair.target for pair in corpus.train}
    assert load_corpus(files, seed=1) == corpus
    assert load_corpus(files, seed=2) != corpus


def test_held_out_pairs_share_no_side_with_training_in_another_form_of_unicode(tmp_path: Path) -> None:
    """Training saw every dev pair of a corpus whose texts stand in it in NFC and in NFD."""
    pairs = [(f"{chr(0xAC00 + i)} x", f"é{i}") for i in range(100)]
    twins = [(unicodedata.normalize("NFD", source), f"é{i}  ") for i, (source, _) in enumerate(pairs)]
    lines = "\n".join("\t".join(pair) for pair in pairs + twins)
    corpus = load_corpus(CorpusFiles(tsv=str(write(tmp_path / "a.tsv", lines.encode()))), seed=1)
    held_out = {unicodedata.normalize("NFC", pair.source) for pair in corpus.dev}
    assert held_out
    assert not held_out & {unicodedata.normalize("NFC", pair.source) for pair in corpus.train}


def test_a_corpus_too_small_to_hold_out_wants_dev_files(tmp_path: Path) -> None:
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", b"a\tb\n")))
    with pytest.raises(ValueError, match="1 distinct pairs are too few to hold any out: give dev files"):
        load_corpus(files, seed=0)


def test_a_corpus_of_blank_lines_is_refused_with_the_reason(tmp_path: Path) -> None:
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", b" \t\na\t \n")))
    with pytest.raises(ValueError, match="all 2 pairs have an empty side: nothing to train on"):
        load_corpus(files, seed=0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source": "a"}, "give both source and target, or neither"),
        ({"source": "a", "target": "b", "tsv": "c"}, "give one of source with target, tsv and data"),
        ({"tsv": "a", "data": "b"}, "give one of source with target, tsv and data"),
        ({"data": "a", "dev_tsv": "b", "dev_data": "c"}, "give one of dev_source with dev_target, dev_tsv"),
        ({"tsv": "a", "source_field": "b"}, "source_field and target_field are of records: they go with"),
        ({"tsv": "a", "dev_target": "b"}, "give both dev_source and dev_target, or neither"),
        ({"dev_tsv": "a"}, "dev files need a training corpus: give source and target, tsv or data"),
    ],
)
def test_contradicting_files_are_refused(files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusFiles(**files)


def test_the_hash_tells_corpora_apart() -> None:
    a, b, c = SentencePair("a", "b"), SentencePair("c", "d"), SentencePair("e", "f")
    corpus = Corpus("one", (a, b), (c,))
    assert corpus.sha256() == Corpus("another name", (a, b), (c,)).sha256()
    others = [Corpus("", (b, a), (c,)), Corpus("", (a,), (b, c)), Corpus("", (a, b), (), (c,))]
    assert corpus.sha256() not in {other.sha256() for other in others}


def test_held_out_pairs_are_distinct_and_the_same_whether_from_a_file_or_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"s{i // 3}\tt{i // 3}" for i in range(300)] + [" \tt"]
    distinct = list(dict.fromkeys(lines[:-1]))
    expected = [tuple(line.split("\t")) for line in Random(4).sample(distinct, 5)]
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", "\n".join(lines).encode())))
    from_file = load_corpus(files, seed=4)
    assert list(from_file.dev) == expected
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    from_pipe = load_corpus(files, seed=4)
    assert isinstance(from_pipe.train, tuple)
    assert from_pipe == dataclasses.replace(from_file, train=tuple(from_file.train))


def test_a_file_that_changes_between_two_passes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"a\tb\nc\td\n")
    corpus = load_corpus(CorpusFiles(tsv=str(path), dev_tsv=str(path)), seed=0)
    with path.open("a") as stream:
        stream.write("e\tf\n")
    with pytest.raises(ValueError, match=r"a\.tsv changed while it was read: 3 pairs, before 2"):
        corpus.sha256()


def test_names_of_files_start_from_the_training_files_folder_and_do_not_depend_on_its_place(
    tmp_path: Path,
) -> None:
    hashes = set()
    for place in ("here", "there"):
        (tmp_path / place / "dev").mkdir(parents=True)
        train = write(tmp_path / place / "train.tsv", b"a.png\ta\n/photos/b.png\tb\n")
        dev = write(tmp_path / place / "dev" / "dev.tsv", b"c.png\tc\n/photos/d.png\td\n")
        corpus = load_corpus(CorpusFiles(tsv=str(train), dev_tsv=str(dev)), seed=0, kind=Pictures(8))
        assert corpus.folder == train.parent
        assert corpus.train == (("a.png", "a"), ("/photos/b.png", "b"))
        assert corpus.dev == (("dev/c.png", "c"), ("/photos/d.png", "d"))
        hashes.add(corpus.sha256())
    assert len(hashes) == 1


def test_held_out_sources_keep_all_their_targets(tmp_path: Path) -> None:
    lines = [f"{i // 3}.png\tcaption {i}" for i in range(120)]
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", "\n".join(lines).encode())))
    corpus = load_corpus(files, seed=0, kind=Pictures(8))
    assert (len(corpus.train), len(corpus.dev)) == (114, 6)
    assert not {pair.source for pair in corpus.dev} & {pair.source for pair in corpus.train}
    few = CorpusFiles(tsv=str(write(tmp_path / "b.tsv", b"a.png\ta\na.png\tb\n")))
    with pytest.raises(ValueError, match="1 distinct sources are too few to hold any out: give dev files"):
        load_corpus(few, seed=0, kind=Pictures(8))


def test_stories_are_not_taken_for_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    train = write(tmp_path / "train.tsv", b"Sam goes. Where?\tthere\n")
    dev = write(tmp_path / "dev" / "dev.tsv", b"Sam runs. Where?\there\n")
    corpus = load_corpus(CorpusFiles(tsv=str(train), dev_tsv=str(dev)), seed=0, kind=STORIES)
    assert corpus.dev == (("Sam runs. Where?", "here"),)
