"""How models in a program end, fork and are interrupted, in programs of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_BEGINNING = """
import asyncio, os, signal, sys, threading
from pathlib import Path
from seq2seq_serve import load
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.sources import sources_of
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.errors import ServerError, Unavailable
from seq2seq_serve.server.library import AsyncModel

BUNDLE, TEXT, LONG = Path({bundle!r}), "나는 학생이다", {{"min_new_tokens": 40, "max_new_tokens": 45}}

def loaded(num_instances=1):
    settings = {{"threads": num_instances, "instances": num_instances, "max_slots": 2 * num_instances}}
    return load(BUNDLE, provider="cpu", precision="fp32", **settings)

def async_model():
    return AsyncModel(BUNDLE, RunnerConfig(provider="cpu", precision="fp32", max_slots=2, num_threads=1))

async def answer(model, **options):
    decoding = model.read_options(pb.GenerateOptions(**options))
    return (await model.generate(sources_of(TEXT), decoding)).hypotheses[0].text

def show(error):
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def run(bundle_path):
    """Run a program: its exit code, output, and errors, with all warnings."""

    def run(program: str) -> tuple[int, str, str]:
        text = _BEGINNING.format(bundle=str(bundle_path)) + textwrap.dedent(program)
        done = subprocess.run(
            [sys.executable, "-W", "default", "-c", text],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


# Threads read answers for ever, each of its own model, and the program ends beside them. About two thirds of
# the threads were inside of ONNX Runtime then.
_READING = """
def read(model, has_answer):
    while True:
        for _ in {answers}:
            has_answer.set()

for _ in range({num_models}):
    model, has_answer = loaded({num_instances}), threading.Event()
    threading.Thread(target=read, args=(model, has_answer), daemon=True).start()
    has_answer.wait()
"""
_ALL_ANSWERS = "model.generate([TEXT] * 1000, **LONG)"


@pytest.mark.parametrize(
    ("num_models", "num_instances", "answers", "end", "code", "last_line"),
    [
        (6, 1, _ALL_ANSWERS, "sys.exit(7)", 7, ""),
        (1, 2, _ALL_ANSWERS, "sys.exit(7)", 7, ""),
        (6, 1, "model.stream(TEXT, **LONG)", "raise RuntimeError('my own')", 1, "RuntimeError: my own"),
    ],
)
def test_a_program_that_ends_while_threads_read_has_its_own_exit_code(
    num_models, num_instances, answers, end, code, last_line, run
):
    """It aborted: the interpreter ended threads inside of ONNX Runtime."""
    program = _READING.format(num_models=num_models, num_instances=num_instances, answers=answers) + end
    done, _, errors = run(program)
    assert done == code, errors
    assert (errors.splitlines() or [""])[-1] == last_line
    assert errors.startswith("Traceback") == bool(last_line)


def test_a_program_whose_model_has_an_event_loop_ends_with_its_own_exit_code(run):
    code, _, errors = run("""
        async def main():
            model = async_model()
            await model.start()
            going = [asyncio.create_task(answer(model, **LONG)) for _ in range(50)]
            await going[0]

        for _ in range(6):
            asyncio.run(main())
        sys.exit(7)
    """)
    assert (code, errors) == (7, "")


def test_threads_that_outlive_the_main_thread_use_the_model_and_close_it(run):
    """Python then starts no more threads for what is read, moved and closed on threads."""
    code, output, errors = run("""
        model = loaded()

        def use():
            threading.main_thread().join()
            long = " ".join(["학생"] * 3000)
            print(len(model.translate([TEXT, long, TEXT] * 3, long_source="truncate", beam_size=2)))
            model.close()

        threading.Thread(target=use).start()
    """)
    assert (code, output, errors) == (0, "9\n", "")


def test_a_forked_process_gets_an_error_and_can_load_a_model_of_its_own(run):
    """It waited for ever for threads that it does not have."""
    code, output, errors = run("""
        with loaded() as model:
            begun, streamed = model.generate([TEXT] * 9), model.stream(TEXT)
            expected = next(begun).hypotheses[0].text, next(streamed)
            uses = [
                lambda: model.translate([TEXT]),
                lambda: next(model.stream(TEXT)),
                lambda: model.score(TEXT, TEXT),
                lambda: next(begun),
                lambda: next(streamed),
            ]
            child = os.fork()
            if not child:
                for use in uses:
                    try:
                        use()
                    except Unavailable as error:
                        show(error)
                with loaded() as own:
                    assert own.translate([TEXT])[0] == expected[0]
                sys.exit(3)  # through the block of the parent's model
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            assert next(begun).hypotheses[0].text == expected[0]
            assert (expected[1] + "".join(streamed)) == expected[0]
    """)
    lines = output.splitlines()
    assert (code, len(lines)) == (0, 5), errors
    (line,) = set(lines)
    assert line.startswith(
        "Unavailable this process was forked after the model was loaded, and does not have"
    )
    assert line.endswith("load the model in this process, or start it with the method 'spawn'")
    assert "Exception" not in errors
    assert "Traceback" not in errors


_USES = """
uses = [
    lambda: list(model.generate([TEXT] * 9, **LONG)),
    lambda: model.translate([TEXT] * 9, **LONG),
    lambda: list(model.stream(TEXT, **LONG)),
    lambda: model.score(TEXT, TEXT),
]
model = loaded()
engine = model._model._model.engine
"""


def test_an_interrupt_cancels_the_call_that_waits(run):
    code, output, errors = run(
        _USES
        + """
signal.signal(signal.SIGINT, signal.default_int_handler)
going = threading.Semaphore(0)

def interrupt():
    for _ in range(5 * len(uses)):
        going.acquire()
        os.kill(os.getpid(), signal.SIGINT)

interrupting = threading.Thread(target=interrupt)
interrupting.start()
left = 0
for use in uses * 5:
    try:
        going.release()
        while True:
            use()
    except KeyboardInterrupt:
        pass
    model.score(TEXT, TEXT)  # ends in a later turn than all that was cancelled
    left += len(engine._streams)
interrupting.join()
print(left, len(model.translate([TEXT] * 3)))
"""
    )
    assert (code, output, errors) == (0, "0 3\n", "")


def test_an_interrupt_at_any_moment_of_a_call_leaves_neither_a_warning_nor_a_request(run):
    """A coroutine that nothing had begun yet "was never awaited"."""
    code, output, errors = run(
        _USES
        + """
from seq2seq_serve.server import library

def is_interrupted(use, number):
    def count(frame, event, _):
        # Where Python looks for signals: at the start of a function, and after a call.
        nonlocal number
        if event in ("call", "c_return") and frame.f_code.co_filename == library.__file__:
            number -= 1
            if not number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        use()
    except KeyboardInterrupt:
        return True
    sys.setprofile(None)
    return False

LONG.update(min_new_tokens=1, max_new_tokens=2)
for use in uses:
    number = 1
    while is_interrupted(use, number):
        number += 1
    assert number > 10, number
print(len(model.translate([TEXT] * 3)))
model.close()
print(len(engine._streams), engine.num_slots_wanted())
"""
    )
    assert (code, output, errors) == (0, "3\n0 0\n", "")


def test_an_interrupt_while_a_model_is_loaded_leaves_no_warning(run):
    code, output, errors = run("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for _ in range(5):
            starting = threading.Event()
            begin = AsyncModel.start

            async def start(self, begin=begin, starting=starting):
                AsyncModel.start = begin
                starting.set()
                await begin(self)

            AsyncModel.start = start
            threading.Thread(target=lambda: (starting.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
            try:
                loaded()
                signal.pause()
            except KeyboardInterrupt:
                print("interrupted")
        for thread in threading.enumerate():
            if thread.name == "seq2seq-serve":
                thread.join()
        print([thread.name for thread in threading.enumerate() if "core" in thread.name])
    """)
    assert (code, output, errors) == (0, "interrupted\n" * 5 + "[]\n", "")
