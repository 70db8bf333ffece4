import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.data.vectors import PieceVectors, read_vectors


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_text(text: str) -> Path:
        path = tmp_path / "vectors.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat sat", "the Cat 고양이", "cat"] * 5, 300)


def test_only_the_words_asked_for_are_kept(write: Callable[[str], Path]) -> None:
    path = write("the 1 2.5\ncat -1e-2 0\ndog 3 4\n")
    found = read_vectors(path, {"cat", "the", "bird"}, 2)
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "the": [1.0, 2.5],
        "cat": [pytest.approx(-0.01), 0.0],
    }


def test_word2vecs_first_line_and_spaces_at_the_end_are_understood(write: Callable[[str], Path]) -> None:
    path = write("3 2\nthe 1 2 \ncat 3 4 \n. . 5 6 \n")
    assert read_vectors(path, {"cat"}, 2)["cat"].tolist() == [3.0, 4.0]
    assert read_vectors(path, {". ."}, 2)[". ."].tolist() == [5.0, 6.0]  # some words hold a space


def test_a_file_may_be_gzip_and_the_first_of_equal_words_counts(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt.gz"
    path.write_bytes(gzip.compress("고양이 1 2\n고양이 3 4\n".encode()))
    assert read_vectors(path, {"고양이"}, 2)["고양이"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 300\nthe 1 2\n", "line 1: vectors of 300 numbers, but d_model is 2"),
        ("the 1 2 3\n", "line 1: vectors of 3 numbers, but d_model is 2"),
        ("the 1 2\ncat 1\n", "line 2: expected a word and 2 numbers, got 'cat 1'"),
        (
            "the 1 2\ncat 1 two\n",
            "line 2: not a word and 2 numbers (could not convert string to float: 'two')",
        ),
        ("the 1 2\ncat nan 1\n", "line 2: a number is infinite or undefined"),
        ("3 2\nthe 1 2\ncat 1 2\n", ": 2 words, but its first line says 3: the file is truncated"),
        ("", ": 0 lines and no word in them"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(
    write: Callable[[str], Path], text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=r"vectors\.txt") as caught:
        read_vectors(write(text), {"the", "cat"}, 2)
    assert message in str(caught.value)


def test_pieces_that_are_words_get_their_vectors(write: Callable[[str], Path], tokenizer: Tokenizer) -> None:
    path = write("cat 3 0\n고양이 0 4\nunknown 9 9\n<unk> 9 9\n")
    found = PieceVectors.of(path, tokenizer, 2)
    texts = [tokenizer.decode([id_]) for id_ in found.ids.tolist()]
    assert set(texts) == {"cat", " cat", "Cat", " Cat", " 고양이"}  # some by their lower case
    # Alike in scale: of the size that embeddings of width 2 start with, sqrt(1 / 2).
    assert found.vectors.square().mean().sqrt().item() == pytest.approx(0.5**0.5)
    by_text = dict(zip(texts, found.vectors, strict=True))
    torch.testing.assert_close(by_text["cat"], by_text[" Cat"])
    assert (by_text["cat"][0] / by_text[" 고양이"][1]).item() == pytest.approx(3 / 4)


def test_a_file_without_any_piece_is_refused(write: Callable[[str], Path], tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="none of its words is a piece of the vocabulary"):
        PieceVectors.of(write("unheard-of 1 2\n"), tokenizer, 2)


def test_vectors_of_zeros_stay_zeros(write: Callable[[str], Path], tokenizer: Tokenizer) -> None:
    assert PieceVectors.of(write("cat 0 0\n"), tokenizer, 2).vectors.abs().max() == 0


def test_they_are_written_to_their_rows_and_can_be_held_there(tmp_path: Path) -> None:
    vectors = PieceVectors(torch.tensor([5, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    vectors.save(tmp_path / "vectors.pt")
    vectors = PieceVectors.load(tmp_path / "vectors.pt")
    embedding = nn.Embedding(6, 2)
    before = embedding.weight.detach().clone()
    vectors.write_to(embedding)
    assert embedding.weight[[5, 2]].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert torch.equal(embedding.weight[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    vectors.hold(embedding)  # before there is a gradient
    embedding.weight.sum().backward()
    vectors.hold(embedding)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.sum(1).tolist() == [2.0, 2.0, 0.0, 2.0, 2.0, 0.0]
