"""Makes the graphs without weights that the server runs beside a model's: `python -m export.weightless`.

The server cannot build graphs, so they are committed beside it, and a test makes them anew and compares. One
selection a need, so that a step pays only for the kinds of row that are in it.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from bundle import names
from export.convert import OPSET

_IR_VERSION = 10
FOLDER = Path(__file__).parent.parent / "server" / "weightless"


def greedy() -> onnx.ModelProto:
    """The most probable token of each row, the lowest id among equals: `(B, V)` to `(B, 1)`."""
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    node = helper.make_node("TopK", [names.LOGITS, "one"], ["best", names.TOKEN_IDS], axis=1)
    logits = helper.make_tensor_value_info(names.LOGITS, TensorProto.FLOAT, [names.Axis.BATCH, "vocab_size"])
    token_ids = helper.make_tensor_value_info(names.TOKEN_IDS, TensorProto.INT64, [names.Axis.BATCH, 1])
    return _model(helper.make_graph([node], "greedy", [logits], [token_ids], [one]))


def move(dtype: int) -> onnx.ModelProto:
    """Rows of a buffer copied over others, in place where input and output are bound to one address.

    All is read before anything is written.
    """
    shape = ["rows", "row_size"]
    nodes = [
        helper.make_node("Gather", [names.BUFFER, names.FROM_ROWS], ["moved"]),
        helper.make_node("ScatterND", [names.BUFFER, names.TO_ROWS, "moved"], [names.out(names.BUFFER)]),
    ]
    inputs = [
        helper.make_tensor_value_info(names.BUFFER, dtype, shape),
        helper.make_tensor_value_info(names.FROM_ROWS, TensorProto.INT64, ["moves"]),
        helper.make_tensor_value_info(names.TO_ROWS, TensorProto.INT64, ["moves", 1]),
    ]
    output = helper.make_tensor_value_info(names.out(names.BUFFER), dtype, shape)
    return _model(helper.make_graph(nodes, "move", inputs, [output]))


def all_graphs() -> dict[str, onnx.ModelProto]:
    """Every graph by its file name."""
    return {
        "greedy.onnx": greedy(),
        "move_float32.onnx": move(TensorProto.FLOAT),
        "move_float16.onnx": move(TensorProto.FLOAT16),
    }


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, model in all_graphs().items():
        onnx.save(model, FOLDER / name)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(
        graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="seq2seq-serve"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    main()
