import math

import numpy as np
import pytest

from seq2seq_serve.client import Client, ClientError, GenerateOptions, LongSource
from tests.server.service.harness import EchoRunner, serving_on_a_thread


@pytest.fixture(scope="module")
def server():
    with serving_on_a_thread(names=("echo", "other")) as served:
        yield served


def test_options_are_a_message_or_values_by_name(client):
    assert client.translate("abc", options={"max_new_tokens": 2}) == "ab"
    assert client.translate("a\n\nb", options={"long_source": "split"}) == "a\n\nb"
    assert [each.text for each in client.translate_many(["abc"], options={"max_new_tokens": 1})] == ["a"]
    with pytest.raises(ValueError, match="long_source is 'cut', and must be"):
        client.translate("a", options={"long_source": "cut"})
    with pytest.raises(TypeError, match="there is no option beams"):
        next(client.translate_many(["a"], options={"beams": 2}))
    message = GenerateOptions(long_source=LongSource.LONG_SOURCE_SPLIT)
    assert client.translate("a\n\nb", options=message) == "a\n\nb"


@pytest.mark.parametrize("options", [{"temperature": 0.5, "seed": 1}, {"terms": {"ab": "ab"}}])
def test_a_sampled_target_or_one_with_terms_does_not_begin_with_a_space(client, options):
    """Its first token may be one with a space before it."""
    assert client.translate(" ab", options=options) == "ab"
    *pieces, _ = client.stream(" ab", options=options)
    assert "".join(event.piece.text for event in pieces) == "ab"
    assert client.translate(" ab") == " ab"
    assert client.translate("ab", options=options | {"target_prefix": " "}).startswith(" ")


def test_translate_has_the_timeout_and_the_id_of_every_call(client, server):
    server.runner.gate.clear()  # nothing is decoded before the call ends
    with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
        client.translate("abc", timeout_seconds=0.05)
    server.runner.gate.set()
    assert client.translate("abc", request_id="r7", timeout_seconds=20) == "abc"


def test_a_refusal_says_which_field(client):
    with pytest.raises(ClientError, match=r"max_new_tokens is 0, .* 64$") as caught:
        client.generate("abc", options=GenerateOptions(max_new_tokens=0))
    error = caught.value
    assert error.code == "INVALID_ARGUMENT"
    assert [violation.field for violation in error.field_violations] == ["options.max_new_tokens"]
    assert error.retry_after_seconds is None
    assert error.request_id
    assert error.reason == "INVALID_REQUEST"


@pytest.mark.parametrize("text", ["", "\u200b"])
def test_a_blank_text_has_a_reason_of_its_own(client, text):
    with pytest.raises(ClientError, match="INVALID_ARGUMENT") as caught:
        client.generate(text)
    assert caught.value.is_blank_source


def test_deadline_and_cancel_free_the_slot():
    runner = EchoRunner()
    runner.gate.clear()
    with serving_on_a_thread(runner) as served, Client(served.address, timeout_seconds=0.3) as client:
        with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
            client.generate("abc")
        pending = client.submit("abc", timeout_seconds=50)
        pending.cancel()
        with pytest.raises(ClientError, match="CANCELLED"):
            pending.result()
        runner.gate.set()
        for _ in client.stream("abc", timeout_seconds=50):
            break  # the harness checks that this request's slot comes back too


def test_an_infinite_timeout_means_no_timeout():
    """It passed before the call was sent."""
    with serving_on_a_thread() as served, Client(served.address) as client:
        assert client.generate("abc", timeout_seconds=math.inf).hypotheses[0].text == "abc"
        with pytest.raises(ValueError, match="the timeout is not a number"):
            client.generate("abc", timeout_seconds=math.nan)


@pytest.mark.parametrize("given", [None, 5, ["a"], [1.5], np.int64(5), np.ones(2), object()])
def test_a_value_that_cannot_be_sent_is_a_type_error(given):
    with Client("127.0.0.1:1") as client:
        expected = "must be a text, a list of token ids, the bytes of a file, or an array, and this is "
        with pytest.raises(TypeError, match=f"a source {expected}"):
            client.generate(given)
        with pytest.raises(TypeError, match=f"the source story {expected}"):
            client.generate({"question": "a", "story": given})
        with pytest.raises(TypeError, match="a target must be a text"):
            client.score("abc", given)
