import array
import subprocess
import sys

import numpy as np
import pytest
import torch

from seq2seq_serve.client.wire import generate_request
from seq2seq_serve.protos.seq2seq_v1_pb2 import Source, Tensor, TokenIds


def source(value) -> Source:
    """The only source of a request."""
    [sent] = generate_request(value, "", None).sources
    return sent


@pytest.mark.parametrize(
    "ids",
    [
        [5, 2],
        (5, 2),
        np.array([5, 2]),
        np.array([5, 2], np.int32),
        np.array([5, 0, 2])[::2],
        array.array("q", [5, 2]),
        torch.tensor([5, 2]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_whole_numbers_in_a_row_are_token_ids(ids):
    assert source(ids) == Source(token_ids=TokenIds(values=[5, 2]))


@pytest.mark.parametrize(
    ("given", "is_file"), [("x" * 5_000_000, False), (bytes(5_000_000), True), ([5] * 5_000_000, False)]
)
def test_only_a_file_that_is_too_large_may_be_a_sound(given, is_file):
    with pytest.raises(ValueError, match="make it smaller") as raised:
        generate_request(given, "", None)
    assert ("transcribe_live" in str(raised.value)) == is_file


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda file: np.frombuffer(file, np.uint8)])
def test_bytes_are_a_file(kind):
    assert source(kind(b"\x89PNG")) == Source(file=b"\x89PNG")


PICTURE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
BYTES = bytes(range(24))


@pytest.mark.parametrize(
    "pixels",
    [PICTURE, memoryview(PICTURE), torch.from_numpy(PICTURE), np.asfortranarray(PICTURE)],
    ids=["numpy", "memoryview", "torch", "other order"],
)
def test_an_array_is_a_tensor_whatever_holds_it(pixels):
    assert source(pixels) == Source(tensor=Tensor(datatype="UINT8", shape=[2, 4, 3], data=BYTES))


@pytest.mark.parametrize(
    ("dtype", "datatype"), [(np.int64, "INT64"), (np.float32, "FP32"), (np.uint8, "UINT8")]
)
def test_a_part_of_an_array_is_sent_row_by_row_and_little_endian(dtype, datatype):
    part = np.arange(12, dtype=dtype).reshape(3, 4)[::-1, ::2]
    tensor = source(part).tensor
    assert (tensor.datatype, list(tensor.shape)) == (datatype, [3, 2])
    sent = np.frombuffer(tensor.data, np.dtype(dtype).newbyteorder("<"))
    assert np.array_equal(sent.reshape(3, 2), part)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint16, np.bool_, ">f4"])
def test_an_array_of_other_numbers_is_refused(dtype):
    message = "must be of uint8, int64 or float32, and has elements of the format "
    with pytest.raises(ValueError, match=f"^the array {message}"):
        generate_request(np.ones((2, 2), dtype), "", None)
    with pytest.raises(ValueError, match=f"^the array features {message}"):
        generate_request({"features": np.ones((2, 2), dtype)}, "", None)


def test_a_mapping_names_its_sources():
    request = generate_request({"story": "Sam sleeps.", "question": [5]}, "babi", None)
    assert request.model == "babi"
    assert list(request.sources) == [
        Source(name="story", text="Sam sleeps."),
        Source(name="question", token_ids=TokenIds(values=[5])),
    ]


def test_a_file_that_is_larger_than_a_request_is_refused_here():
    with pytest.raises(ValueError, match=r"4194316 bytes, .* 4194304"):
        generate_request(bytes(4 * 2**20), "", None)


def test_numpy_is_not_needed_for_bytes_and_other_buffers():
    code = "import sys; sys.modules['numpy'] = None; from seq2seq_serve.client import Client\n"
    code += "from seq2seq_serve.client.wire import generate_request\n"
    code += "generate_request({'a': b'x', 'b': memoryview(bytes(6)).cast('B', (2, 3))}, '', None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
