from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from seq2seq_serve.drawing.overlay import save_film_strips, save_overlays, save_story

GREY = np.full((28, 28, 3), 200, np.uint8)


def panels(path: Path, number: int) -> list[np.ndarray]:
    """The panels of an image of one row, from the left, without words and margins."""
    pixels = image.imread(path)[..., :3]
    is_panel = (pixels < 0.99).all(axis=-1)
    rows = np.flatnonzero(is_panel.mean(axis=1) > 0.5)
    columns = np.flatnonzero(is_panel[rows.min() : rows.max()].mean(axis=0) > 0.5)
    groups = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    assert len(groups) == number
    return [pixels[rows.min() + 2 : rows.max() - 2, group[2] : group[-2]] for group in groups]


def test_a_picture_is_bright_where_the_weight_of_each_word_is(tmp_path: Path) -> None:
    weights = np.full((2, 196), 0.001)
    weights[0, 0] = weights[1, 195] = 0.5  # the first place, and the last
    save_overlays(GREY, weights, ["left", "right"], tmp_path / "a.png")
    plain, first, last = panels(tmp_path / "a.png", 3)
    assert np.allclose(plain, 200 / 255, atol=0.01)
    for panel, corner in ((first, (3, 3)), (last, (-4, -4))):
        assert panel[corner].mean() > 0.7
        assert panel[tuple(-each for each in corner)].mean() < 0.25
        assert (panel.mean(axis=-1) > 0.5).mean() < 0.02


def test_a_picture_keeps_its_proportions(tmp_path: Path) -> None:
    save_overlays(np.full((10, 40, 3), 99, np.uint8), np.ones((1, 9)), ["all"], tmp_path / "a.png")
    for panel in panels(tmp_path / "a.png", 2):
        assert panel.shape[1] / panel.shape[0] == pytest.approx(4, rel=0.1)
        assert np.allclose(panel, 99 / 255, atol=0.01)


def test_places_that_are_no_square_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the attention has 12 places, which are not a square grid"):
        save_overlays(GREY, np.ones((1, 12)), ["a"], tmp_path / "a.png")


def test_positions_before_the_square_grid_have_no_place_in_the_picture(tmp_path: Path) -> None:
    weights = np.full((1, 2 + 196), 0.001)
    weights[0, :2] = 0.9
    weights[0, 2] = 0.5
    save_overlays(GREY, weights, ["first"], tmp_path / "a.png")
    _, panel = panels(tmp_path / "a.png", 2)
    assert panel[3, 3].mean() > 0.7
    assert (panel.mean(axis=-1) > 0.5).mean() < 0.02


@pytest.mark.parametrize("num_positions", [4, 2])
def test_frames_are_shaded_by_their_weights(tmp_path: Path, num_positions: int) -> None:
    weights = np.zeros((2, num_positions))
    weights[0, 0] = weights[1, -1] = 1.0
    save_film_strips(np.full((4, 24, 24, 3), 200, np.uint8), weights, ["first", "last"], tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")[..., :3].mean(axis=-1)
    is_row = (pixels < 0.9).mean(axis=1) > 0.5
    edges = np.flatnonzero(np.diff(is_row.astype(int)))
    middles = [(begin + end) // 2 for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    assert len(middles) == 3
    num_bright = 4 // num_positions
    for middle, bright in zip(middles, (range(4), range(num_bright), range(4 - num_bright, 4)), strict=True):
        places = [int((frame + 0.5) / 4 * pixels.shape[1]) for frame in range(4)]
        assert [frame for frame in range(4) if pixels[middle, places[frame]] > 0.5] == list(bright)


def test_a_story_has_a_row_for_each_sentence_and_a_column_for_each_hop(tmp_path: Path) -> None:
    sentences = ["Sam walks into the kitchen.", "샘이 사과를 떨어뜨린다.", "$x^2$ " * 40]
    save_story([[0, 1, 0], [0, 0, 1.0]], sentences, "Where is $it$? bedroom", tmp_path / "a.png")
    save_story([[0, 1, 0.0]], sentences, "", tmp_path / "one.png")
    both, one = (image.imread(tmp_path / name) for name in ("a.png", "one.png"))
    assert both.shape[0] == one.shape[0]
    assert both[:, -60:-25, :3].std() > 0.2


def test_many_words_and_sentences_still_fit_an_image(tmp_path: Path) -> None:
    save_story(np.ones((3, 200)), ["Sam sleeps."] * 200, "Who?", tmp_path / "a.png")
    save_film_strips(np.zeros((120, 8, 8, 3), np.uint8), np.ones((5, 120)), ["a"] * 5, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert 8900 < max(image.imread(tmp_path / name).shape) < 9200
