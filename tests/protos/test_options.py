import json
import math

import pytest

from seq2seq_serve.protos.options import OPTIONS, options_of
from seq2seq_serve.protos.seq2seq_v1_pb2 import LONG_SOURCE_SPLIT_ALWAYS, GenerateOptions, Target

AB = {"source": "a", "target": "b c"}
CASED = AB | {"case_sensitive": True}


def test_every_field_is_described_once():
    assert sorted(OPTIONS) == sorted(field.name for field in GenerateOptions.DESCRIPTOR.fields)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("beam_size", "4", {"beam_size": 4}),
        ("temperature", ".5", {"temperature": 0.5}),
        ("early_stopping", "false", {"early_stopping": False}),
        ("source_language", "pt-BR", {"source_language": "pt-BR"}),
        ("suppressed_token_ids", "5,17", {"suppressed_token_ids": [5, 17]}),
        ("suppressed_token_ids", "[5, 17]", {"suppressed_token_ids": [5, 17]}),
        ("logit_bias", "5=-1.5,17=2", {"logit_bias": {5: -1.5, 17: 2.0}}),
        ("logit_bias", '{"5": -1.5, "17": 2}', {"logit_bias": {5: -1.5, 17: 2.0}}),
        ("stop_sequences", "a, b\nc", {"stop_sequences": ["a, b", "c"]}),
        ("stop_sequences", '["a", "b"]', {"stop_sequences": ["a", "b"]}),
        ("terms", "a = b c\nd=e=f", {"terms": [AB, {"source": "d", "target": "e=f"}]}),
        ("terms", "\na=b c \n \n", {"terms": [AB]}),
        ("terms", '{"a": "b c"}', {"terms": [AB]}),
        ("terms", '[{"source": "a", "target": "b c", "case_sensitive": true}]', {"terms": [CASED]}),
        ("target_prefix", "a b", {"target_prefix": Target(text="a b")}),
        ("long_source", "split_always", {"long_source": LONG_SOURCE_SPLIT_ALWAYS}),
    ],
)
def test_a_text_gives_the_option(name, text, expected):
    assert OPTIONS[name].read(text, is_text=True) == GenerateOptions(**expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_size", 2**63),
        ("beam_size", 2.5),
        ("beam_size", "4"),
        ("beam_size", True),
        ("beam_size", math.inf),
        ("seed", -1),
        ("temperature", "1"),
        ("early_stopping", 1),
        ("source_language", 5),
        ("suppressed_token_ids", 5),
        ("suppressed_token_ids", "5;17"),
        ("suppressed_token_ids", ""),
        ("suppressed_token_ids", '{"5": 1}'),
        ("terms", "a"),
        ("terms", "a\nb=c"),
        ("terms", "\n"),
        ("terms", '{"a": 1}'),
        ("terms", '[{"a": "b"}]'),
        ("terms", '["a"]'),
        ("terms", "[1"),
        ("suppressed_token_ids", "[" * 60_000),
        ("logit_bias", "5"),
        ("logit_bias", json.dumps({"a": 1})),
        ("stop_sequences", "[1"),
        ("stop_sequences", "[1]"),
        ("target_prefix", "\udcff"),
        ("long_source", "unspecified"),
        ("long_source", 2),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_it_must_be(name, value):
    with pytest.raises(ValueError, match=r"^must be (an? |true|refuse, truncate, .* or sequential$)"):
        OPTIONS[name].read(value)


@pytest.mark.parametrize("name", ["beam_size", "num_hypotheses"])
def test_a_zero_that_would_read_as_unset_is_refused(name):
    with pytest.raises(ValueError, match=r"^must be from 1 to 16$"):
        OPTIONS[name].read(0)


def test_a_whole_number_may_come_as_a_float():
    assert OPTIONS["beam_size"].read(4.0) == GenerateOptions(beam_size=4)


def test_options_by_name_are_the_message_and_texts_are_read_as_flags_are():
    """`long_source="split"` was refused, where the command and HTTP took it."""
    given = {"beam_size": 4, "long_source": "split_always", "target_prefix": "a b", "stop_sequences": ["x"]}
    expected = GenerateOptions(beam_size=4, long_source=LONG_SOURCE_SPLIT_ALWAYS, stop_sequences=["x"])
    expected.target_prefix.text = "a b"
    assert options_of(given) == expected
    assert options_of(expected) is expected
    assert options_of(None) == GenerateOptions()


@pytest.mark.parametrize("terms", [{"a": "b c"}, [("a", "b c")], [{"source": "a", "target": "b c"}], "a=b c"])
def test_terms_by_name_are_pairs_also_as_those_of_a_glossary(terms):
    """A list of pairs, which `read_glossary` returns, was refused."""
    assert options_of({"terms": terms}) == GenerateOptions(terms=[AB])
    with pytest.raises(TypeError, match=r"^terms is"):
        options_of({"terms": [("a", "b", "c")]})


def test_an_option_by_name_that_does_not_fit_says_what_it_must_be():
    with pytest.raises(TypeError, match="there is no option beams"):
        options_of({"beams": 4})
    with pytest.raises(TypeError, match=r"^terms is \['x'\], and must be a term such as machine=Maschine"):
        options_of({"beam_size": 2, "terms": ["x"]})
    words = "split, split_always|truncate"
    with pytest.raises(ValueError, match=rf"long_source is 'cut', and must be .*({words})"):
        options_of({"long_source": "cut"})
