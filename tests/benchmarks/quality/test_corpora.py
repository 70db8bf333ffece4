import gzip
from pathlib import Path

import pytest

from benchmarks.quality.corpora import EVERYDAY_SENTENCES, korean, multi30k
from seq2seq_serve.training.data.corpus import CorpusFiles, SentencePair, load_corpus


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def korean_data(tmp_path: Path) -> Path:
    """Three corpora of numbered sentences, some of which are in several of them."""
    kosp2e = tmp_path / "ko_en_kosp2e"
    kss = [f"1_{i}\t문장 {i}.\tSentence {i}." for i in range(400)]
    write(kosp2e / "kss.train.tsv.gz", [*kss, "1_x\t하나.\tOne!", "1_y\t둘.\tAnother two."])
    write(kosp2e / "kss.dev.tsv", ["1_d\t하나 하나\tone", "1_e\t데브\tIn dev"])
    everyday = f"0_3\t{EVERYDAY_SENTENCES[0]}\tNot learnt"
    write(
        kosp2e / "stylekqc.train.tsv.gz",
        ["0_0\t셋\tThree", "0_1\t넷\tFour", "0_2\t데브\tNot the same", everyday],
    )
    write(kosp2e / "stylekqc.dev.tsv", ["1_0\t다섯\tFive", "1_1\t여섯\tThree?"])
    write(kosp2e / "stylekqc.test.tsv", ["2_0\t둘\tTwo", "2_1\t일곱\tSeven"])
    tatoeba = [f"Sentence {i}!\t문장의 {i}.\tCC-BY" for i in range(0, 800, 2)]
    write(tmp_path / "tatoeba" / "kor-eng.2023-02-20.txt.gz", tatoeba)
    return tmp_path


def keys(pairs: list[SentencePair] | tuple[SentencePair, ...]) -> set[str]:
    return {text.lower().strip(".!?") for pair in pairs for text in pair}


def test_no_sentence_of_the_korean_corpora_is_in_two_parts(korean_data: Path, tmp_path: Path) -> None:
    task = korean(korean_data, tmp_path / "parts")
    corpus = load_corpus(task.files, seed=0)
    test = [pair for scored in task.scored_sets for pair in scored.pairs]
    assert not keys(corpus.train) & keys(corpus.dev)
    assert not keys(corpus.train) & keys(test)
    assert not keys(corpus.dev) & keys(test)
    assert [scored.name for scored in task.scored_sets] == ["KSS", "StyleKQC", "Tatoeba"]
    assert task.scored_sets[1].pairs == [("둘", "Two"), ("일곱", "Seven")]
    train = set(corpus.train)
    assert ("넷", "Four") in train
    assert ("셋", "Three") not in train  # its English is in dev, with another mark
    assert ("데브", "Not the same") not in train  # its Korean is in dev
    assert ("둘.", "Another two.") not in train  # its Korean is in a test set
    assert all(pair.target != "Not learnt" for pair in train)
    assert ("다섯", "Five") in corpus.dev
    assert 0.85 < len(train) / (400 + 400 + 3) < 1


def test_where_a_sentence_goes_does_not_depend_on_the_others(korean_data: Path, tmp_path: Path) -> None:
    before = korean(korean_data, tmp_path / "before")
    write(korean_data / "tatoeba" / "kor-eng.2023-02-20.txt.gz", ["Sentence 2!\t문장의 2.\tCC-BY"])
    after = korean(korean_data, tmp_path / "after")
    assert before.scored_sets[0].pairs == after.scored_sets[0].pairs
    assert before.scored_sets[0].pairs
    assert before.scored_sets[2].pairs


def test_a_line_with_other_columns_is_named(korean_data: Path, tmp_path: Path) -> None:
    write(korean_data / "ko_en_kosp2e" / "kss.dev.tsv", ["1_d\tone"])
    with pytest.raises(ValueError, match=r"kss\.dev\.tsv, line 1: expected 3 columns, found 2"):
        korean(korean_data, tmp_path / "parts")


def test_a_direction_of_multi30k_has_its_files_and_its_references(tmp_path: Path) -> None:
    for language in ("en", "de"):
        write(tmp_path / "tok" / f"test_2016_flickr.lc.norm.tok.{language}.gz", [f"{language} ."])
        write(tmp_path / f"test_2016_flickr.{language}.gz", [f"{language.title()}."])
    task = multi30k(tmp_path, "de-en")
    tokens = tmp_path / "tok"
    assert task.files == CorpusFiles(
        source=str(tokens / "train.lc.norm.tok.de.gz"),
        target=str(tokens / "train.lc.norm.tok.en.gz"),
        dev_source=str(tokens / "val.lc.norm.tok.de.gz"),
        dev_target=str(tokens / "val.lc.norm.tok.en.gz"),
    )
    (scored,) = task.scored_sets
    assert scored.pairs == [("de .", "en .")]
    assert scored.detokenised is not None
    assert (scored.detokenised.language, scored.detokenised.references) == ("en", ["En."])
    assert task.metric.tokenization == "none"
    assert task.published is None
    assert multi30k(tmp_path, "en-de").published is not None
