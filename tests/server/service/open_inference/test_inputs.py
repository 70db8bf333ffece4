"""Named sources of every form as tensors of the Open Inference Protocol."""

import struct

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.names import CLIP, FEATURES, PICTURE, QUESTION, STORY
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tests.server.service.harness import serving_bundles
from tests.server.service.read.test_inputs import clip_file, picture_file, story_of, token_ids
from tests.server.toys import KINDS

DATATYPES = {"uint8": "UINT8", "int64": "INT64", "float32": "FP32", "object": "BYTES"}
FIELDS = {
    "UINT8": "uint_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def elements(*values: bytes) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def infer_request(model: str, *, is_raw: bool = True, **arrays: np.ndarray) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    message.parameters["max_new_tokens"].int64_param = 6
    for name, array in arrays.items():
        datatype = DATATYPES[str(array.dtype)]
        tensor = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if not is_raw:
            getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
        elif datatype == "BYTES":
            raw = b"".join(struct.pack("<I", len(element)) + element for element in array)
            message.raw_input_contents.append(raw)
        else:
            message.raw_input_contents.append(array.tobytes())
    return message


async def targets(stub: GRPCInferenceServiceStub, message: pb.ModelInferRequest) -> list[list[int]]:
    """The token ids of each row."""
    message.outputs.add(name="output_ids")
    response = await stub.ModelInfer(message)
    [output] = response.outputs
    ids = list(output.contents.int64_contents)
    if response.raw_output_contents:
        ids = np.frombuffer(response.raw_output_contents[0], "<i8").tolist()
    rows: list[list[int]] = np.reshape(ids, (output.shape[0], -1)).tolist()
    return rows


def stacked(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("is_raw", [True, False])
async def test_tensors_have_a_row_for_each_request(toy_paths, is_raw):
    rng = np.random.default_rng(0)
    rows = {name: [KINDS[name].draw(rng, 5) for _ in range(3)] for name in (PICTURE, CLIP, FEATURES)}
    words = [{STORY: rng.integers(4, 99, (4, 7)), QUESTION: rng.integers(4, 99, 9)} for _ in range(3)]
    scaled = {PICTURE: stacked(rows[PICTURE])[PICTURE].astype(np.float32) / 255}
    async with serving_bundles(*toy_paths.values()) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        for name, sources in {**rows, STORY: words}.items():
            expected = [KINDS[name].tokens(row, 6) for row in sources]
            assert await targets(stub, infer_request(name, is_raw=is_raw, **stacked(sources))) == expected
        expected = [KINDS[PICTURE].tokens(row, 6) for row in rows[PICTURE]]
        assert await targets(stub, infer_request(PICTURE, is_raw=is_raw, **scaled)) == expected


@pytest.mark.parametrize("is_raw", [True, False])
async def test_texts_and_files_are_bytes_and_padding_ends_ragged_rows(toy_paths, is_raw):
    rng = np.random.default_rng(1)
    pictures = [KINDS[PICTURE].draw(rng, 1) for _ in range(2)]
    clips = [KINDS[CLIP].draw(rng, length) for length in (3, 8)]
    stories = [["Go.", "Come back!"], ["Stay."]]
    questions = ["Who?", "Where is the apple?"]
    words = [
        {STORY: story_of(*sentences), QUESTION: token_ids(question)}
        for sentences, question in zip(stories, questions, strict=True)
    ]
    padded = {STORY: np.zeros((2, 3, 12), np.int64), QUESTION: np.zeros((2, 30), np.int64)}
    for place, row in enumerate(words):
        for name, array in row.items():
            padded[name][(place, *map(slice, array.shape))] = array
    cases = [
        (PICTURE, pictures, {PICTURE: elements(*(picture_file(row[PICTURE]) for row in pictures))}),
        (CLIP, clips, {CLIP: elements(*(clip_file(row[CLIP]) for row in clips))}),
        (STORY, words, padded),
        (
            STORY,
            words,
            {
                QUESTION: elements(*map(str.encode, questions)),
                STORY: elements(*(" ".join(sentences).encode() for sentences in stories)),
            },
        ),
    ]
    async with serving_bundles(*toy_paths.values()) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        for name, rows, arrays in cases:
            expected = [KINDS[name].tokens(row, 6) for row in rows]
            assert await targets(stub, infer_request(name, is_raw=is_raw, **arrays)) == expected


async def test_metadata_and_config_describe_the_inputs_of_every_form(toy_paths):
    expected = {
        PICTURE: [(PICTURE, "UINT8", [-1, 6, 6, 3])],
        CLIP: [(CLIP, "UINT8", [-1, -1, 2, 2, 3])],
        FEATURES: [(FEATURES, "FP32", [-1, -1, 3])],
        STORY: [(STORY, "BYTES", [-1]), (QUESTION, "BYTES", [-1])],
        "text": [
            ("text_input", "BYTES", [-1]),
            ("input_ids", "INT64", [-1, -1]),
            ("input_lengths", "INT64", [-1]),
        ],
    }
    types = {"BYTES": pb.TYPE_STRING, "UINT8": pb.TYPE_UINT8, "FP32": pb.TYPE_FP32, "INT64": pb.TYPE_INT64}
    async with serving_bundles(*toy_paths.values()) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        for name, inputs in expected.items():
            metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=name))
            assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == inputs
            config = (await stub.ModelConfig(pb.ModelConfigRequest(name=name))).config
            assert [(one.name, one.data_type, list(one.dims), one.optional) for one in config.input] == [
                (one, types[datatype], shape, name == "text") for one, datatype, shape in inputs
            ]
            parameters = config.parameters
            assert parameters["max_source_length"].string_value == str(KINDS[name].memory_capacity)
        assert parameters.get("datatypes.text_input") is None
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name=CLIP))).config
        assert config.parameters["datatypes.clip"].string_value == "UINT8, FP32, BYTES"


PIXELS = np.zeros((2, 6, 6, 3), np.uint8)
TEXTS = elements(b"Go.", b"Come.")


def typed(model: str, name: str, datatype: str, shape: list[int], **contents) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return message


BAD = [
    (infer_request(PICTURE, text_input=TEXTS), "the inputs are text_input"),
    (
        infer_request(STORY, story=TEXTS, question=TEXTS, answer=TEXTS),
        "the inputs are answer, question, story",
    ),
    (infer_request(STORY, story=TEXTS, question=TEXTS[:1]), "there are 2 of story, 1 of question"),
    (
        infer_request(PICTURE, picture=PIXELS.astype(np.int64)),
        "picture is INT64, and must be UINT8 or FP32 or BYTES",
    ),
    (infer_request(PICTURE, picture=PIXELS[0]), "picture has 3 axes, and must have 4: rows first"),
    (infer_request(PICTURE, picture=PIXELS[:0]), "there are 0 rows: send 1 to 256"),
    (infer_request(STORY, story=elements(b"\xff"), question=TEXTS[:1]), "row 0 of story is not UTF-8"),
    (typed(PICTURE, PICTURE, "UINT8", [1], uint_contents=[256]), "an element of UINT8 is too large"),
    (typed(PICTURE, PICTURE, "UINT8", [2**20 + 1], uint_contents=[1]), "shape [1048577] is too large"),
]


async def test_bad_inputs_are_refused_and_nothing_is_lost(toy_paths):
    async with serving_bundles(*toy_paths.values()) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        for message, expected in BAD:
            with pytest.raises(AioRpcError) as caught:
                await stub.ModelInfer(message)
            assert caught.value.code() is StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(expected)
