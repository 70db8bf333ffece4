"""The real runner under the real engine: a request gets the same tokens alone and in any batch."""

import dataclasses
import functools
import random
import threading
import weakref
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import SOUND, SOURCE_IDS, Precision, Verb
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.plan import Selected
from seq2seq_serve.server.engine.request import Array, Beam, Constraints, Request, Sampling
from seq2seq_serve.server.engine.result import FinishReason
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.runner import device as device_module
from seq2seq_serve.server.runner import runner as runner_module
from seq2seq_serve.server.runner.buffers import COLUMNS
from seq2seq_serve.server.runner.device import OnnxDevice, has_operators
from seq2seq_serve.server.runner.runner import OnnxRunner, buckets_up_to
from seq2seq_serve.server.runner.selection import Selector
from seq2seq_serve.server.runner.sizing import source_specs
from seq2seq_serve.training.run import TrainedModel
from tests.server.driver import Driver


@pytest.fixture(scope="session")
def trained_bundle(trained_run) -> Bundle:
    return load_bundle(trained_run.bundle)


class RecordingRunner(OnnxRunner):
    """Keeps the logits of every request's every step."""

    def __init__(self, bundle: Bundle, config: RunnerConfig) -> None:
        super().__init__(bundle, config)
        self.can_choose, self.chooses_tokens = (
            self.chooses_tokens,
            False,
        )  # a step that chooses tokens writes no logits
        self.logits: dict[Request, list[Array]] = defaultdict(list)

    def step(self, rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        selected = super().step(rows, num_steps)
        logits = self._columns._logits
        values = logits if isinstance(logits, np.ndarray) else logits.numpy()
        for row, sequence in enumerate(rows):
            self.logits[sequence.request].append(values[row].copy())
        return selected


def make_runner(bundle: Bundle, num_slots: int = 4, precision=Precision.FP32, **options) -> RecordingRunner:
    settings = {"provider": "cpu", "precision": precision, "num_threads": 1, "max_slots": num_slots} | options
    return RecordingRunner(bundle, RunnerConfig(**settings))


TICK = 1e-5  # seconds of a step that a core does several times in a turn


def make_request(source, max_new_tokens: int = 16, **options) -> Request:
    return Request("r", {SOURCE_IDS: np.array(source, np.int64)}, len(source), max_new_tokens, 0.0, **options)


def sounds_of(bundle: Bundle, lengths: list[int]) -> list[Request]:
    precision = next(iter(bundle.manifest.variants))
    rng, [spec] = np.random.default_rng(5), source_specs(bundle.manifest, precision)
    sounds = [{SOUND: rng.standard_normal((spec.axes[1], length), np.float32)} for length in lengths]
    rule = bundle.manifest.memory
    return [Request("r", sound, rule.memory_length_of(sound), 12, 0.0, attention=True) for sound in sounds]


def copies_of(requests: list[Request]) -> list[Request]:
    return [dataclasses.replace(request, sources=dict(request.sources)) for request in requests]


def random_requests(bundle: Bundle, count: int, seed: int) -> list[Request]:
    """Sources of any length, some of them of one token and some as long as the model takes."""
    chance = random.Random(seed)
    manifest = bundle.manifest
    lengths = [1, manifest.max_source_length] + [
        chance.randint(1, manifest.max_source_length) for _ in range(count - 2)
    ]
    return [
        make_request(
            [chance.randrange(3, manifest.sizes["vocab_size"]) for _ in range(length)],
            chance.randint(1, manifest.max_target_length),
        )
        for length in lengths
    ]


def numbers(trained: TrainedModel, seed: int, count: int = 40) -> list[list[int]]:
    """Sources like those that the model was trained on."""
    chance = random.Random(seed)
    words = "하나", "둘", "셋", "넷", "다섯"
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 4))) for _ in range(count)]
    return trained.tokenizer.encode_sources(texts)


@pytest.fixture(scope="module")
def alone(random_bundle, trained_bundle):
    """What each of some requests gets alone in a runner of one slot: its tokens and logits."""

    @functools.cache
    def alone(name: str, precision: Precision):
        bundle = random_bundle if name == "random" else trained_bundle
        runner = make_runner(bundle, 1, precision, num_threads=2)
        answers = {}
        for request in random_requests(bundle, 40, seed=1):
            driver = Driver(runner)
            driver.submit(request)
            driver.finish()
            answers[request] = driver.results[request], runner.logits[request]
        return answers

    return alone


@pytest.mark.parametrize(
    ("name", "precision", "num_slots"),
    [
        ("random", Precision.FP32, 1),
        ("random", Precision.INT8, 3),
        ("random", Precision.INT4, 3),
        ("random", Precision.FP32, 16),
        ("trained", Precision.INT8, 16),
    ],
)
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(
    name, precision, num_slots, alone, random_bundle, trained_bundle, monkeypatch
):
    """Any arrival order, any number of slots, any bound on encoding, whoever else comes and goes."""
    bundle = random_bundle if name == "random" else trained_bundle
    runner = make_runner(bundle, num_slots, precision, num_threads=2)
    expected = alone(name, precision)
    columns, fill = runner._columns, runner._columns.fill

    def checked_fill(rows, *, have_grown):
        fill(rows, have_grown=have_grown)
        for column, values in columns._host.items():
            assert values[: len(rows)].tolist() == COLUMNS[column].of_rows(rows), column

    monkeypatch.setattr(columns, "fill", checked_fill)
    for seed in range(2):
        chance = random.Random(100 * num_slots + seed)
        runner.logits.clear()
        runner.chooses_tokens = bool(seed) and runner.can_choose
        limits = SchedulerLimits(max_encode_tokens=chance.choice([1, 60, 200, 1000]))
        driver = Driver(runner, limits=limits)  # rows hold what the history before left in them
        # The same request twice would be another object: these copies are compared with the originals.
        copies = {dataclasses.replace(request, stream=chance.random() < 0.5): request for request in expected}
        strangers = random_requests(bundle, 10, seed=2)
        waiting = [*copies, *strangers]
        chance.shuffle(waiting)
        while waiting:
            for _ in range(chance.randint(0, 5)):
                if waiting:
                    driver.submit(waiting.pop())
            driver.turn(chance.randint(0, 3))
            driver.cancel(chance.choice(strangers))
        driver.finish()
        for copy, request in copies.items():
            result, logits = expected[request]
            assert driver.results[copy].best.token_ids == result.best.token_ids
            assert driver.results[copy].finish_reason is result.finish_reason
            assert len(runner.logits[copy]) == len(logits)
            if not runner.chooses_tokens:
                difference = max(
                    np.abs(a - b).max() for a, b in zip(runner.logits[copy], logits, strict=True)
                )
                assert difference <= (0 if has_operators() else 1e-5)
            if copy.stream:
                assert tuple(driver.told(copy)) == result.best.token_ids


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("of", ["random_bundle", "trained_bundle"])
def test_several_steps_of_a_turn_select_what_single_steps_select(of, chooses, request, monkeypatch):
    """Whoever ends in the middle; and a step without numbers, which is not the first, is done again."""
    bundle = request.getfixturevalue(of)
    runner, chance = make_runner(bundle, 5, Precision.INT8), random.Random(1)
    runner.chooses_tokens = chooses and runner.can_choose
    requests = random_requests(bundle, 40, seed=3)
    stops = StopSequences(["o", "e "], bundle.target_tokenizer.token_bytes)
    requests = [
        dataclasses.replace(one, stream=number % 2 > 0, stops=stops if number % 3 else None)
        for number, one in enumerate(requests)
    ]
    step, read = runner.step, runner._columns.read_token_ids
    num_read = 0

    def counted_step(rows, *num_steps):
        nonlocal num_read
        num_read = 0
        return step(rows, *num_steps)

    def read_or_fail(num_rows):
        nonlocal num_read
        num_read += 1
        token_ids = read(num_rows)
        return [-1] * num_rows if num_read == 3 and chance.random() < 0.3 else token_ids

    answers, num_steps = [], []
    for tick in (0.0, TICK):
        driver = Driver(runner, tick=tick)
        copies = [dataclasses.replace(one) for one in requests]
        for copy in copies:
            driver.submit(copy)
            driver.turn(seconds=0.0)
        driver.finish()
        answers.append([driver.results[copy].best for copy in copies])
        for copy, best in zip(copies, answers[-1], strict=True):
            assert not copy.stream or tuple(driver.told(copy)) == best.token_ids
        num_steps.append({turn.num_steps for turn in driver.turns})
        monkeypatch.setattr(runner, "step", counted_step)
        monkeypatch.setattr(runner._columns, "read_token_ids", read_or_fail)
    assert answers[0] == answers[1]
    assert num_steps[0] == {1}
    assert num_steps[1] >= {2, 4}


def test_the_requests_of_the_batch_test_end_by_eos_and_by_length(alone):
    reasons = {result.finish_reason for result, _ in alone("trained", Precision.INT8).values()}
    assert reasons == {FinishReason.EOS, FinishReason.LENGTH}
    targets = {result.best.token_ids for result, _ in alone("random", Precision.FP32).values()}
    assert len(targets) > 30, "different sources get different targets"


class FarDevice(OnnxDevice):
    """The CPU, treated as a device whose memory numpy cannot reach."""

    def __init__(self, provider: str, num_threads: int) -> None:
        super().__init__(provider, num_threads)
        self.is_host = False

    def value(self, array):
        return super().value(array.copy())


def use_device(device: type[OnnxDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "OnnxDevice", device)
    if issubclass(device, FarDevice):  # without operators, nothing is packed for them
        monkeypatch.setattr(device_module, "has_operators", lambda: False)


def test_a_device_that_is_not_the_host_gives_the_same_answers(trained_run, trained_bundle, monkeypatch):
    sources = numbers(trained_run.trained, seed=4)
    answers = []
    for device in (OnnxDevice, FarDevice):
        use_device(device, monkeypatch)
        runner = make_runner(trained_bundle, 3)
        assert runner.device.is_host is (device is not FarDevice)
        content = weakref.ref(runner._files)
        runner.warm_up()
        assert (content() is None) is (device is FarDevice), (
            "the host keeps weights that the device has copied"
        )
        driver = Driver(runner)
        requests = [make_request(source, attention=True) for source in sources]
        driver.submit(*requests)
        driver.finish()
        answers.append([driver.results[request] for request in requests])
        assert sum(turn.moved_bytes for turn in driver.turns) > 0
    for near, far in zip(*answers, strict=True):
        assert far.best.token_ids == near.best.token_ids
        # A device pads sources to few lengths, and sums of other lengths are rounded otherwise.
        np.testing.assert_allclose(far.best.attention, near.best.attention, atol=1e-6)


class CapturingDevice(OnnxDevice):
    """The CPU, as a device that captures steps, and whose rules about that are kept.

    Attributes:
        graph_ids: Of the runs since it was last cleared.
        num_direct: Runs of captured sessions that were neither captured nor replayed.
    """

    def __init__(self, provider: str, num_threads: int) -> None:
        super().__init__(provider, num_threads)
        self.can_capture = True
        self.num_direct = 0
        self.captured: dict[object, set[int]] = {}
        self.graph_ids: list[int] = []

    def session(self, *graph, is_captured=False):
        session = super().session(*graph)
        if is_captured:
            self.captured[session] = set()
        return session

    def replay(self, session, binding, graph_id):
        captured = self.captured[session]
        if graph_id == -1:  # neither captured nor replayed
            self.num_direct += 1
            super().replay(session, binding, graph_id)
            return
        captured.add(graph_id)
        self.graph_ids.append(graph_id)
        super().replay(session, binding, graph_id)


class FarCapturingDevice(CapturingDevice, FarDevice):
    """All that is different on a GPU."""


class RefusingDevice(CapturingDevice):
    """Captures no session."""

    def session(self, *graph, is_captured=False):
        if is_captured:
            raise RuntimeError("all nodes must be on CUDA")
        return super().session(*graph)


class FailingDevice(CapturingDevice):
    """Fails when it captures."""

    def replay(self, session, binding, graph_id):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("num_slots", "of"),
    [
        (3, "random_bundle"),
        (16, "random_bundle"),
        # Whose steps select their tokens and count positions themselves.
        pytest.param(16, "fused_bundle", marks=pytest.mark.slow),
    ],
)
def test_captured_steps_of_whole_buckets_give_the_same_tokens(num_slots, of, alone, request, monkeypatch):
    """The rows that fill a bucket up are free ones: what is done to them harms nobody."""
    expected = {request: result for request, (result, _) in alone("random", Precision.FP32).items()}
    use_device(CapturingDevice, monkeypatch)
    runner = make_runner(request.getfixturevalue(of), num_slots)
    runner.warm_up()
    chance = random.Random(num_slots)
    driver = Driver(runner, tick=TICK)
    waiting = {dataclasses.replace(request): request for request in expected}
    copies = dict(waiting)
    runner.device.graph_ids.clear()
    while waiting:
        for _ in range(min(len(waiting), chance.randint(0, 5))):
            driver.submit(waiting.popitem()[0])
        driver.turn(chance.randint(0, 3))
    driver.finish()
    for copy, request in copies.items():
        assert driver.results[copy].best.token_ids == expected[request].best.token_ids
    assert max(turn.num_steps for turn in driver.turns) == 4
    assert set(runner.device.graph_ids) == set(runner._buckets)
    assert {num_rows for num_rows, *_ in runner._bindings} == set(runner._buckets)


@pytest.mark.slow
@pytest.mark.parametrize("device", [CapturingDevice, FarCapturingDevice])
def test_steps_that_feed_themselves_give_the_same_tokens_whatever_the_neighbours_ask_for(
    device, fused_bundle, monkeypatch
):
    """Ids that the step wrote are replaced where another was selected; lengths follow the rows that move."""
    use_device(device, monkeypatch)
    plain = random_requests(fused_bundle, 12, seed=4)
    sampling = Sampling(0.8, top_k=5, top_p=1.0, min_p=0.0, seed=7)
    constraints = Constraints(repetition_penalty=1.3, min_new_tokens=4)
    requests = [
        *plain,
        *(dataclasses.replace(request, sampling=sampling) for request in plain),
        *(dataclasses.replace(request, beam=Beam(3)) for request in plain),
        *(dataclasses.replace(request, constraints=constraints) for request in plain),
    ]
    runner = make_runner(fused_bundle, 8)
    runner.warm_up()
    alone = []
    for request in requests:
        driver = Driver(runner)
        driver.submit(request)
        driver.finish()
        alone.append(driver.results[request].best.token_ids)
    for seed in range(3):
        chance, driver = random.Random(seed), Driver(runner, tick=TICK)
        copies = [dataclasses.replace(request) for request in requests]
        waiting = chance.sample(copies, len(copies))
        while waiting:
            driver.submit(*(waiting.pop() for _ in range(min(len(waiting), chance.randint(0, 5)))))
            driver.turn(chance.randint(0, 4))
        driver.finish()
        assert [driver.results[copy].best.token_ids for copy in copies] == alone


@pytest.mark.parametrize("most_encoded", [16, 64, 8192])
def test_captured_encode_calls_fill_the_same_memory_as_direct_ones(most_encoded, random_bundle, monkeypatch):
    """More requests than a captured call has rows, sources longer than its tokens, a full engine."""
    monkeypatch.setattr(runner_module, "_MOST_ENCODED", most_encoded)
    requests = random_requests(random_bundle, 41, seed=8)
    answers = []
    for device in (OnnxDevice, FarCapturingDevice):
        use_device(device, monkeypatch)
        runner = make_runner(random_bundle, 20)
        runner.warm_up()
        driver = Driver(runner)
        copies = [dataclasses.replace(request) for request in requests]
        driver.submit(*copies)
        driver.finish()
        answers.append([driver.results[copy].best.token_ids for copy in copies])
    assert {rows * length for rows, length in runner._staged} <= set(range(most_encoded + 1))
    assert runner._staged
    assert answers[0] == answers[1]


def test_whole_windows_of_sounds_are_captured_and_short_ones_are_not(whisper_path, monkeypatch):
    bundle, answers = load_bundle(whisper_path / "bundle"), []
    generation = dataclasses.replace(bundle.manifest.generation, suppressed_token_ids=())
    manifest = dataclasses.replace(bundle.manifest, generation=generation)  # the others need a graph of fp16
    bundle = dataclasses.replace(bundle, manifest=manifest)
    requests = sounds_of(bundle, [64, 20, 64, 64, 33, 33, 64, 2])
    for device in (OnnxDevice, FarCapturingDevice):
        use_device(device, monkeypatch)
        runner = make_runner(bundle, 4)
        runner.warm_up()
        driver, copies = Driver(runner), copies_of(requests)
        driver.submit(*copies)
        driver.finish()
        answers.append([driver.results[copy].best.token_ids for copy in copies])
    assert {length for _, length in runner._staged} == {32}
    assert answers[0] == answers[1]


def test_an_encode_call_before_any_shape_is_captured_captures_none(random_bundle, monkeypatch):
    """ONNX Runtime captures a run of such a session, unless it is forbidden to."""
    monkeypatch.setattr(runner_module, "_MOST_ENCODED", 0)
    use_device(FarCapturingDevice, monkeypatch)
    runner = make_runner(random_bundle, 3)
    runner.encode(0, random_requests(random_bundle, 2, seed=9))
    assert (runner._staged, runner.device.num_direct) == ({}, 1)


@pytest.mark.parametrize("hears", [False, True])
def test_a_warm_up_runs_every_graph_that_selects_and_loads_no_others(
    hears, random_bundle, whisper_path, monkeypatch
):
    """Only a model of sounds has times, languages that it detects and, here, tokens that it never selects."""
    ran, bound = set(), Selector._bound
    monkeypatch.setattr(
        Selector, "_bound", lambda self, graph, *given: (ran.add(graph), bound(self, graph, *given))[1]
    )
    runner = make_runner(load_bundle(whisper_path / "bundle") if hears else random_bundle, 2)
    runner.warm_up()
    assert ran == set(runner._selector._sessions)
    assert ran & {"suppress", "times", "detect"} == ({"suppress", "times", "detect"} if hears else set())


def test_a_warm_up_captures_every_bucket_the_largest_first(random_bundle, monkeypatch):
    use_device(FarCapturingDevice, monkeypatch)
    runner = make_runner(random_bundle, 5)
    runner.warm_up()
    sizes = [rows * length for rows, length in runner._staged]
    assert sizes == sorted(sizes, reverse=True)
    assert {rows for rows, _ in runner._staged} == {1, 2, 4}
    num_encodes = len(sizes)
    assert runner.device.graph_ids[:num_encodes] == list(range(1, num_encodes + 1))
    step_and_selection = [5, 5, 4, 4, 2, 2, 1, 1]
    again = runner._staged[1, 16].graph_id  # the source of the steps
    assert runner.device.graph_ids[num_encodes:][: 1 + len(step_and_selection)] == [
        again,
        *step_and_selection,
    ]


@pytest.mark.parametrize("device", [RefusingDevice, FailingDevice])
def test_steps_run_uncaptured_with_a_log_line_where_capturing_fails(
    device, random_bundle, monkeypatch, caplog
):
    use_device(device, monkeypatch)
    runner = make_runner(random_bundle, 3)
    runner.warm_up()
    assert not runner.captures_steps
    [message] = caplog.messages
    assert message.startswith(f"{random_bundle.path}: steps are not captured as CUDA graphs, and are slower:")
    driver = Driver(runner)
    driver.submit(*random_requests(random_bundle, 6, seed=6))
    driver.finish()


def test_a_cuda_error_that_outlasts_a_failed_capture_is_cleared_by_a_new_session(random_bundle, monkeypatch):
    """CUDA reports a thread's last error at its next call: the first step without a capture may fail, too."""
    use_device(CapturingDevice, monkeypatch)
    runner, failed, run_step = make_runner(random_bundle, 3), [], OnnxRunner._run_step

    def fail_twice(self, num_rows, **options):
        if len(failed) < 2:
            failed.append(self._sessions[Verb.STEP])
            raise RuntimeError("operation failed due to a previous error during capture")
        run_step(self, num_rows, **options)

    monkeypatch.setattr(OnnxRunner, "_run_step", fail_twice)
    runner.warm_up()
    assert not runner.captures_steps
    assert len({id(session) for session in (*failed, runner._sessions[Verb.STEP])}) == 3


def test_capturing_can_be_switched_off(random_bundle, monkeypatch):
    use_device(FailingDevice, monkeypatch)
    assert not make_runner(random_bundle, 3, cuda_graphs=False).captures_steps


def test_a_closed_runner_ends_its_threads(random_bundle):
    before = set(threading.enumerate())
    runner = make_runner(random_bundle)
    runner.device.pool.submit(runner.warm_up).result()
    assert set(threading.enumerate()) > before
    runner.close()
    assert set(threading.enumerate()) == before


def test_bindings_are_kept_while_the_room_of_memory_changes_and_the_oldest_one_is_dropped(
    random_bundle, monkeypatch
):
    runner = make_runner(random_bundle, num_slots=1)
    monkeypatch.setattr(runner._columns, "num_rows", 2)
    lengths = range(1, 10)  # one more than four for each of these rows
    bound, bind = [], runner._bind_step

    def bind_step(*arguments):
        bound.append(runner._memory_capacity)
        return bind(*arguments)

    def tokens(length):
        driver, request = Driver(runner), make_request(range(3, 3 + length))
        driver.submit(request)
        driver.finish()
        return driver.results[request].best.token_ids

    monkeypatch.setattr(runner, "_bind_step", bind_step)
    expected = {length: tokens(length) for length in lengths[:-1]}
    assert bound == [*lengths[:-1]]
    assert {length: tokens(length) for length in lengths[:-1]} == expected
    assert bound == [*lengths[:-1]]
    tokens(lengths[0])
    tokens(lengths[-1])
    assert tokens(lengths[0]) == expected[lengths[0]]
    assert bound == [*lengths]
    assert tokens(lengths[1]) == expected[lengths[1]]  # the least recently used one
    assert bound == [*lengths, lengths[1]]


def test_the_number_of_slots_follows_the_budget(random_bundle):
    slot_bytes = make_runner(random_bundle).slot_bytes
    L, D, S, C = 2, 32, 48, 48
    assert slot_bytes == 4 * 2 * L * D * (C + S)  # keys and values of cache and memory
    for size, num_slots in ((slot_bytes, 1), (4 * slot_bytes - 1, 3), (4 * slot_bytes, 4), (1 << 30, 7)):
        runner = make_runner(random_bundle, 7, max_slots_size_bytes=size)
        assert runner.num_slots == num_slots
        allocated = sum(group._host.nbytes for group in runner._groups_of_buffers)
        assert allocated == num_slots * slot_bytes <= size
    message = f"a slot takes {slot_bytes} bytes, and all slots may take {slot_bytes - 1}"
    with pytest.raises(ValueError, match=message):
        make_runner(random_bundle, max_slots_size_bytes=slot_bytes - 1)


def test_lower_limits_are_honoured_and_change_no_answer(trained_run, trained_bundle):
    sources = [source for source in numbers(trained_run.trained, seed=7) if len(source) <= 12]
    assert len(sources) > 10
    answers = []
    for options in ({}, {"max_source_length": 12, "max_target_length": 9}):
        runner = make_runner(trained_bundle, 3, **options)
        driver = Driver(runner)
        requests = [make_request(source, max_new_tokens=9) for source in sources]
        driver.submit(*requests)
        driver.finish()
        answers.append([driver.results[request].best.token_ids for request in requests])
    assert answers[0] == answers[1]
    assert (runner.max_source_length, runner.max_target_length) == (12, 9)
    assert runner.slot_bytes == 4 * 2 * 64 * (12 + 9)


@pytest.mark.parametrize("name", ["max_source_length", "max_target_length"])
def test_a_limit_above_the_models_is_refused(name, random_bundle):
    with pytest.raises(ValueError, match=f"{name} is 49, and the model's limit is 48"):
        make_runner(random_bundle, **{name: 49})


def test_a_cache_without_room_for_the_first_token_is_refused(random_bundle):
    template = dataclasses.replace(random_bundle.manifest.template, start=(1, 7, 8), forced=(9,))
    manifest = dataclasses.replace(random_bundle.manifest, template=template)
    bundle = dataclasses.replace(random_bundle, manifest=manifest)
    message = "max_target_length is 3, and must be at least 4: the model begins every target with 4 tokens"
    with pytest.raises(ValueError, match=message):
        make_runner(bundle, max_target_length=3)
    assert make_runner(bundle, max_target_length=4).max_target_length == 4


@given(st.integers(1, 5000), st.data())
def test_every_number_of_rows_has_a_bucket_that_is_not_much_larger(num_slots, data):
    num_rows = data.draw(st.integers(1, num_slots))
    bucket = min(bucket for bucket in buckets_up_to(num_slots) if bucket >= num_rows)
    assert bucket <= num_slots
    assert bucket < (2 if num_rows < 16 else 1.5) * num_rows or bucket == num_rows
