"""Files of features are checked, and read no further than needed."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve.bundle.names import FEATURES
from seq2seq_serve.training.data.sources import Features


def test_the_length_of_features_is_read_without_the_features(tmp_path: Path) -> None:
    """Encoding a corpus and each evaluation read every file completely, to count its rows."""
    file = tmp_path / "features.npy"
    np.save(file, np.ones((300, 512), np.float16))
    kind, source = Features(512), list(str(file).encode())
    kind.length(source)  # imports and caches
    tracemalloc.start()
    assert kind.length(source) == 300
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < file.stat().st_size / 2
    array = kind.inputs(source)[FEATURES]
    assert (type(array), array.dtype, array.sum()) == (np.ndarray, np.float32, 300 * 512)


@pytest.mark.parametrize(("shape", "shown"), [((0, 4), "0 x 4"), ((3, 5), "3 x 5"), ((4,), "4"), ((), "")])
def test_an_array_of_another_shape_is_refused_by_the_name_of_its_file(
    shape: tuple[int, ...], shown: str, tmp_path: Path
) -> None:
    file = tmp_path / "features.npy"
    np.save(file, np.ones(shape, np.float32))
    kind, source = Features(4), list(str(file).encode())
    for read in (kind.length, kind.inputs):
        with pytest.raises(
            ValueError, match=rf"features\.npy: the array is {shown}, and must be annotations x 4"
        ):
            read(source)
