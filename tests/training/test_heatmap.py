import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import image

from client.heatmap import save_heatmap as save_served_heatmap
from protos.seq2seq_v1_pb2 import Attention
from training.heatmap import save_head_heatmaps, save_heatmap

TOKENS = ["오늘", "은", " 금요일", "<eos>", "", "\n", "😀", "$x^2$", "\ufffd", "€"]


def test_an_alignment_looks_as_that_of_a_served_model(tmp_path: Path) -> None:
    # Warnings are errors here, and matplotlib warns of a glyph that no font has.
    target = ["Today", " is", " Friday", "."]
    weights = torch.rand(len(target), len(TOKENS)).softmax(dim=-1)
    save_heatmap(weights, target, TOKENS, tmp_path / "run.png")
    served = Attention(source_tokens=TOKENS, target_tokens=target, weights=weights.flatten().tolist())
    save_served_heatmap(served, tmp_path / "served.png")
    np.testing.assert_array_equal(image.imread(tmp_path / "run.png"), image.imread(tmp_path / "served.png"))


def test_each_head_has_a_title_and_its_weights_in_its_place(tmp_path: Path) -> None:
    layers, heads = [1, 2], [1, 2, 3]
    weights = torch.zeros(2, 3, 4, 4)
    save_head_heatmaps(weights, list("abcd"), layers, heads, tmp_path / "heads.svg")
    save_head_heatmaps(weights, list("abcd"), layers, heads, tmp_path / "black.png")
    weights[0, 1, :, 0] = 1
    save_head_heatmaps(weights, list("abcd"), layers, heads, tmp_path / "heads.png")

    svg = (tmp_path / "heads.svg").read_text()
    assert all(f"<!-- layer {layer}, head {head} -->" in svg for layer in layers for head in heads)
    black, found = (image.imread(tmp_path / name) for name in ("black.png", "heads.png"))
    rows, columns = (black != found).any(axis=-1).nonzero()
    height, width = black.shape[:2]
    assert 0 < rows.min() < rows.max() < height / 2
    # The first column of the middle panel, and no wider than a cell of its four.
    assert width / 3 < columns.min() < columns.max() < width / 2
    assert columns.max() - columns.min() < width / 3 / 4


def test_one_head_has_cells_as_large_as_an_alignment(tmp_path: Path) -> None:
    weights = torch.eye(5).view(1, 1, 5, 5)
    save_head_heatmaps(weights, list("abcde"), [2], [3], tmp_path / "one.png")
    save_head_heatmaps(weights.expand(2, 2, 5, 5), list("abcde"), [1, 2], [1, 2], tmp_path / "four.png")
    one, four = (image.imread(tmp_path / name).shape for name in ("one.png", "four.png"))
    assert one == four


@pytest.mark.slow  # 16 panels of 60 labels; the client's test has one of 300
def test_many_heads_of_a_long_text_still_fit_an_image(tmp_path: Path) -> None:
    weights = torch.zeros(2, 8, 60, 60)
    save_head_heatmaps(weights, ["가"] * 60, [1, 2], range(1, 9), tmp_path / "heads.png")
    assert image.imread(tmp_path / "heads.png").shape[1] < 65536


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_heatmap(torch.eye(1), ["a"], ["가"], tmp_path / "alignment.png")
    assert dict(matplotlib.rcParams) == before
    assert "koreanize_matplotlib" not in sys.modules


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        save_heatmap(torch.eye(1), ["a"], ["가"], tmp_path / "none" / "alignment.png")
