import pytest

from seq2seq_serve.client import ClientError, FieldViolation
from seq2seq_serve.client.output import error_dict, one_line
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


@pytest.mark.parametrize(
    ("text", "line"), [("a", "a"), ("a\nb", "a b"), ("a\r\n", "a  "), ("\u2028", " "), ("", "")]
)
def test_a_text_takes_one_line(text, line):
    assert one_line(text) == line
