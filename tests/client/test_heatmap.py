import sys

import matplotlib
import pytest
from matplotlib import image

from client.heatmap import save_heatmap
from protos.seq2seq_v1_pb2 import Attention


def attention(source_tokens, target_tokens):
    num = len(source_tokens)
    weights = [float(row % num == column) for row in range(len(target_tokens)) for column in range(num)]
    return Attention(source_tokens=source_tokens, target_tokens=target_tokens, weights=weights)


def test_hangul_and_every_other_character_are_drawn_without_a_warning(tmp_path):
    # Warnings are errors here, and matplotlib warns of a glyph that no font has.
    tokens = ["오늘", "은", " 금요일", "</s>", "", "\n", "😀", "ع", "$x^2$", "日本", "_a", "\ufffd", "€"]
    path = tmp_path / "attention.png"
    save_heatmap(attention(tokens, ["Today", " is", " Friday", ".", "</s>"]), path)
    pixels = image.imread(path)
    assert pixels.shape[1] > pixels.shape[0] > 200
    assert pixels[..., :3].min() == 0
    assert pixels[..., :3].max() == 1


def test_a_long_alignment_still_fits_an_image(tmp_path):
    path = tmp_path / "attention.png"
    save_heatmap(attention(["가"] * 300, ["a"]), path)
    assert image.imread(path).shape[1] < 65536


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    save_heatmap(attention(["가"], ["a"]), tmp_path / "attention.png")
    assert dict(matplotlib.rcParams) == before
    assert "koreanize_matplotlib" not in sys.modules


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file or directory"):
        save_heatmap(attention(["가"], ["a"]), tmp_path / "none" / "attention.png")
