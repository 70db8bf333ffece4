import json

import pytest

from seq2seq_serve.client import ClientError, FieldViolation
from seq2seq_serve.client.output import attention_dict, error_dict, one_line, to_json
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.dicts import message_dict


def test_a_message_keeps_its_field_names_its_zeros_and_its_numbers():
    message = pb.GenerateResponse(
        request_id="r1",
        hypotheses=[pb.Hypothesis(text="", token_ids=[2**40, 1], finish_reason=pb.FINISH_REASON_EOS)],
        usage=pb.Usage(source_tokens=3),
    )
    assert message_dict(message) == {
        "request_id": "r1",
        "model": "",
        "hypotheses": [
            {
                "text": "",
                "token_ids": [2**40, 1],
                "finish_reason": "FINISH_REASON_EOS",
                "log_probabilities": [],
                "alternatives": [],
                "segments": [],
            }
        ],
        "usage": {
            "source_tokens": 3,
            "target_tokens": 0,
            "truncated_source_tokens": 0,
            "source_seconds": 0.0,
        },
        "sentences": [],
        "detected_language": "",
        "unknown_words": [],
    }


def test_a_map_becomes_an_object():
    assert message_dict(pb.Model(name="m", provenance={"b": "2"}))["provenance"] == {"b": "2"}


def test_an_event_of_a_stream_shows_only_what_it_is():
    event = pb.GenerateStreamResponse(piece=pb.Piece(text="가", token_ids=[5]))
    assert message_dict(event) == {"piece": {"text": "가", "token_ids": [5], "hypothesis": 0}}


def test_json_is_one_line_that_people_can_read():
    line = to_json({"text": "가\n나"})
    assert line == '{"text": "가\\n나"}'
    assert json.loads(line) == {"text": "가\n나"}


def test_an_error_shows_what_is_known_of_it():
    assert error_dict(ClientError("UNAVAILABLE", "gone")) == {"code": "UNAVAILABLE", "message": "gone"}
    error = ClientError(
        "RESOURCE_EXHAUSTED",
        "full",
        field_violations=(FieldViolation("a", "b"),),
        retry_after_seconds=1.5,
        request_id="r1",
    )
    assert error_dict(error) == {
        "code": "RESOURCE_EXHAUSTED",
        "message": "full",
        "field_violations": [{"field": "a", "description": "b"}],
        "retry_after_seconds": 1.5,
        "request_id": "r1",
    }


def test_attention_has_a_row_for_each_target_token():
    attention = pb.Attention(
        source_tokens=["a", "b", "c"], target_tokens=["x", "y"], weights=[0.5, 0.25, 0.25, 0, 0, 1]
    )
    assert attention_dict(attention)["weights"] == [[0.5, 0.25, 0.25], [0, 0, 1]]


@pytest.mark.parametrize(
    ("text", "line"), [("a", "a"), ("a\nb", "a b"), ("a\r\n", "a  "), ("\u2028", " "), ("", "")]
)
def test_a_text_takes_one_line(text, line):
    assert one_line(text) == line
