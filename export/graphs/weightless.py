"""Writes the weightless graphs of the server: `python -m export.graphs.weightless`.

They select tokens, move rows and find voice activity. The server cannot build graphs, so these are committed
in its folder; a test builds them again and compares. Each kind of selection is a graph of its own, so that a
step pays only for the kinds that its rows need.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from seq2seq_serve.bundle import names
from seq2seq_serve.export.convert import OPSET
from seq2seq_serve.export.graphs.functions import DOMAIN, definition
from seq2seq_serve.export.graphs.voice_activity import voice_activity

_IR_VERSION = 10
_BLOCK = 128  # tokens per block: a draw from the whole vocabulary first sums each block
FOLDER = Path(__file__).parents[2] / "server" / "runner" / "weightless"


def greedy() -> onnx.ModelProto:
    """The most probable token of each row, the lowest id among equals: `(B, V)` to `(B, 1)`."""
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    node = helper.make_node("TopK", [names.LOGITS, "one"], ["best", names.TOKEN_IDS], axis=1)
    logits = helper.make_tensor_value_info(names.LOGITS, TensorProto.FLOAT, [names.Axis.BATCH, "vocab_size"])
    token_ids = helper.make_tensor_value_info(names.TOKEN_IDS, TensorProto.INT64, [names.Axis.BATCH, 1])
    return _model(helper.make_graph([node], "greedy", [logits], [token_ids], [one]))


def move() -> onnx.ModelProto:
    """Copy rows of a buffer over others, in place if input and output are bound to one address.

    All rows are read before any is written. Whatever its element type, a row is seen as words of eight bytes.
    """
    dtype = TensorProto.INT64
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


def adjust() -> onnx.ModelProto:
    """Change some logits of some rows: `(B, V)` to `(m, V)`.

    A positive logit is divided by its factor, any other is multiplied by it; then the bias is added. Factor 1
    and bias 0 keep every bit. To fill up a row, an id may be repeated with the same factor and bias.
    """
    out = names.out(names.LOGITS)
    nodes = [
        _node("Gather", [names.LOGITS, names.ROWS], "chosen"),
        _node("GatherElements", ["chosen", names.ADJUSTED_IDS], "given", axis=1),
        # either divisor or multiplier is 1; selecting between the results would lose the sign of a minus zero
        _node("Greater", ["given", "zero"], "is_positive"),
        _node("Where", ["is_positive", names.FACTORS, "one"], "divisor"),
        _node("Where", ["is_positive", "one", names.FACTORS], "multiplier"),
        _node("Div", ["given", "divisor"], "divided"),
        _node("Mul", ["divided", "multiplier"], "scaled"),
        # minus zero minus zero is minus zero, but minus zero plus zero is plus zero
        _node("Sub", ["zero", names.BIASES], "minus_bias"),
        _node("Sub", ["scaled", "minus_bias"], "adjusted"),
        _node("ScatterElements", ["chosen", names.ADJUSTED_IDS, "adjusted"], out, axis=1),
    ]
    inputs = [
        _tensor(names.LOGITS, TensorProto.FLOAT, names.Axis.BATCH, "vocab_size"),
        _tensor(names.ROWS, TensorProto.INT64, "rows"),
        _tensor(names.ADJUSTED_IDS, TensorProto.INT64, "rows", "adjusted"),
        _tensor(names.FACTORS, TensorProto.FLOAT, "rows", "adjusted"),
        _tensor(names.BIASES, TensorProto.FLOAT, "rows", "adjusted"),
    ]
    return _selection("adjust", nodes, inputs, [_tensor(out, TensorProto.FLOAT, "rows", "vocab_size")])


def penalize() -> onnx.ModelProto:
    """Subtract penalties, which stay on the device, from logits: `(m, V)` to `(m, V)`; 0 keeps every bit."""
    out = names.out(names.LOGITS)
    nodes = [
        _node("Gather", [names.PENALTIES, names.PENALTY_ROWS], "penalty"),
        _node("Sub", [names.LOGITS, "penalty"], out),
    ]
    inputs = [
        _logits(),
        _tensor(names.PENALTIES, TensorProto.FLOAT, "requests", "vocab_size"),
        _tensor(names.PENALTY_ROWS, TensorProto.INT64, "rows"),
    ]
    return _selection("penalize", nodes, inputs, [_tensor(out, TensorProto.FLOAT, "rows", "vocab_size")])


def times() -> onnx.ModelProto:
    """Apply the rules of times: `(m, V)` to `(m, V)`; a row without times keeps its logits.

    Tokens outside of a row's bounds are forbidden. If the times together are more probable than any other
    token, the other tokens are forbidden, too (Radford et al. 2022, arXiv:2212.04356).
    """
    inputs = [_logits()] + [_tensor(name, TensorProto.INT64, "rows", 1) for name in names.TIME_COLUMNS]
    outputs = [_tensor(names.out(names.LOGITS), TensorProto.FLOAT, "rows", "vocab_size")]
    return _operator("TimeRules", inputs, outputs, "times")


def detect() -> onnx.ModelProto:
    """The most probable of some tokens, and its log-probability among them: `(m, V)` to `(m, 1)`."""
    nodes = [
        _node("Gather", [names.LOGITS, names.DETECTED_IDS], "given", axis=1),
        _node("LogSoftmax", ["given"], "log_probabilities_of_all"),
        helper.make_node(
            "TopK", ["log_probabilities_of_all", "axis_1"], [names.LOG_PROBABILITIES, "place"], axis=1
        ),
        _node("Gather", [names.DETECTED_IDS, "place"], names.TOKEN_IDS),
    ]
    inputs = [_logits(), _tensor(names.DETECTED_IDS, TensorProto.INT64, "detected")]
    return _selection("detect", nodes, inputs, _tokens(1))


def suppress() -> onnx.ModelProto:
    """Make some logits of each row minus infinity, in place if input and output are bound to one address."""
    out = names.out(names.LOGITS)
    nodes = [
        # minus infinity in the shape of the ids, without nodes on shapes, which CUDA would leave to the host
        _node("Cast", [names.SUPPRESSED_IDS], "numbers", to=TensorProto.FLOAT),
        _node("Sub", ["numbers", "infinity"], "forbidden"),
        _node("ScatterElements", [names.LOGITS, names.SUPPRESSED_IDS, "forbidden"], out, axis=1),
    ]
    inputs = [_logits(), _tensor(names.SUPPRESSED_IDS, TensorProto.INT64, "rows", "suppressed")]
    return _selection("suppress", nodes, inputs, [_tensor(out, TensorProto.FLOAT, "rows", "vocab_size")])


def write() -> onnx.ModelProto:
    """Replace rows of a buffer, in place if input and output are bound to one address."""
    out = names.out(names.BUFFER)
    nodes = [_node("ScatterND", [names.BUFFER, names.TO_ROWS, names.VALUES], out)]
    inputs = [
        _tensor(names.BUFFER, TensorProto.FLOAT, "requests", "vocab_size"),
        _tensor(names.TO_ROWS, TensorProto.INT64, "rows", 1),
        _tensor(names.VALUES, TensorProto.FLOAT, "rows", "vocab_size"),
    ]
    outputs = [_tensor(out, TensorProto.FLOAT, "requests", "vocab_size")]
    return _model(helper.make_graph(nodes, "write", inputs, outputs))


def candidates() -> onnx.ModelProto:
    """The most probable tokens of each row, best first, of equals the lowest id: `(m, V)` to `(m, K)`.

    As in `greedy`, the logits decide the order: two of them may round to the same log-probability. The
    log-probabilities of some rows and tokens are looked up beside them: `(p,)`.
    """
    inputs, outputs = _candidates()
    return _operator("Candidates", inputs, outputs, "candidates")


def normalize() -> onnx.ModelProto:
    """Turn logits into log-probabilities: `(m, V)` to `(m, V)`."""
    out = names.out(names.LOGITS)
    nodes = [_node("LogSoftmax", [names.LOGITS], out)]
    outputs = [_tensor(out, TensorProto.FLOAT, "rows", "vocab_size")]
    return _selection("normalize", nodes, [_logits()], outputs)


def best() -> onnx.ModelProto:
    """The largest numbers of each row, best first, of equals the lowest id: `(m, V)` to `(m, K)`.

    The numbers are log-probabilities after all changes, and are returned as they are. Those of some rows and
    tokens are looked up beside them: `(p,)`.
    """
    nodes = [
        _top([names.LOG_PROBABILITIES, names.TOKEN_IDS]),
        _node("GatherND", [names.LOGITS, names.PLACES], names.FOUND),
    ]
    return _selection("best", nodes, *_candidates())


def score() -> onnx.ModelProto:
    """The log-probability of a given token of each row: `(m, V)` to `(m, 1)`; the labels are token ids."""
    nodes = [_node("Identity", [names.LABEL_IDS], names.TOKEN_IDS), *_log_probabilities()]
    inputs = [_logits(), _tensor(names.LABEL_IDS, TensorProto.INT64, "rows", 1)]
    return _selection("score", nodes, inputs, _tokens(1))


def sample() -> onnx.ModelProto:
    """Draw a token of each row from all tokens, by inverse CDF in the order of ids: `(m, V)` to `(m, 1)`.

    The draw has two stages, because a running sum over the vocabulary would take longer than all the rest.
    The first stage draws a block of tokens, by sums in float32; the second draws a token of the block, with
    the remainder of the uniform.
    """
    nodes = [
        *_weights(names.LOGITS),
        *_keep_by_min_p(),
        _node("Cast", ["is_kept"], "kept", to=TensorProto.FLOAT),
        _node("Mul", ["weights", "kept"], "kept_weights"),
        # padded to whole blocks
        _node("Shape", ["kept_weights"], "vocab_size", start=1, end=2),
        _node("Neg", ["vocab_size"], "minus_vocab_size"),
        _node("Mod", ["minus_vocab_size", "block"], "missing"),
        _node("Concat", ["no_padding", "missing"], "padding", axis=0),
        _node("Pad", ["kept_weights", "padding", "zero", "axis_1"], "padded"),
        _node("Reshape", ["padded", "blocks_shape"], "blocks"),
        _node("ReduceSum", ["blocks", "axis_2"], "block_sums", keepdims=0),
        _node("Cast", ["block_sums"], "block_weights", to=TensorProto.DOUBLE),
        *_draw("block_weights", names.UNIFORMS, "drawn_block"),
        # the remainder of the uniform, scaled to between 0 and 1
        _node("GatherElements", ["drawn_block_before", "drawn_block"], "before", axis=1),
        _node("GatherElements", ["block_weights", "drawn_block"], "block_weight", axis=1),
        _node("Sub", ["drawn_block_target", "before"], "left"),
        _node("Div", ["left", "block_weight"], "left_share"),
        _node("Clip", ["left_share", "zero_double", "below_one"], "second_uniforms"),
        _node("Mul", ["drawn_block", "block"], "first_id"),
        _node("Add", ["first_id", "block_ids"], "ids"),
        _node("GatherElements", ["padded", "ids"], "in_block", axis=1),
        _node("Cast", ["in_block"], "token_weights", to=TensorProto.DOUBLE),
        *_draw("token_weights", "second_uniforms", "drawn_place"),
        _node("Add", ["first_id", "drawn_place"], names.TOKEN_IDS),
        *_log_probabilities(),
    ]
    inputs = [_logits(), *_per_row(names.TEMPERATURES, names.MIN_PS), _uniforms()]
    return _selection("sample", nodes, inputs, _tokens(1))


def sample_sorted() -> onnx.ModelProto:
    """Draw a token of each row from its most probable, by inverse CDF, best first: `(m, V)` to `(m, 1)`.

    The probabilities are those among a row's `TOP_KS` best tokens. A token is kept if the tokens before it
    sum to less than `top_p`, and if it has at least `min_p` of the best token's probability. The best is
    always kept.

    Other rows may need more candidates, which does not change a bit of a row: sums run from the best token
    on, so the sums up to a row's own last candidate have the same terms, and weights of zero after it add
    nothing.
    """
    nodes = [
        *_sorted_weights(),
        _node("Sub", [names.TOP_KS, "along_1"], "last_place"),
        _node("GatherElements", ["sums", "last_place"], "total", axis=1),
        _node("Shape", ["best_ids"], "num_ranks", start=1, end=2),
        _node("Squeeze", ["num_ranks"], "end_rank"),
        _node("Range", ["zero_int", "end_rank", "one_int"], "ranks"),
        _node("Less", ["ranks", names.TOP_KS], "is_own"),
        *_keep_by_top_p("is_likely"),
        _node("And", ["is_likely", "is_own"], "remains"),
        *_draw_remaining(),
    ]
    inputs = [*_sorted_inputs(), _tensor(names.TOP_KS, TensorProto.INT64, "rows", 1)]
    return _selection("sample_sorted", nodes, inputs, _tokens(1))


def sample_top_p() -> onnx.ModelProto:
    """Draw a token of each row from the fewest that sum to `top_p`, best first: `(m, V)` to `(m, 1)`.

    This is `sample_sorted` over all tokens (nucleus sampling, Holtzman et al. 2020, section 3.1), but it
    sorts only the given number of candidates. If a row might keep tokens beyond the candidates, the row is
    not covered, and the caller must draw it again from more. The total over all tokens is a sum of its own,
    so that here, too, the number of candidates does not change a bit of a covered row.
    """
    nodes = [
        *_sorted_weights(),
        *_weights(names.LOGITS, "all_"),
        _node("Cast", ["all_weights"], "all_weights_double", to=TensorProto.DOUBLE),
        _node("ReduceSum", ["all_weights_double", "axis_1"], "total"),
        *_keep_by_top_p("remains"),
        *_draw_remaining(),
        _node("Gather", ["remains", "last"], "remains_to_the_last", axis=1),
        _node("Not", ["remains_to_the_last"], names.IS_COVERED),
    ]
    is_covered = _tensor(names.IS_COVERED, TensorProto.BOOL, "rows", 1)
    return _selection("sample_top_p", nodes, _sorted_inputs(), [*_tokens(1), is_covered])


def all_graphs() -> dict[str, onnx.ModelProto]:
    """Every graph by its file name."""
    return {
        "greedy.onnx": greedy(),
        "move.onnx": move(),
        "adjust.onnx": adjust(),
        "penalize.onnx": penalize(),
        "suppress.onnx": suppress(),
        "write.onnx": write(),
        "normalize.onnx": normalize(),
        "candidates.onnx": candidates(),
        "best.onnx": best(),
        "score.onnx": score(),
        "detect.onnx": detect(),
        "times.onnx": times(),
        "sample.onnx": sample(),
        "sample_sorted.onnx": sample_sorted(),
        "sample_top_p.onnx": sample_top_p(),
        "voice_activity.onnx": voice_activity(),
    }


def main() -> None:
    """Write all graphs into the server's folder."""
    FOLDER.mkdir(exist_ok=True)
    for name, model in all_graphs().items():
        onnx.save(model, FOLDER / name)


def _weights(logits: str, prefix: str = "") -> list[onnx.NodeProto]:
    """Probabilities divided by that of the best: the best has 1 at any temperature, and nothing overflows.

    On a GPU, ReduceMax would take 2 ms for rows of 32,000 logits, and TopK takes 33 us.
    """
    best, below, tempered, weights = (
        prefix + part for part in ("best_logit", "below_best", "tempered", "weights")
    )
    return [
        helper.make_node("TopK", [logits, "axis_1"], [best, f"{best}_id"], axis=1),  # the best 1
        _node("Sub", [logits, best], below),
        _node("Div", [below, names.TEMPERATURES], tempered),
        _node("Exp", [tempered], weights),
    ]


def _sorted_inputs() -> list[onnx.ValueInfoProto]:
    return [
        _logits(),
        _tensor(names.NUM_CANDIDATES, TensorProto.INT64, 1),
        *_per_row(names.TEMPERATURES, names.TOP_PS, names.MIN_PS),
        _uniforms(),
    ]


def _sorted_weights() -> list[onnx.NodeProto]:
    """The weights of the candidates, best first, and the sums up to each, without it and with it."""
    return [
        _top(["best_logits", "best_ids"]),
        *_weights("best_logits"),
        *_keep_by_min_p(),
        _node("Cast", ["weights"], "weights_double", to=TensorProto.DOUBLE),
        _node("CumSum", ["weights_double", "along_1"], "before", exclusive=1),
        _node("Add", ["before", "weights_double"], "sums"),
    ]


def _keep_by_top_p(kept: str) -> list[onnx.NodeProto]:
    """The candidates that `min_p` and `top_p` keep: those before them sum to less than top_p of the total."""
    return [
        _node("Clip", [names.TOP_PS, "smallest", "one"], "top_share"),
        _node("Cast", ["top_share"], "top_share_double", to=TensorProto.DOUBLE),
        _node("Mul", ["top_share_double", "total"], "top_weight"),
        _node("Less", ["before", "top_weight"], "is_in_top"),
        _node("And", ["is_kept", "is_in_top"], kept),
    ]


def _draw_remaining() -> list[onnx.NodeProto]:
    """Draw one of the candidates that remain, and return its log-probability."""
    return [
        _node("Cast", ["remains"], "remaining", to=TensorProto.DOUBLE),
        _node("Mul", ["weights_double", "remaining"], "remaining_weights"),
        *_draw("remaining_weights", names.UNIFORMS, "drawn_place"),
        _node("GatherElements", ["best_ids", "drawn_place"], names.TOKEN_IDS, axis=1),
        *_log_probabilities(),
    ]


def _keep_by_min_p() -> list[onnx.NodeProto]:
    """The weights that are at least `min_p`: always the best, never that of a logit of minus infinity."""
    return [
        _node("Clip", [names.MIN_PS, "smallest", "one"], "min_weight"),
        _node("GreaterOrEqual", ["weights", "min_weight"], "is_kept"),
    ]


def _draw(weights: str, uniforms: str, drawn: str) -> list[onnx.NodeProto]:
    """Draw the first place at which the running sum of weights exceeds the uniform's share of the total.

    A place of weight zero is never drawn, because its running sum is that of the place before it. A place is
    always drawn, because the total is the last running sum, and the largest double below 1 times the total
    rounds to less than the total.
    """
    before, sums, total, target = (f"{drawn}_{part}" for part in ("before", "sums", "total", "target"))
    return [
        _node("CumSum", [weights, "along_1"], before, exclusive=1),
        _node("Add", [before, weights], sums),
        _node("Gather", [sums, "last"], total, axis=1),
        _node("Mul", [uniforms, total], target),
        _node("LessOrEqual", [sums, target], f"{drawn}_is_passed"),
        _node("Cast", [f"{drawn}_is_passed"], f"{drawn}_passed", to=TensorProto.INT64),
        _node("ReduceSum", [f"{drawn}_passed", "axis_1"], drawn),
    ]


def _candidates() -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """The inputs and outputs of a graph that finds candidates, and looks up some tokens."""
    inputs = [
        _logits(),
        _tensor(names.NUM_CANDIDATES, TensorProto.INT64, 1),
        _tensor(names.PLACES, TensorProto.INT64, "places", 2),
    ]
    return inputs, [*_tokens("num_candidates"), _tensor(names.FOUND, TensorProto.FLOAT, "places")]


def _top(outputs: list[str]) -> onnx.NodeProto:
    return helper.make_node("TopK", [names.LOGITS, names.NUM_CANDIDATES], outputs, axis=1)


def _log_probabilities() -> list[onnx.NodeProto]:
    """The log-probabilities of the chosen token ids among all tokens, at temperature 1."""
    return [
        _node("LogSoftmax", [names.LOGITS], "all_log_probabilities", axis=1),
        _node("GatherElements", ["all_log_probabilities", names.TOKEN_IDS], names.LOG_PROBABILITIES, axis=1),
    ]


def _constants() -> list[onnx.TensorProto]:
    """The constants of the selection graphs; each graph gets the ones that it uses."""
    make, FLOAT, DOUBLE, INT64 = helper.make_tensor, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
    return [
        make("zero", FLOAT, [], [0]),
        make("one", FLOAT, [], [1]),
        make("infinity", FLOAT, [], [math.inf]),
        make("smallest", FLOAT, [], [2.0**-126]),  # the smallest float32 with all its bits
        make("zero_double", DOUBLE, [], [0]),
        make("below_one", DOUBLE, [], [1 - 2.0**-53]),
        make("along_1", INT64, [], [1]),
        make("zero_int", INT64, [], [0]),
        make("one_int", INT64, [], [1]),
        make("axis_1", INT64, [1], [1]),
        make("axis_2", INT64, [1], [2]),
        make("last", INT64, [1], [-1]),
        make("no_padding", INT64, [1], [0]),
        make("block", INT64, [1], [_BLOCK]),
        make("block_ids", INT64, [1, _BLOCK], range(_BLOCK)),
        make("blocks_shape", INT64, [3], [0, -1, _BLOCK]),
    ]


def _node(operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], **attributes)


def _tensor(name: str, dtype: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _logits() -> onnx.ValueInfoProto:
    return _tensor(names.LOGITS, TensorProto.FLOAT, "rows", "vocab_size")


def _per_row(*inputs: str) -> list[onnx.ValueInfoProto]:
    return [_tensor(name, TensorProto.FLOAT, "rows", 1) for name in inputs]


def _uniforms() -> onnx.ValueInfoProto:
    return _tensor(names.UNIFORMS, TensorProto.DOUBLE, "rows", 1)


def _tokens(number: int | str) -> list[onnx.ValueInfoProto]:
    return [
        _tensor(names.TOKEN_IDS, TensorProto.INT64, "rows", number),
        _tensor(names.LOG_PROBABILITIES, TensorProto.FLOAT, "rows", number),
    ]


def _selection(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    used = {tensor for node in nodes for tensor in node.input}
    constants = [constant for constant in _constants() if constant.name in used]
    return _model(helper.make_graph(nodes, name, inputs, outputs, constants))


def _operator(
    name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto], graph: str
) -> onnx.ModelProto:
    """A graph of one of the project's operators alone, with its definition."""
    node = helper.make_node(
        name, [value.name for value in inputs], [value.name for value in outputs], domain=DOMAIN
    )
    return _model(helper.make_graph([node], graph, inputs, outputs), definition(name, OPSET))


def _model(graph: onnx.GraphProto, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(one.domain, 1) for one in functions)]
    model = helper.make_model(
        graph,
        opset_imports=opsets,
        functions=functions,
        ir_version=_IR_VERSION,
        producer_name="seq2seq-serve",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    main()
