"""Describes the server and its models in messages of the Open Inference Protocol."""

from __future__ import annotations

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.open_inference.answers import OUTPUTS
from seq2seq_serve.server.service.open_inference.requests import (
    DATATYPES,
    INPUT_IDS,
    INPUT_LENGTHS,
    TEXT_INPUT,
)
from seq2seq_serve.server.service.open_inference.tensors import BYTES, FP32, INT64, UINT8
from seq2seq_serve.server.telemetry.statistics import Statistics

SERVER_NAME = "seq2seq-serve"
REPOSITORY = "model_repository"
EXTENSIONS = (
    REPOSITORY,
    "model_configuration",
    "statistics",
    "parameters",
    "binary_tensor_data",
    "schedule_policy",
)
_PLATFORM = "onnxruntime_seq2seq"
_NANOSECONDS = 1e9
_STATISTICS = ("success", "fail", "queue", "compute_input", "compute_infer")

_ANY = -1
# Name, datatype, and shape: rows x positions for inputs, rows x hypotheses x positions for outputs.
_TEXT_INPUTS = (
    (TEXT_INPUT, BYTES, (_ANY,)),
    (INPUT_IDS, INT64, (_ANY, _ANY)),
    (INPUT_LENGTHS, INT64, (_ANY,)),
)
_OUTPUTS = [(name, datatype, (_ANY,) * num_axes) for name, (datatype, num_axes, _) in OUTPUTS.items()]
_DATA_TYPES = {BYTES: pb.TYPE_STRING, INT64: pb.TYPE_INT64, UINT8: pb.TYPE_UINT8, FP32: pb.TYPE_FP32}


def _inputs(model: ServedModel) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Returns the inputs of a model. For a text a request has either the text input or the token ids."""
    if model.reads_text:
        return _TEXT_INPUTS
    inputs = []
    for name, source in model.sources.items():
        datatype, *_ = DATATYPES[source.form]
        axes = () if datatype == BYTES else source.axes
        inputs.append((name, datatype, (_ANY, *(axis if isinstance(axis, int) else _ANY for axis in axes))))
    return tuple(inputs)


def metadata_message(model: ServedModel) -> pb.ModelMetadataResponse:
    """Returns the tensors of a model."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[model.version],
        platform=_PLATFORM,
        inputs=[
            tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in _inputs(model)
        ],
        outputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in _OUTPUTS],
    )


def config_message(model: ServedModel) -> pb.ModelConfig:
    """Returns the tensors and limits of a model in the form of Triton's model configuration."""
    limits = {
        "kind": model.manifest.kind,
        "precision": model.sizing.precision,
        "provider": model.sizing.provider,
        "vocab_size": model.sizing.vocab_size,
        "max_source_length": model.max_memory_length,
        "max_target_length": model.max_target_length,
        "num_slots": model.engine.num_slots,
    }
    forms = {} if model.reads_text else {name: source.form for name, source in model.sources.items()}
    limits |= {f"datatypes.{name}": ", ".join(DATATYPES[form]) for name, form in forms.items()}
    group = pb.ModelInstanceGroup
    return pb.ModelConfig(
        name=model.name,
        platform=_PLATFORM,
        input=[
            pb.ModelInput(name=name, data_type=_DATA_TYPES[datatype], dims=shape, optional=model.reads_text)
            for name, datatype, shape in _inputs(model)
        ],
        output=[
            pb.ModelOutput(name=name, data_type=_DATA_TYPES[datatype], dims=shape)
            for name, datatype, shape in _OUTPUTS
        ],
        instance_group=[
            group(
                name=model.name,
                count=len(model.engine.cores),
                kind=group.KIND_CPU if model.sizing.provider == "cpu" else group.KIND_GPU,
            )
        ],
        parameters={name: pb.ModelParameter(string_value=str(value)) for name, value in limits.items()},
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def statistics_message(model: ServedModel, its: Statistics) -> pb.ModelStatistics:
    """Returns the counts and times of a model since its version is served."""
    durations = {
        name: pb.StatisticDuration(count=one.number, ns=max(round(one.seconds * _NANOSECONDS), 0))
        for name, one in its.of_version().items()
    }
    by_rows = {name: one for name, one in durations.items() if isinstance(name, int) and one.count}
    return pb.ModelStatistics(
        name=model.name,
        version=model.version,
        last_inference=round(its.last_request * 1000),
        inference_count=durations["success"].count,
        execution_count=durations["compute_infer"].count,
        inference_stats=pb.InferStatistics(**{name: durations[name] for name in _STATISTICS}),
        batch_stats=[
            pb.InferBatchStatistics(batch_size=num_rows, compute_infer=by_rows[num_rows])
            for num_rows in sorted(by_rows)
        ],
    )
