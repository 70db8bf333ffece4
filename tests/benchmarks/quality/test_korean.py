import gzip
from pathlib import Path

import pytest

from benchmarks.quality.korean import EVERYDAY, split
from seq2seq_serve.training.data.text_files import SentencePair, read_lines, read_parallel


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
    everyday = f"0_3\t{read_lines(EVERYDAY)[0]}\tNot learnt"
    write(
        kosp2e / "stylekqc.train.tsv.gz",
        ["0_0\t셋\tThree", "0_1\t넷\tFour", "0_2\t데브\tNot the same", everyday],
    )
    write(kosp2e / "stylekqc.dev.tsv", ["1_0\t다섯\tFive", "1_1\t여섯\tThree?"])
    write(kosp2e / "stylekqc.test.tsv", ["2_0\t둘\tTwo", "2_1\t일곱\tSeven"])
    tatoeba = [f"Sentence {i}!\t문장의 {i}.\tCC-BY" for i in range(0, 800, 2)]
    write(tmp_path / "tatoeba" / "kor-eng.2023-02-20.txt.gz", tatoeba)
    return tmp_path


def keys(pairs: list[SentencePair]) -> set[str]:
    return {text.lower().strip(".!?") for pair in pairs for text in pair}


def parts(folder: Path) -> dict[str, list[SentencePair]]:
    found = {
        part: [SentencePair(*line.split("\t")) for line in read_lines(folder / f"{part}.tsv")]
        for part in ("train", "dev")
    }
    for name in ("KSS", "StyleKQC", "Tatoeba"):
        found[name] = read_parallel(folder / f"{name}.ko", folder / f"{name}.en")
    return found


def test_no_sentence_of_the_korean_corpora_is_in_two_parts(korean_data: Path, tmp_path: Path) -> None:
    split(korean_data, tmp_path / "parts")
    train, dev, *tests = parts(tmp_path / "parts").values()
    test = [pair for its in tests for pair in its]
    assert not keys(train) & keys(dev)
    assert not keys(train) & keys(test)
    assert not keys(dev) & keys(test)
    assert tests[1] == [("둘", "Two"), ("일곱", "Seven")]
    assert ("넷", "Four") in train
    assert ("셋", "Three") not in train  # its English is in dev, with another mark
    assert ("데브", "Not the same") not in train  # its Korean is in dev
    assert ("둘.", "Another two.") not in train  # its Korean is in a test set
    assert all(pair.target != "Not learnt" for pair in train)
    assert ("다섯", "Five") in dev
    assert 0.85 < len(train) / (400 + 400 + 3) < 1


def test_where_a_sentence_goes_does_not_depend_on_the_others(korean_data: Path, tmp_path: Path) -> None:
    split(korean_data, tmp_path / "before")
    write(korean_data / "tatoeba" / "kor-eng.2023-02-20.txt.gz", ["Sentence 2!\t문장의 2.\tCC-BY"])
    split(korean_data, tmp_path / "after")
    before, after = (read_lines(tmp_path / part / "KSS.ko") for part in ("before", "after"))
    assert before == after
    assert before


def test_a_line_with_other_columns_is_named(korean_data: Path, tmp_path: Path) -> None:
    write(korean_data / "ko_en_kosp2e" / "kss.dev.tsv", ["1_d\tone"])
    with pytest.raises(ValueError, match=r"kss\.dev\.tsv, line 1: expected 3 columns, found 2"):
        split(korean_data, tmp_path / "parts")
