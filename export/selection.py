"""Makes the weightless graphs that select a step's tokens from its logits: `python -m export.selection`.

The server cannot build graphs, so they are committed beside it, and a test makes them anew and compares. One
graph a need, so that a step pays only for the kinds of row that are in it.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from bundle import names
from export.convert import OPSET

_IR_VERSION = 10
FOLDER = Path(__file__).parent.parent / "server" / "selection"


def greedy() -> onnx.ModelProto:
    """The most probable token of each row, the lowest id among equals: `(B, V)` to `(B, 1)`."""
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    node = helper.make_node("TopK", [names.LOGITS, "one"], ["best", names.TOKEN_IDS], axis=1)
    graph = helper.make_graph(
        [node],
        "greedy",
        [helper.make_tensor_value_info(names.LOGITS, TensorProto.FLOAT, ["batch", "vocab_size"])],
        [helper.make_tensor_value_info(names.TOKEN_IDS, TensorProto.INT64, ["batch", 1])],
        [one],
    )
    return _model(graph)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(
        graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="seq2seq-serve"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    onnx.save(greedy(), FOLDER / "greedy.onnx")


if __name__ == "__main__":
    main()
