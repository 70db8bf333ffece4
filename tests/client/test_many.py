"""The dispatcher with a server that is a function and a clock that is a number."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from seq2seq_serve.client import ClientError, FieldViolation, Translated
from seq2seq_serve.client.many import MOST_TOGETHER, Dispatcher, answers
from seq2seq_serve.client.wire import generate_request
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis

CALL_SECONDS = 0.1
DOWN = ClientError("UNAVAILABLE", "no server answers")
TOO_LONG = ClientError("INVALID_ARGUMENT", "long", field_violations=(FieldViolation("sources[0].text", ""),))
BAD_OPTION = ClientError("INVALID_ARGUMENT", "bad", field_violations=(FieldViolation("options.top_k", ""),))
BLANK = ClientError("INVALID_ARGUMENT", "only white space", reason="BLANK_SOURCE")
BUG = ClientError("INTERNAL", "a bug")


@dataclass
class Simulation:
    """Runs a dispatcher against `serve(text, now)`; every call takes `CALL_SECONDS`.

    Attributes:
        sent: When each call was sent, its text, and how many were in flight with it.
        num_read: Texts that were read.
    """

    serve: Callable[[str, float], GenerateResponse | Exception]
    now: float = 1000.0
    sent: list[tuple[float, str, int]] = field(default_factory=list)
    num_read: int = 0
    error: Exception | None = None

    def run(
        self, texts: Iterable[str], in_flight: int = 8, give_up_seconds: float = 300.0
    ) -> list[Translated]:
        dispatcher = Dispatcher(
            lambda text: generate_request(text, "", None),
            in_flight,
            give_up_seconds,
            clock=lambda: self.now,
            chance=lambda: 0.0,
        )
        source, results, calls = iter(texts), [], deque()
        is_read = False
        while not dispatcher.is_over:
            while not is_read and self.num_read - len(results) < dispatcher.max_held:
                try:
                    dispatcher.add(next(source))
                    self.num_read += 1
                except StopIteration:
                    is_read = True
                    dispatcher.finish()
                except OSError as error:
                    is_read = True
                    dispatcher.finish(error)
            for (call,) in dispatcher.next_calls():
                calls.append((self.now + CALL_SECONDS, call))
                self.sent.append((self.now, call.source, len(calls)))
            wait = dispatcher.seconds_to_wait()
            if calls and (wait is None or calls[0][0] <= self.now + wait):
                ends, call = calls.popleft()
                self.now = max(self.now, ends)
                dispatcher.end(call, self.serve(call.source, self.now))
            elif wait is not None:
                self.now += wait
            results += dispatcher.results()
        self.error = dispatcher.error
        return results


def answer(text: str) -> GenerateResponse:
    return GenerateResponse(hypotheses=[Hypothesis(text=text.upper())])


def numbered(count: int) -> list[str]:
    return [f"text {number}" for number in range(count)]


def outcomes(results: list[Translated]) -> list[str]:
    return [result.error.code if result.error else result.text for result in results]


def test_five_thousand_texts_are_all_answered_in_order_by_a_server_with_little_room():
    """5,000 × `submit` failed 1,628 times."""
    room, refused, taken = 20, [], deque()

    def serve(text: str, now: float) -> GenerateResponse | Exception:
        while taken and taken[0] <= now - CALL_SECONDS:
            taken.popleft()
        if len(taken) >= room:
            refused.append(now)
            return ClientError("RESOURCE_EXHAUSTED", "full", retry_after_seconds=0.5)
        taken.append(now)
        return answer(text)

    simulation = Simulation(serve)
    results = simulation.run(numbered(5000), in_flight=64)
    assert outcomes(results) == [text.upper() for text in numbered(5000)]
    assert simulation.error is None
    assert len(refused) < 150  # the first 44, and few whenever it tries how much there is room for
    last_sent = {now for now, _, _ in simulation.sent}
    for now in refused:
        assert not any(now < sent < now + 0.5 for sent in last_sent)
    assert simulation.now < 1000 + 2 * 5000 / room * CALL_SECONDS


def test_a_server_that_restarts_is_waited_for_one_call_at_a_time(caplog):
    caplog.set_level(logging.INFO)
    simulation = Simulation(lambda text, now: DOWN if 1002 < now < 1062 else answer(text))
    results = simulation.run(numbered(1000))
    assert outcomes(results) == [text.upper() for text in numbered(1000)]
    assert [record.getMessage() for record in caplog.records] == [
        "UNAVAILABLE: no server answers; trying again for up to 300 seconds",
        "the server answers again",
    ]
    probes = [(now, num_in_flight) for now, _, num_in_flight in simulation.sent if 1002.2 < now < 1062]
    assert {num_in_flight for _, num_in_flight in probes} == {1}
    waits = [later - now for (now, _), (later, _) in pairwise(probes)]
    assert waits[:4] == pytest.approx([0.5, 0.9, 1.7, 3.3])  # a call, and a pause that doubles
    assert waits[4:] == pytest.approx([5.1] * len(waits[4:]))
    assert len(simulation.sent) < 1000 + 30


def test_an_answer_that_was_on_its_way_does_not_end_the_pause():
    """A server that drains refuses newcomers and still answers whoever it accepted."""
    dispatcher = Dispatcher(
        lambda text: generate_request(text, "", None), 4, 300.0, clock=lambda: 0.0, chance=lambda: 0.0
    )
    for text in numbered(6):
        dispatcher.add(text)
    (first,), (second,), *_ = dispatcher.next_calls()
    dispatcher.end(first, DOWN)
    dispatcher.end(second, answer("x"))
    assert dispatcher.next_calls() == []
    assert dispatcher.seconds_to_wait() is None  # for the two that are in flight


def test_endless_push_back_is_given_up_too_and_waited_for_as_told():
    simulation = Simulation(
        lambda text, now: ClientError("RESOURCE_EXHAUSTED", "full", retry_after_seconds=10.0)
    )
    assert simulation.run(numbered(100), give_up_seconds=60.0) == []
    assert "gave up after 60 seconds" in str(simulation.error)
    assert len(simulation.sent) < 8 + 4 + 2 + 5


def test_a_text_that_fails_by_itself_is_sent_once_and_stops_nothing():
    def serve(text: str, now: float) -> GenerateResponse | Exception:
        return TOO_LONG if 10 <= int(text.split()[1]) < 500 else answer(text)

    simulation = Simulation(serve)
    results = outcomes(simulation.run(numbered(600)))
    assert results[10:500] == ["INVALID_ARGUMENT"] * 490
    assert results[500:] == [text.upper() for text in numbered(600)[500:]]
    assert len(simulation.sent) == 600


def test_a_wrong_option_stops_translate_many_with_one_error():
    simulation = Simulation(lambda text, now: BAD_OPTION)
    assert simulation.run(numbered(100_000)) == []
    assert simulation.error is BAD_OPTION
    assert len(simulation.sent) == 8


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"])
def test_a_text_that_keeps_failing_is_tried_three_times_and_the_others_go_on(code):
    simulation = Simulation(lambda text, now: ClientError(code, "") if text == "text 30" else answer(text))
    results = outcomes(simulation.run(numbered(100)))
    assert results.pop(30) == code
    assert results == [text.upper() for text in numbered(100) if text != "text 30"]
    assert [text for _, text, _ in simulation.sent].count("text 30") == 3


def test_texts_that_failed_in_one_step_are_resent_one_by_one():
    """Neighbours of a text that breaks its steps failed with it three times, and were lost."""

    def serve(text: str, now: float) -> GenerateResponse | Exception:
        step = [each for start, each, _ in simulation.sent if start <= now < start + 2 * CALL_SECONDS]
        return BUG if "text 5" in step else answer(text)

    simulation = Simulation(serve)
    results = outcomes(simulation.run(numbered(40)))
    assert results.pop(5) == "INTERNAL"
    assert results == [text.upper() for text in numbered(40) if text != "text 5"]


def test_a_failed_last_text_is_returned_as_a_result():
    assert outcomes(Simulation(lambda text, now: BUG).run(["a"])) == ["INTERNAL"]
    simulation = Simulation(lambda text, now: BUG if text in "bd" else answer(text))
    assert outcomes(simulation.run("abcd")) == ["A", "INTERNAL", "C", "INTERNAL"]


@pytest.mark.parametrize(
    "code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"]
)
def test_permanent_errors_stop_translate_many_at_once(code):
    error = ClientError(code, "no")
    simulation = Simulation(lambda text, now: error if now > 1002 else answer(text))
    assert len(simulation.run(numbered(1000))) >= 144
    assert simulation.error is error
    assert simulation.now < 1003


def test_a_blank_text_among_several_sources_is_an_error():
    """It was an empty answer."""
    blank = {"story": "", "question": "Where?"}
    results = Simulation(lambda source, now: BLANK if source == blank else answer("x")).run(["a", blank, "b"])
    assert outcomes(results) == ["X", "INVALID_ARGUMENT", "X"]


def test_texts_are_read_a_bounded_number_ahead():
    reading = Simulation(lambda text, now: answer(text))
    ahead = []

    def texts():
        for number in range(1000):
            ahead.append(number - sum(1 for now, _, _ in reading.sent if now < reading.now))
            yield f"text {number}"

    assert len(reading.run(texts(), in_flight=4)) == 1000
    assert max(ahead) <= 4 * 4 + 16


def test_in_flight_is_at_least_one():
    with pytest.raises(ValueError, match="in_flight is 0, and must be at least 1"):
        Simulation(lambda text, now: answer(text)).run([], in_flight=0)


def test_a_failed_text_raises_where_its_target_is_asked_for():
    [result] = Simulation(lambda text, now: TOO_LONG).run(["a"])
    with pytest.raises(ClientError, match="INVALID_ARGUMENT: long"):
        _ = result.text


def sharing(texts: Iterable[str], in_flight: int = 64) -> Dispatcher[str]:
    """A dispatcher with texts whose kind is their first word; those that begin with "alone" do not share."""
    dispatcher = Dispatcher(
        str,
        in_flight,
        300.0,
        kind_of=lambda text: None if text.startswith("alone") else text.split()[0],
        clock=lambda: 0.0,
        chance=lambda: 0.0,
    )
    for text in texts:
        dispatcher.add(text)
    return dispatcher


def sent(dispatcher: Dispatcher[str]) -> list[list[str]]:
    return [[text.source for text in call] for call in dispatcher.next_calls()]


def test_texts_of_one_kind_share_calls():
    calls = sent(sharing(numbered(40)))
    assert list(map(len, calls)) == [MOST_TOGETHER, 40 - MOST_TOGETHER]
    assert [text for call in calls for text in call] == numbered(40)
    calls = sent(sharing(numbered(99), in_flight=2 * MOST_TOGETHER + 1))
    assert list(map(len, calls)) == [MOST_TOGETHER, MOST_TOGETHER]  # none alone, as others come
    mixed = ["a 1", "b 1", "alone 1", "a 2", "alone 2", "b 2"]
    assert sent(sharing(mixed)) == [["a 1", "a 2"], ["b 1", "b 2"], ["alone 1"], ["alone 2"]]


def test_texts_wait_for_room_for_several_and_no_text_waits_for_others_to_come():
    dispatcher = sharing(numbered(80))
    first, *others = dispatcher.next_calls()
    assert len(first) + sum(map(len, others)) == 64
    for text in first[:7]:
        dispatcher.end(text, answer(text.source))
    assert dispatcher.next_calls() == []
    assert dispatcher.seconds_to_wait() is None
    dispatcher.end(first[7], answer("x"))  # the call still has other texts, which do not hold up new ones
    assert list(map(len, dispatcher.next_calls())) == [8]
    for text in others[0][:8]:
        dispatcher.end(text, answer("x"))
    assert list(map(len, dispatcher.next_calls())) == [8]
    dispatcher.end(others[0][8], answer("x"))
    dispatcher.add("late")
    assert sent(dispatcher) == [["late"]]
    dispatcher.end(others[0][9], answer("x"))
    for text in ["alone 1", *numbered(20)]:
        dispatcher.add(text)
    assert sent(dispatcher) == [["alone 1"]]


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_an_error_of_a_whole_call_counts_for_each_text_which_is_then_sent_alone(code):
    dispatcher = sharing(numbered(8))
    dispatcher.clock = iter(range(0, 10_000, 10)).__next__
    [texts] = dispatcher.next_calls()
    dispatcher.end(texts[0], answer("x"))
    for text in texts[1:]:
        dispatcher.end(text, ClientError(code, ""), is_shared=True)
    again = []
    while calls := dispatcher.next_calls():
        for [text] in calls:
            again.append(text.source)
            assert text.num_failures == 1
            dispatcher.end(text, answer("x"))
    assert again == numbered(8)[1:]
    assert len(list(dispatcher.results())) == 8


def test_texts_whose_server_ends_are_sent_once_more_at_once(caplog):
    """Only unary calls are sent to another server by gRPC itself."""
    dispatcher = sharing(numbered(8))
    [texts] = dispatcher.next_calls()
    for text in texts:
        dispatcher.end(text, DOWN, is_shared=True)
    assert not caplog.messages
    [again] = dispatcher.next_calls()
    assert [text.source for text in again] == numbered(8)
    for text in again:
        dispatcher.end(text, DOWN, is_shared=True)
    assert dispatcher.next_calls() == []
    assert len(caplog.messages) == 1


def test_a_push_back_of_a_whole_call_halves_the_limit_once():
    dispatcher = sharing(numbered(64))
    full = ClientError("RESOURCE_EXHAUSTED", "full", retry_after_seconds=0.5)
    for call in dispatcher.next_calls():
        for text in call:
            dispatcher.end(text, full, is_shared=True)
    assert dispatcher.next_calls() == []
    assert dispatcher.seconds_to_wait() == 0.5
    dispatcher.clock = lambda: 0.5
    assert list(map(len, dispatcher.next_calls())) == [32]


def test_a_request_that_is_refused_as_a_whole_is_sent_again_text_by_text():
    """Together with large options, texts may be too many for a message that takes each of them."""
    dispatcher = sharing(numbered(8))
    [texts] = dispatcher.next_calls()
    for text in texts:
        dispatcher.end(text, TOO_LONG, is_shared=True)
    calls = dispatcher.next_calls()
    assert list(map(len, calls)) == [1] * 8
    for [text] in calls:
        dispatcher.end(text, TOO_LONG)
    assert outcomes(list(dispatcher.results())) == ["INVALID_ARGUMENT"] * 8
    assert dispatcher.error is None


def test_texts_that_fail_in_a_row_stop_the_work():
    simulation = Simulation(lambda text, now: BUG)
    assert simulation.run(numbered(100)) == []
    assert str(simulation.error) == "INTERNAL: a bug; stopped after 5 texts in a row that failed"


def test_an_error_that_may_pass_is_logged_once(caplog):
    """Each time had a message, with a time for which nothing was tried again."""
    caplog.set_level(logging.INFO)
    late = ClientError("DEADLINE_EXCEEDED", "late")
    simulation = Simulation(lambda text, now: late if text.endswith("0") else answer(text))
    assert outcomes(simulation.run(numbered(40))).count("DEADLINE_EXCEEDED") == 4
    assert caplog.messages == ["DEADLINE_EXCEEDED: late; a text is tried up to 3 times"]


async def test_texts_that_a_call_leaves_out_are_sent_again():
    calls = []

    async def send(texts):
        calls.append(list(texts))
        for place in range(len(texts) - 1, 0, -1):
            yield place, answer(texts[place])
        if len(texts) == 1:
            yield 0, answer(texts[0])

    dispatcher = sharing([])
    dispatcher.clock = iter(range(0, 10_000, 10)).__next__
    found = [result.text async for result in answers(["text 0", "text 1", "text 2"], dispatcher, send)]
    assert found == ["TEXT 0", "TEXT 1", "TEXT 2"]
    assert calls == [["text 0", "text 1", "text 2"], ["text 0"]]
