"""Imported checkpoints of each kind of layer, position and source, in one server process on the stub."""

from dataclasses import dataclass

import numpy as np
import pytest
from grpc import insecure_channel

from benchmarks.serving import serving
from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.client import Client
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    Model,
    Target,
    TokenIds,
    TranscribeRequest,
    TranscribeStart,
    TurnDetection,
)
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.runner.runner import buckets_up_to
from tests.cuda_stub.log import Log, read_log
from tests.cuda_stub.run import Stub
from tests.export.huggingface.checkpoints import SHALLOW, Depth, make_checkpoint

pytestmark = pytest.mark.cuda_stub

NUM_SLOTS = 8
CASES = ("marian", "nllb", "t5", "whisper", "trocr", "t5gemma", "t5gemma2")
OPTIONS = {
    "greedy": GenerateOptions(),
    "beam": GenerateOptions(beam_size=4, num_hypotheses=4),
    "sample": GenerateOptions(temperature=1, top_p=0.9, seed=1, num_hypotheses=3, beam_size=1),
    "repetition": GenerateOptions(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4),
    "prefix": GenerateOptions(target_prefix=Target(token_ids=TokenIds(values=[5, 6, 7])), beam_size=2),
    "attention": GenerateOptions(attention=True),
}


@dataclass(frozen=True)
class Life:
    """The record of the process.

    Attributes:
        models: As the server lists them.
        answers: Number of hypotheses by case and option.
        live_texts: Number of texts of a stream of speech, which Whisper encodes in short windows.
    """

    models: list[Model]
    answers: dict[tuple[str, str], int]
    live_texts: int
    stderr: str
    log: Log


def source_of(model: Model) -> list[int] | np.ndarray:
    """A text of four tokens, or a sound or picture of zeros."""
    [(name, form)] = model.sources.items()
    if form == "text":
        return [5, 6, 7, 2]
    return np.zeros(model.source_shapes[name].sizes, np.uint8 if form == "picture" else np.float32)


@pytest.fixture(scope="module")
def life(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("imported")
    for case in CASES:
        never = {"suppress_tokens": [9, 11]} if case in ("marian", "t5gemma2") else {}
        # In Gemma's halves the first layer has a window and the second one has not.
        depth = Depth(2, 2) if case.startswith("t5gemma") else SHALLOW
        make_checkpoint(case, folder / "checkpoints" / case, depth, **never)
        export_checkpoint(folder / "checkpoints" / case, folder / case, [Precision.FP16])
    log, stderr = folder / "log", folder / "stderr"
    bundles = [folder / case for case in CASES]
    flags = ["--provider", "require", "--max-slots", str(NUM_SLOTS), "--log-level", "info"]
    with (
        stderr.open("wb") as file,
        serving(bundles, flags, stderr=file, environment=stub.environment(log)) as server,
        Client(server.address, timeout_seconds=60) as client,
    ):
        models, answers = client.models(), {}
        for model in models:
            for name, given in OPTIONS.items():
                options = GenerateOptions(max_new_tokens=12)
                options.MergeFrom(given)
                for option, choice in model.choices.items():
                    if not choice.default:
                        setattr(options, option, choice.names[0])
                answer = client.generate(source_of(model), model=model.name, options=options)
                answers[model.name, name] = len(answer.hypotheses)
        live_texts = num_live_texts(server.address)
    return Life(models, answers, live_texts, stderr.read_text(), read_log(log.read_text()))


def num_live_texts(address: str) -> int:
    """Returns how many texts answer two seconds of noise."""
    options = GenerateOptions(source_language="ko", no_speech_threshold=1)
    start = TranscribeStart(
        model="whisper",
        options=options,
        encoding="SOUND_ENCODING_PCM_F32",
        turn_detection=TurnDetection(off=True),
        interval_seconds=0.1,
    )
    content = np.random.default_rng(0).standard_normal(2 * SAMPLE_RATE).astype("<f4").tobytes()
    messages = [TranscribeRequest(start=start)]
    messages += [
        TranscribeRequest(sound=content[place : place + 12800]) for place in range(0, len(content), 12800)
    ]
    with insecure_channel(address) as channel:
        events = [
            one.WhichOneof("event") for one in Seq2SeqStub(channel).Transcribe(iter(messages), timeout=60)
        ]
    assert events[-1] == "result"
    return events.count("text")


def test_every_model_runs_on_cuda_and_its_steps_are_captured(life):
    assert {model.name: (model.provider, model.precision) for model in life.models} == dict.fromkeys(
        CASES, ("cuda", "fp16")
    )
    assert "not captured" not in life.stderr
    # An encode call of every model has at least the shapes of 1 to 16 rows.
    assert len(life.log.whole.captures) >= len(CASES) * (len(buckets_up_to(NUM_SLOTS)) + 3)


def test_biases_by_distance_do_not_need_attention_of_several_kernels(life):
    assert life.log.whole.captured_launches["UnpackRoPEAppend"] == 0


def test_calls_of_every_kind_are_answered(life):
    for (case, name), num_hypotheses in life.answers.items():
        assert num_hypotheses == max(OPTIONS[name].num_hypotheses, 1), (case, name)
    assert len(life.answers) == len(CASES) * len(OPTIONS)


def test_live_speech_is_encoded_in_short_windows(life):
    assert life.live_texts > 1


def test_nothing_that_cuda_refuses_is_asked_of_it(life):
    assert life.log.whole.errors == []
