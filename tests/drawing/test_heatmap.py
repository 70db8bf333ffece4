import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import image

from seq2seq_serve.drawing.heatmap import save_heatmap

HEADS = [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3)]


def test_hangul_and_every_other_character_are_drawn_without_a_warning(tmp_path: Path) -> None:
    # Warnings are errors here, and matplotlib warns of a glyph that no font has.
    source = ["오늘", "은", " 금요일", "</s>", "", "\n", "😀", "ع", "$x^2$", "日本", "_a", "\ufffd", "€"]
    target = ["Today", " is", " Friday", ".", "</s>"]
    save_heatmap(np.eye(len(target), len(source)), target, source, tmp_path / "attention.png")
    pixels = image.imread(tmp_path / "attention.png")
    assert pixels.shape[1] > pixels.shape[0] > 200
    assert pixels[..., :3].min() == 0
    assert pixels[..., :3].max() == 1


def test_each_heatmap_of_a_grid_has_a_title_and_its_weights_in_its_place(tmp_path: Path) -> None:
    weights = np.zeros((2, 3, 4, 4))
    save_heatmap(weights, "abcd", "abcd", tmp_path / "heads.svg", HEADS)
    save_heatmap(weights, "abcd", "abcd", tmp_path / "black.png", HEADS)
    weights[0, 1, :, 0] = 1
    save_heatmap(weights, "abcd", "abcd", tmp_path / "heads.png", HEADS)

    svg = (tmp_path / "heads.svg").read_text()
    assert all(f"<!-- {title} -->" in svg for title in HEADS)
    black, found = (image.imread(tmp_path / name) for name in ("black.png", "heads.png"))
    rows, columns = (black != found).any(axis=-1).nonzero()
    height, width = black.shape[0], black.shape[1] - 105  # without the scale
    assert 0 < rows.min() < rows.max() < height / 2
    # The first column of the middle panel, and no wider than a cell of its four.
    assert width / 3 < columns.min() < columns.max() < width / 2
    assert columns.max() - columns.min() < width / 3 / 4


def test_a_scale_says_what_a_shade_means(tmp_path: Path) -> None:
    save_heatmap(np.eye(3), "abc", "abc", tmp_path / "one.svg")
    save_heatmap(np.zeros((3, 3)), "abc", "abc", tmp_path / "one.png")
    svg = (tmp_path / "one.svg").read_text()
    assert all(f"<!-- {text} -->" in svg for text in ("share of attention", "0.0", "0.5", "1.0"))
    shades = image.imread(tmp_path / "one.png")[:, -105:, 0]
    # Black at its lower end, white at its upper one
    assert any((np.diff(column[column < 1]) < 0).sum() > 50 for column in shades.T)


def test_a_single_heatmap_has_cells_twice_as_wide_as_one_of_a_grid(tmp_path: Path) -> None:
    one, four = np.eye(5)[None, None], np.broadcast_to(np.eye(5), (2, 2, 5, 5))
    save_heatmap(one, "abcde", "abcde", tmp_path / "one.png", ["one"])
    save_heatmap(four, "abcde", "abcde", tmp_path / "four.png", list("1234"))
    sizes = [image.imread(tmp_path / name).shape for name in ("one.png", "four.png")]
    assert np.abs(np.subtract(*sizes)).max() < 10  # of about 600 pixels


def test_a_long_alignment_still_fits_an_image(tmp_path: Path) -> None:
    save_heatmap(np.zeros((1, 300)), ["a"], ["가"] * 300, tmp_path / "attention.png")
    assert image.imread(tmp_path / "attention.png").shape[1] < 65536


@pytest.mark.slow  # 16 panels of 60 labels
def test_many_heads_of_a_long_text_still_fit_an_image(tmp_path: Path) -> None:
    titles = [str(place) for place in range(16)]
    save_heatmap(np.zeros((2, 8, 60, 60)), ["가"] * 60, ["가"] * 60, tmp_path / "heads.png", titles)
    assert image.imread(tmp_path / "heads.png").shape[1] < 65536


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_heatmap([[1.0]], ["a"], ["가"], tmp_path / "alignment.png")
    assert dict(matplotlib.rcParams) == before
    assert "koreanize_matplotlib" not in sys.modules


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        save_heatmap([[1.0]], ["a"], ["가"], tmp_path / "none" / "attention.png")
