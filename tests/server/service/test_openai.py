"""OpenAI's own client, unmodified, against this server."""

import io
import json
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import openai
import pytest
import soundfile

from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.client import Client
from seq2seq_serve.protos.subtitles import subtitles
from tests.bundle.test_audio import encoded
from tests.server.runner.test_voice_activity import needs_model, quiet, vowels
from tests.server.service.harness import access_file, on_a_thread, serving, serving_bundles
from tests.server.service.seq2seq.test_windows import noise

NAMES = ("german", "english", "korean")
SOUND = encoded(noise(1.25))  # the model takes 0.64 seconds


@pytest.fixture(scope="module")
def served(whisper_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    url = f"http://127.0.0.1:{served.app.http.port}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(served):
    """The answer over gRPC."""
    with Client(served.address) as client:
        options = {"long_source": "sequential", "source_language": "ko", "task": "transcribe"}
        return client.generate(SOUND, options=options)


def ask(client, **options):
    given = {"model": "bundle", "file": ("speech.wav", SOUND), "language": "ko"} | options
    return client.audio.transcriptions.create(**given)


def test_it_lists_the_models(client):
    assert [model.id for model in client.models.list()] == ["bundle"]
    assert client.models.retrieve("bundle").owned_by == "seq2seq-serve"
    with pytest.raises(openai.NotFoundError, match="no model is named 'other'"):
        client.models.retrieve("other")


def test_it_transcribes_a_file(client, expected, tmp_path):
    (tmp_path / "speech.wav").write_bytes(SOUND)
    with (tmp_path / "speech.wav").open("rb") as file:
        answer = ask(client, file=file)
    assert answer.text == expected.hypotheses[0].text.strip() != ""
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 1.25)
    assert ask(client, file=io.BytesIO(SOUND)).text == answer.text
    assert ask(client, model="whisper-1").text == answer.text


def test_samples_without_a_header_are_read_by_the_type_of_their_part(client, expected):
    samples, _ = soundfile.read(io.BytesIO(SOUND), dtype="int16")
    text = expected.hypotheses[0].text.strip()
    assert ask(client, file=("a.raw", samples.tobytes(), "audio/pcm; rate=16000")).text == text
    assert ask(client, file=("a.raw", samples.astype(">i2").tobytes(), "audio/L16;rate=16000")).text == text
    given = {"file": ("a.raw", samples.tobytes()), "extra_body": {"file_type": "audio/pcm; rate=16000"}}
    assert ask(client, **given).text == text
    with pytest.raises(openai.BadRequestError, match="must be audio/pcm with rate=NUMBER"):
        ask(client, file=("a.raw", samples.tobytes(), "audio/pcm"))


def test_texts_and_subtitles_are_plain(client, expected):
    [hypothesis] = expected.hypotheses
    assert ask(client, response_format="text") == hypothesis.text.strip() + "\n"
    for form in ("srt", "vtt"):
        assert ask(client, response_format=form) == subtitles(hypothesis.segments, form)


def test_verbose_json_has_the_segments(client, expected):
    answer = ask(client, response_format="verbose_json", timestamp_granularities=["segment"])
    segments = expected.hypotheses[0].segments
    assert (answer.language, answer.duration) == ("korean", 1.25)
    assert [one.id for one in answer.segments] == list(range(len(segments)))
    for one, other in zip(answer.segments, segments, strict=True):
        assert (one.text, one.start, one.end) == (other.text, other.begin_seconds, other.end_seconds)
        assert one.tokens == list(other.token_ids)
        assert one.avg_logprob == pytest.approx(other.window.mean_log_probability)
        assert one.compression_ratio == other.window.compression_ratio
        assert one.seek == pytest.approx(100 * other.window.begin_seconds)
        assert one.temperature == pytest.approx(other.window.temperature)
        assert 0 < one.no_speech_prob < 1  # of every window, not only of those that need it


def test_times_of_words_are_those_of_grpc(client, served):
    options = {"long_source": "sequential", "source_language": "ko", "word_timestamps": True}
    with Client(served.address) as own:
        segments = own.generate(SOUND, options=options).hypotheses[0].segments
    given = {"timestamp_granularities": ["word", "segment"]}
    answer = ask(client, response_format="verbose_json", **given)
    words = [
        (one.text.strip(), one.begin_seconds, one.end_seconds) for each in segments for one in each.words
    ]
    assert [(one.word, one.start, one.end) for one in answer.words] == words != []
    assert len(answer.segments) == len(segments)
    assert ask(client, response_format="vtt", **given) == subtitles(segments, "vtt")


@needs_model
def test_a_strategy_of_chunks_splits_the_sound_where_nobody_speaks(client, served):
    speech = vowels(0)[:SAMPLE_RATE]
    sound = encoded(np.concatenate([quiet(0.5), speech, quiet(1), speech]))
    given = {"long_source": "split", "voice_activity": True, "timestamps": True, "source_language": "ko"}
    with Client(served.address) as own:
        [hypothesis] = own.generate(sound, options=given).hypotheses
    chunks = {"file": ("speech.wav", sound), "chunking_strategy": "auto"}
    assert ask(client, **chunks).text == hypothesis.text.strip() != ""
    assert ask(client, response_format="srt", **chunks) == subtitles(hypothesis.segments, "srt")
    segments = ask(client, response_format="verbose_json", **chunks).segments
    assert [one.text for one in segments] == [one.text for one in hypothesis.segments]
    assert all(0 < one.no_speech_prob < 1 for one in segments)
    *deltas, done = ask(client, stream=True, **chunks)
    assert "".join(event.delta for event in deltas).strip() == done.text == hypothesis.text.strip()
    windows = {"file": ("speech.wav", sound), "extra_body": {"voice_activity": "true"}}
    with Client(served.address) as own:
        given |= {"long_source": "sequential"}
        assert ask(client, **windows).text == own.generate(sound, options=given).hypotheses[0].text.strip()


def test_a_language_that_is_not_given_is_detected(client):
    assert ask(client, response_format="verbose_json", language=openai.omit).language in NAMES


def test_a_stream_has_the_windows_and_the_whole_text(client, expected):
    *deltas, done = ask(client, stream=True)
    assert len(deltas) > 2
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert "".join(event.delta for event in deltas).strip() == done.text
    assert (done.type, done.text) == ("transcript.text.done", expected.hypotheses[0].text.strip())


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # theirs, of all translations
def test_it_translates_with_the_task_and_the_options_of_a_request(client, served):
    options = {"long_source": "sequential", "source_language": "ko", "task": "translate", "prompt": "a b"}
    answer = client.audio.translations.create(
        model="bundle",
        file=SOUND,
        prompt="a b",
        response_format="verbose_json",
        extra_body={"language": "ko"},
    )
    assert answer.language == "korean"
    with Client(served.address) as own:
        assert answer.text == own.generate(SOUND, options=options).hypotheses[0].text.strip()
    sampled = client.audio.translations.create(
        model="bundle", file=SOUND, temperature=0.2, response_format="verbose_json"
    )
    assert {round(one.temperature, 3) for one in sampled.segments} == {0.2}


@pytest.mark.parametrize(
    ("options", "param", "match"),
    [
        ({"file": b""}, "file", "the file is missing or empty"),
        ({"file": b"not a sound"}, "sources[0].file", "the file is not a WAV, AIFF"),
        ({"language": "fr"}, "options.source_language", "source_language is 'fr', and bundle has de, en, ko"),
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text, verbose_json"),
        ({"temperature": 101}, "options.temperature", "must be from 0.01 to 100"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "must be a number"),
        ({"extra_body": {"stream": "True"}}, "stream", "stream is 'True', and must be false or true"),
        (
            {"timestamp_granularities": ["character"]},
            "timestamp_granularities[]",
            r"is 'character', and must be segment or word",
        ),
        (
            {"timestamp_granularities": ["word"]},
            "timestamp_granularities[]",
            "the times of words need the response_format verbose_json or srt or vtt",
        ),
        ({"prompt": "a" * 70_000}, "prompt", "prompt has 70000 bytes: send at most 65536"),
        ({"include": ["logprobs"]}, "include[]", r"there is no field 'include\[\]'"),
        ({"extra_body": {"chunking_strategy": "fixed"}}, "chunking_strategy", "'fixed', and must be auto"),
    ],
)
def test_a_wrong_request_is_its_error(client, options, param, match):
    with pytest.raises(openai.BadRequestError, match=match) as caught:
        ask(client, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.response.headers["x-request-id"]


def test_an_unknown_model_and_a_model_of_texts_are_refused(client):
    with pytest.raises(openai.NotFoundError, match="this server has bundle"):
        ask(client, model="other")
    with on_a_thread(serving()) as served:
        url = f"http://127.0.0.1:{served.app.http.port}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="is for sounds and a model that writes times"):
                ask(client, model="echo", language=openai.omit)
            with pytest.raises(openai.NotFoundError, match="no model here reads sounds"):
                ask(client, model="whisper-1")


def test_rights_are_checked_before_the_file_is_read(tmp_path):
    file = access_file(tmp_path, ("shop", "secret", "predict"))
    with (
        on_a_thread(serving(access_file=file)) as served,
        closing(HTTPConnection("127.0.0.1", served.app.http.port, timeout=20)) as connection,
    ):
        headers = {"Content-Length": "20000000", "Content-Type": "multipart/form-data; boundary=a"}
        connection.request("POST", "/v1/audio/transcriptions", headers=headers)  # no body follows
        answer = connection.getresponse()
        assert answer.status == 401
        assert json.loads(answer.read())["error"]["code"] == "UNAUTHENTICATED"
        url = f"http://127.0.0.1:{served.app.http.port}/v1"
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["echo"]
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_a_file_over_its_limit_is_refused_and_one_over_that_of_messages_is_read(client):
    sound = encoded(np.zeros(5 * 2**20 // 2), subtype="PCM_16")
    assert len(sound) > 5 * 2**20
    with pytest.raises(openai.BadRequestError, match=r"163\.84 seconds, and 32 is the limit"):
        ask(client, file=sound)
    with pytest.raises(openai.APIStatusError, match="more than 26214400 bytes") as caught:
        ask(client, file=bytes(26 * 2**20))
    assert caught.value.status_code == 413
