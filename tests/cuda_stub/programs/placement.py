"""Prints what ONNX Runtime does not run on CUDA: `GRAPH.onnx...`.

One JSON object: for each graph the operators of nodes that another provider runs, and of copies between both.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime as ort

_CUDA = "CUDAExecutionProvider"
_COPIES = ("MemcpyToHost", "MemcpyFromHost")


def not_on_cuda(path: Path) -> list[str]:
    """Each operator once, in alphabetical order."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory() as folder:
        # ONNX Runtime adds copies after it has assigned the nodes, hence only the optimised graph has them.
        optimised = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(optimised)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        session = ort.InferenceSession(path, options, providers=[_CUDA])
        assert _CUDA in session.get_providers()
        graph = onnx.load(optimised, load_external_data=False).graph
    parts = session.get_provider_graph_assignment_info()
    elsewhere = {node.op_type for part in parts if part.ep_name != _CUDA for node in part.get_nodes()}
    return sorted(elsewhere | {node.op_type for node in nodes_of(graph) if node.op_type in _COPIES})


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, and of graphs within its If, Loop and Scan."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


if __name__ == "__main__":
    print(json.dumps({path: not_on_cuda(Path(path)) for path in sys.argv[1:]}))
