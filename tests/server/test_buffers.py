"""The rows that live as long as the server, on the host and on a device."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from bundle import names
from bundle.manifest import TensorSpec
from bundle.names import Axis, Role
from server.buffers import Buffers
from server.device import OnnxDevice


class FarDevice(OnnxDevice):
    """The CPU, treated as a device whose memory numpy cannot reach."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.is_host = False


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("device", [OnnxDevice("cpu"), FarDevice()])
def test_a_graph_reads_and_writes_rows_in_place_whatever_their_element_type(dtype, device):
    """bfloat16 too, which numpy lacks: it is bound by ONNX's number over the bits."""
    specs = [TensorSpec(name, dtype, (Axis.BATCH, 8), Role.CACHE) for name in ("a", "b")]
    buffers = Buffers(specs, (4, 8), device)
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) if dtype != "bfloat16" else 16
    tensors = [helper.make_tensor_value_info(name, number, ["batch", 8]) for name in ("b", names.out("a"))]
    node = helper.make_node("Identity", ["b"], [names.out("a")])
    graph = helper.make_graph([node], "copy", tensors[:1], tensors[1:])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ones = np.full((2, 4, 8), 1, np.uint16 if dtype == "bfloat16" else dtype)
    ones[0] = 0
    write(buffers, ones)
    binding = session.io_binding()
    buffers.bind_input(binding, "b", 1, 2)
    buffers.bind_output(binding, names.out("a"), 2, 2)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(read(buffers)[0, :, 0], [0, 0, 1, 1])


def write(buffers: Buffers, array: np.ndarray) -> None:
    if buffers._device.is_host:
        buffers._host[:] = array
    else:
        buffers._value.update_inplace(array)


def read(buffers: Buffers) -> np.ndarray:
    return buffers._host if buffers._device.is_host else buffers._value.numpy()
