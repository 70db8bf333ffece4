"""Models in a program of one's own, with a real bundle of random weights."""

import ast
import asyncio
import itertools
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import seq2seq_serve
from seq2seq_serve import load
from seq2seq_serve.bundle.manifest import BundleError
from seq2seq_serve.client import Client, ClientError, FieldViolation, GenerateOptions
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.sources import sources_of
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.errors import InvalidRequest, Overloaded, ServerError, Unavailable, UnknownModel
from seq2seq_serve.server.library import AsyncModel
from tests.server.service.harness import on_a_thread, serving_bundles

TEXTS = ["나는 학생이다", "오늘은 금요일 입니다", "비가 온다"]
SETTINGS = {"provider": "cpu", "precision": "fp32", "max_slots": 4}


@pytest.fixture(scope="module")
def model(bundle_path):
    with load(bundle_path, threads=1, **SETTINGS) as model:
        yield model


@pytest.fixture(scope="module")
def client(bundle_path):
    runner = RunnerConfig(provider="cpu", precision="fp32", num_threads=1, max_slots=4)
    with on_a_thread(serving_bundles(bundle_path, runner=runner)) as served, Client(served.address) as client:
        yield client


def test_a_program_translates_in_ten_lines_without_grpc(bundle_path, client):
    program = f"""
import sys
sys.modules["grpc"] = None
from seq2seq_serve import load
with load({str(bundle_path)!r}, precision="fp32", provider="cpu", threads=1) as model:
    print(model.translate({TEXTS!r}, beam_size=2))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answers = [client.translate(text, options=GenerateOptions(beam_size=2)) for text in TEXTS]
    assert done.stdout.strip() == repr(answers)


def test_answers_are_those_of_a_server_in_the_order_of_the_sources(model, client):
    options = {"num_alternatives": 2, "log_probabilities": True, "attention": True}
    for answer, text in zip(model.generate(TEXTS * 5, **options), TEXTS * 5, strict=True):
        expected = client.generate(text, options=GenerateOptions(**options))
        assert answer.hypotheses == expected.hypotheses


def test_few_of_endless_sources_are_read_ahead(model):
    read = []

    def endless():
        for text in itertools.cycle(TEXTS):
            read.append(text)
            yield text

    answers = model.generate(endless(), max_new_tokens=3)
    assert [answer.hypotheses[0].text for answer in itertools.islice(answers, 20)]
    answers.close()
    assert len(read) <= 20 + 2 * model.description.num_slots


def test_the_pieces_of_a_stream_join_to_the_translation(model):
    pieces = list(model.stream(TEXTS[0]))
    assert len(pieces) > 1
    assert "".join(pieces) == model.translate([TEXTS[0]])[0]
    beginning = model.stream(TEXTS[0])
    assert "".join(pieces).startswith(next(beginning))
    beginning.close()  # which frees its slot
    assert model.translate(TEXTS) == model.translate(TEXTS)


def test_targets_have_the_terms_that_a_program_gives(model, client):
    terms = {TEXTS[0][:2]: "aw"}
    translated = model.translate(TEXTS, terms=terms)
    assert "aw" in translated[0]
    assert translated[1:] == model.translate(TEXTS[1:])
    assert [each.text for each in client.translate_many(TEXTS, options={"terms": terms})] == translated
    with pytest.raises(InvalidRequest, match="the source of term 1 has 0 characters"):
        model.translate(TEXTS, terms={"": "a"})


def test_scores_are_those_of_a_server(model, client):
    assert model.score(TEXTS[0], TEXTS[1]).log_probabilities == list(
        client.score(TEXTS[0], TEXTS[1]).log_probabilities
    )
    assert model.score(TEXTS[0], [5, 6, 7]).score < 0


def test_several_instances_answer_alike(bundle_path, model):
    with load(str(bundle_path), instances=2, threads=2, **SETTINGS) as double:
        assert double.description.num_slots == 4
        assert double.translate(TEXTS * 3) == model.translate(TEXTS * 3)


def test_wrong_arguments_and_settings_are_named(model, bundle_path, tmp_path, caplog):
    with pytest.raises(TypeError, match="the texts must be several"):
        model.translate("one text")
    with pytest.raises(TypeError, match="no_such_option"):
        model.translate(TEXTS, no_such_option=1)
    with pytest.raises(InvalidRequest, match="beam_size is 9, and must be from 1 to 4"):
        model.translate(TEXTS, beam_size=9)
    with pytest.raises(InvalidRequest, match="not a story and a question"):
        model.answer("a story", "a question")
    with pytest.raises(TypeError, match="source 1: a source must be a text, a list of token ids"):
        model.translate([TEXTS[0], float("nan")])
    answers = model.generate([TEXTS[0], "\udcff"])
    assert next(answers).hypotheses
    with pytest.raises(InvalidRequest, match="source 1: not valid UTF-8 at character 1"):
        next(answers)
    with pytest.raises(
        ValueError, match="load: no_such_setting: there is no such setting here, only provider"
    ):
        load(bundle_path, no_such_setting=1)
    with pytest.raises(ValueError, match="load: precision is 'int3', and must be 'fp32', 'fp16'") as caught:
        load(bundle_path, precision="int3")
    assert not caught.type.__name__.startswith("_")  # it is in the last line of the traceback
    with pytest.raises(ValueError, match="is not a usable bundle"):
        load(tmp_path)
    with pytest.raises(ValueError, match="and all slots may take 1: raise max_slots_size"):
        load(bundle_path, memory_budget=1, provider="cpu")
    assert "load: memory_budget is called max_slots_size now" in caplog.messages
    with pytest.raises(AttributeError, match="nothing"):
        seq2seq_serve.nothing  # noqa: B018


def test_a_closed_model_refuses(bundle_path):
    model = load(bundle_path, threads=1, draft=None, **SETTINGS)
    model.close()
    model.close()
    with pytest.raises(Unavailable, match="the model was closed"):
        model.translate(TEXTS)


def test_calls_that_wait_while_other_threads_close_the_model_get_an_error(bundle_path):
    model = load(bundle_path, threads=1, **SETTINGS)
    have_answers, ends = threading.Barrier(5), []

    def read():
        answers = model.generate(itertools.cycle(TEXTS))
        next(answers)
        have_answers.wait()
        with pytest.raises(Unavailable) as caught:
            list(answers)
        ends.append(caught.value)

    def close():
        have_answers.wait()
        model.close()

    threads = [threading.Thread(target=each) for each in [read] * 3 + [close] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.close()
    assert len(ends) == 3


def test_a_model_that_nobody_holds_ends(bundle_path):
    before = set(threading.enumerate())
    model = load(bundle_path, threads=1, **SETTINGS)
    answers = model.generate(TEXTS * 5)
    next(answers)
    theirs = {thread for thread in threading.enumerate() if thread.name == "seq2seq-serve"} - before
    del model
    assert len(list(answers)) == len(TEXTS * 5) - 1  # the answers hold it
    del answers
    (thread,) = theirs
    thread.join()
    assert not [thread for thread in set(threading.enumerate()) - before if "core-" in thread.name]


def test_an_abandoned_stream_returns_its_slot(bundle_path):
    model = load(bundle_path, threads=1, **SETTINGS)
    for _ in range(3 * SETTINGS["max_slots"]):
        next(model.stream(TEXTS[0]))
    assert model.translate(TEXTS)
    model.close()


def test_a_model_works_inside_of_event_loops_one_after_another(model):
    """In Jupyter, a loop runs already."""

    async def main():
        return model.translate(TEXTS[:1]), ["".join(model.stream(TEXTS[0]))]

    first, second = asyncio.run(main()), asyncio.run(main())
    assert first[0] == first[1] == second[0] == second[1]


def test_an_async_model_on_another_event_loop_or_none_is_an_error(bundle_path):
    """Its answers never came."""
    runner = RunnerConfig(provider="cpu", precision="fp32", num_threads=1, max_slots=2)
    model = AsyncModel(bundle_path, runner)

    async def answer():
        return await model.generate(sources_of(TEXTS[0]), model.read_options(pb.GenerateOptions()))

    with pytest.raises(Unavailable, match="the model was not started: await its method start first"):
        asyncio.run(answer())
    with asyncio.Runner() as first:
        first.run(model.start())
        assert first.run(answer()).hypotheses
        with pytest.raises(ValueError, match="the model was started before"):
            first.run(model.start())
        with (
            pytest.raises(Unavailable, match="started on another event loop, and only works there"),
            asyncio.Runner() as second,
        ):
            second.run(answer())
        with pytest.raises(Unavailable, match="on another event loop"), asyncio.Runner() as second:
            second.run(model.stop())
        first.run(model.stop())


def test_the_example_of_the_page_runs(bundle_path, capsys):
    page = (Path(seq2seq_serve.__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    exec(
        example.replace('"bundles/demo"', f'{str(bundle_path)!r}, threads=2, provider="cpu", max_slots=8'), {}
    )
    translations, _, rest = capsys.readouterr().out.partition("\n")
    assert len(ast.literal_eval(translations)) == 2
    assert re.search(r"-\d+\.\d+ \[\('", rest)


@pytest.mark.parametrize(
    "error",
    [
        BundleError(Path("demo"), ["a is missing", "b is too large"]),
        ClientError("INTERNAL", "a bug", field_violations=(FieldViolation("options", "too large"),)),
        InvalidRequest("it is wrong", field="options"),
        Overloaded("later", retry_after_seconds=2.0),
        UnknownModel("there is none", name="a"),
        Unavailable("not now"),
        ServerError("anything"),
    ],
)
def test_errors_survive_a_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_an_error_names_the_source_and_a_blank_text_has_an_empty_target(model):
    texts = [TEXTS[0], " ", TEXTS[1]]
    first, blank, last = model.translate(texts)
    assert [first, last] == model.translate(TEXTS[:2])
    assert blank == ""
    with pytest.raises(InvalidRequest, match=r"^source 2: the text has"):
        model.translate([TEXTS[0], "", "a" * 100_000])
    with pytest.raises(InvalidRequest, match=r"^source 0: the text is empty"):
        list(model.generate([""]))


def test_a_method_for_another_kind_of_model_is_refused(model):
    """The name of a picture was translated."""
    for method, what in ((model.caption, "a picture"), (model.transcribe, "a sound")):
        with pytest.raises(InvalidRequest, match=f"takes text, not {what}"):
            method("README.md")


def test_a_stream_of_several_hypotheses_is_refused(model):
    with pytest.raises(InvalidRequest, match="a stream has one hypothesis"):
        list(model.stream(TEXTS[0], num_hypotheses=2))
