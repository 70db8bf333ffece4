"""OpenAI's own client, unmodified, against this server."""

import io
import json
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import soundfile

from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.client import Client
from seq2seq_serve.protos.languages import name_of
from seq2seq_serve.protos.subtitles import subtitles
from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.runner.voice_activity import SpeechRules
from seq2seq_serve.server.service.read import sources
from tests.bundle.test_audio import encoded
from tests.server.runner.test_voice_activity import needs_model, quiet, vowels
from tests.server.service.harness import (
    access_file,
    entry,
    on_a_thread,
    serving,
    serving_bundles,
    with_manifest,
)
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


def post(served, *fields, page="transcriptions", sound=SOUND):
    """The answer to a form with fields of these names and values, as no client of OpenAI's sends them."""
    with closing(HTTPConnection("127.0.0.1", served.app.http.port, timeout=60)) as connection:
        body = multipart(("file", sound), *fields)
        headers = {"Content-Type": "multipart/form-data; boundary=aXb"}
        connection.request("POST", f"/v1/audio/{page}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def multipart(*fields):
    parts = []
    for name, value in fields:
        file = '; filename="speech.wav"' if name == "file" else ""
        head = f'--aXb\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts.append(head.encode() + (value if isinstance(value, bytes) else value.encode()))
    return b"\r\n".join([*parts, b"--aXb--\r\n"])


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


def test_logprobs_are_those_of_the_tokens_of_the_text(client, served):
    with Client(served.address) as own:
        options = {"long_source": "sequential", "source_language": "ko", "log_probabilities": True}
        sentences = own.generate(SOUND, options=options).sentences
    first_id = served.model.manifest.timestamps.first_id
    expected = [
        one
        for sentence in sentences
        for token_id, one in zip(
            sentence.hypotheses[0].token_ids, sentence.hypotheses[0].log_probabilities, strict=False
        )
        if token_id < first_id
    ]
    answer = ask(client, include=["logprobs"])
    assert [one.logprob for one in answer.logprobs] == pytest.approx(expected) != []
    octets = bytes(int(octet) for one in answer.logprobs for octet in one.bytes)
    assert octets.decode(errors="replace").strip() == answer.text
    *_, done = ask(client, include=["logprobs"], stream=True)
    assert [one.logprob for one in done.logprobs] == pytest.approx(expected)
    assert ask(client).logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        [("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities[0]", "segment"), ("timestamp_granularities[1]", "word")],
        [("timestamp_granularities", "word")],
        [("timestamp_granularities", '["segment", "word"]')],
        [("timestamp_granularities[]", '["word"]')],
        [("word_timestamps", "True")],
    ],
)
def test_a_list_is_read_in_every_form_in_which_programs_send_it(served, client, fields):
    given = [("language", "ko"), ("response_format", "verbose_json"), *fields]
    status, _, answer = post(served, *given)
    expected = ask(client, response_format="verbose_json", timestamp_granularities=["word"])
    assert status == 200
    assert [one["start"] for one in json.loads(answer)["words"]] == [one.start for one in expected.words]


def test_fields_without_a_value_are_absent(served, client):
    empty = [(name, "") for name in ("prompt", "temperature", "response_format", "stream", "hotwords", "a")]
    null = [("chunking_strategy", "null"), ("include[]", "None"), ("word_timestamps", "undefined")]
    status, _, answer = post(served, ("model", ""), ("language", "ko"), *empty, *null)
    assert (status, json.loads(answer)["text"]) == (200, ask(client).text)
    detected = ask(client, language=openai.omit, response_format="verbose_json").language
    for language in ("", "auto", "null"):
        _, _, answer = post(served, ("language", language), ("response_format", "verbose_json"))
        assert json.loads(answer)["language"] == detected


def test_a_field_or_a_file_that_is_sent_twice_is_refused(served):
    for fields, param in (
        ([("language", "ko"), ("language", "de")], "language"),
        ([("file", SOUND)], "file"),
    ):
        status, _, answer = post(served, *fields)
        assert (status, json.loads(answer)["error"]["param"]) == (400, param)


def test_a_stream_is_asked_for_as_python_writes_it(served, client):
    status, headers, answer = post(served, ("language", "ko"), ("stream", "True"))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *_, done = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line]
    assert done["text"] == ask(client).text


@pytest.mark.parametrize("has_hotwords", [False, True])
def test_a_prompt_that_is_too_long_is_reported(client, served, has_hotwords):
    prompt = "a long prompt, of which the last tokens are read " * 4
    num_tokens = len(served.model.target_tokenizer.encode(f" {prompt.strip()}"))
    num_hot = len(served.model.target_tokenizer.encode(" b")) if has_hotwords else 0
    given = {"prompt": prompt, "extra_body": {"hotwords": "b"} if has_hotwords else {}}
    answer = client.audio.transcriptions.with_raw_response.create(
        model="bundle", file=SOUND, language="ko", **given
    )
    warning = f"the prompt has {num_tokens} tokens, of which the model reads the last {19 - num_hot}"
    assert answer.headers["warning"] == f'299 - "{warning}"'
    *_, done = ask(client, stream=True, **given)
    assert done.warning == warning
    short = client.audio.transcriptions.with_raw_response.create(model="bundle", file=SOUND, prompt="a b")
    assert "warning" not in short.headers


def test_hotwords_are_read_before_each_window(client):
    def deltas(**given):
        *events, _ = ask(client, stream=True, **given)
        return [event.delta for event in events]

    hot, prompted = deltas(extra_body={"hotwords": "a b"}), deltas(prompt="a b")
    assert hot[0] == prompted[0] != deltas()[0]
    assert hot[1:] != prompted[1:]  # the text before a window takes the place of a prompt only


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [
        ("auto", SpeechRules(0.16)),
        ({"type": "server_vad"}, SpeechRules(0.16)),
        (
            {"type": "server_vad", "threshold": 0.7, "prefix_padding_ms": 100, "silence_duration_ms": 300},
            SpeechRules(0.3, 0.7, 0.1),
        ),
        ('{"type": "server_vad", "silence_duration_ms": 200, "threshold": null}', SpeechRules(0.2)),
    ],
)
def test_speech_is_found_by_the_numbers_of_a_strategy_of_chunks(client, monkeypatch, strategy, rules):
    seen = []
    monkeypatch.setattr(
        sources, "speech", lambda samples, rules, _: seen.append(rules) or [(0, len(samples))]
    )
    assert ask(client, chunking_strategy=strategy).text
    assert ask(client, extra_body={"vad_filter": "true"}).text
    assert seen == [rules, SpeechRules(2.0)]


def test_errors_name_the_field_by_which_voice_activity_was_asked_for(client, monkeypatch):
    def missing(*_):
        raise sources.MissingVoiceActivityError

    monkeypatch.setattr(sources, "speech", missing)
    for name, value in (("chunking_strategy", "auto"), ("vad_filter", "1"), ("voice_activity", "true")):
        with pytest.raises(openai.BadRequestError, match=f"leave {name} out") as caught:
            ask(client, extra_body={name: value})
        assert caught.value.param == name


def test_silence_is_in_the_language_of_the_model(client, served):
    ids = served.model.manifest.choices["source_language"].ids
    answer = ask(client, file=encoded(np.zeros(20_000)), language=openai.omit, response_format="verbose_json")
    assert (answer.text, answer.language) == ("", name_of(min(ids, key=ids.get)).lower())


def test_a_model_of_one_language_names_it_and_refuses_others(whisper_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        template = served.model.manifest.template
        start = tuple(place for place in template.start if isinstance(place, int))
        served.app.models.put(
            with_manifest(served.model, choices={}, template=replace(template, start=start))
        )
        url = f"http://127.0.0.1:{served.app.http.port}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            for language in (openai.omit, "en", "en-US", "English"):
                assert ask(client, language=language, response_format="verbose_json").language == "english"
            with pytest.raises(
                openai.BadRequestError, match="language is 'de', and bundle has only en"
            ) as caught:
                ask(client, language="de")
            assert caught.value.param == "language"
        status, _, answer = post(served, page="translations")
        assert status == 400
        assert json.loads(answer)["error"]["param"] == "model"
        assert "bundle does not translate: choose another model" in answer


def test_adapters_have_their_own_names_and_leave_the_only_model_the_only_one(whisper_path, client, tmp_path):
    text, access = ask(client).text, tmp_path / "access.toml"
    access.write_text(
        entry("all", "all", "predict")
        + entry("medical", "medical", "predict")
        + 'models = ["bundle/medical"]'
    )
    server = serving_bundles(whisper_path / "bundle", openai_names=OpenAINames.ANY, access_file=access)
    with on_a_thread(server) as served:
        adapter = SimpleNamespace(version="1")  # these graphs take none, and change nothing
        served.app.models.put(served.model.adapted("bundle/medical", adapter, 0))
        url = f"http://127.0.0.1:{served.app.http.port}/v1"
        for token, names, other in (
            ("all", ["bundle", "bundle/medical"], "bundle/none"),
            ("medical", ["bundle/medical"], "bundle"),
        ):
            with openai.OpenAI(base_url=url, api_key=token, max_retries=0) as caller:
                for name in ("whisper-1", "", *names):
                    assert ask(caller, model=name).text == text
                assert [one.id for one in caller.models.list()] == names
                assert caller.models.retrieve("bundle/medical").id == "bundle/medical"
                with pytest.raises((openai.NotFoundError, openai.PermissionDeniedError)) as caught:
                    ask(caller, model=other)
                assert caught.value.status_code == (404 if token == "all" else 403)


def test_the_only_model_of_sounds_answers_with_any_name_if_the_server_takes_it(whisper_path, client):
    with pytest.raises(openai.NotFoundError, match="no model is named 'gpt-4o-transcribe'"):
        ask(client, model="gpt-4o-transcribe")
    path, text = whisper_path / "bundle", ask(client).text
    for num_models in (1, 2):
        named = tuple((f"model{number}", path) for number in range(num_models))
        server = serving_bundles(named_bundles=named, openai_names=OpenAINames.ANY)
        with on_a_thread(server) as served:
            url = f"http://127.0.0.1:{served.app.http.port}/v1"
            with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as other:
                assert ask(other, model="whisper-1").text == text
                if num_models == 1:
                    for name in ("gpt-4o-transcribe", ""):
                        assert ask(other, model=name).text == text
                else:
                    with pytest.raises(openai.NotFoundError, match="this server has model0"):
                        ask(other, model="gpt-4o-transcribe")


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
        ({"file": b"not a sound"}, "file", "the file is not a WAV, AIFF"),
        ({"language": "fr"}, "language", "^((?!source_).)*language is 'fr', and bundle has de, en, ko"),
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text, verbose_json"),
        ({"temperature": 101}, "temperature", "must be from 0.01 to 100"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "must be a number"),
        ({"extra_body": {"stream": "yes"}}, "stream", "stream is 'yes', and must be true or false"),
        ({"stream": True, "response_format": "text"}, "response_format", "a stream has events in JSON"),
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
        ({"prompt": "a" * 70_000}, "prompt", "prompt has 70000 bytes"),
        ({"language": "k" * 2_000}, "language", "language has 2000 bytes"),
        (
            {"extra_body": {"hotwords": "a b " * 60}},
            "hotwords",
            "hotwords has .* tokens, and bundle reads at",
        ),
        ({"extra_body": {"word_timestamps": "true"}}, "word_timestamps", "the times of words need the resp"),
        (
            {"extra_body": {"beam_size": "5"}},
            "beam_size",
            "there is no field 'beam_size': send file, file_type",
        ),
        ({"extra_body": {"diarization": "true"}}, "diarization", "does not tell speakers apart"),
        ({"known_speaker_names": ["Ann"]}, "known_speaker_names[]", "does not tell speakers apart"),
        ({"include": ["logprobs"], "response_format": "text"}, "include[]", "logprobs need the response_for"),
        ({"include": ["usage"]}, "include[]", r"include\[\] is 'usage', and must be logprobs"),
        ({"extra_body": {"include": '["logprobs"'}}, "include", "and is not JSON"),
        ({"chunking_strategy": "fixed"}, "chunking_strategy", "'fixed', and must be auto or server_vad"),
        ({"chunking_strategy": {"type": "fixed"}}, "chunking_strategy[type]", "'fixed', and must be auto"),
        (
            {"chunking_strategy": {"type": "server_vad", "threshold": 1.5}},
            "chunking_strategy[threshold]",
            "is '1.5', and must be a number from 0 to 1",
        ),
        (
            {"extra_body": {"chunking_strategy[threshold]": "1", "chunking_strategy[type]": "x"}},
            "chunking_strategy[type]",
            "chunking_strategy is 'x', and must be auto",
        ),
        ({"language": "timestamps"}, "language", "language is 'timestamps'"),  # not "word_timestamps"
        (  # a number without a float was a fault of the server
            {"extra_body": {"chunking_strategy": f'{{"threshold": 1{"0" * 400}}}'}},
            "chunking_strategy[threshold]",
            "and must be a number from 0 to 1",
        ),
        (
            {"extra_body": {"chunking_strategy": '{"type": "server_vad", "eagerness": "low"}'}},
            "chunking_strategy[eagerness]",
            r"there is no field 'chunking_strategy\[eagerness\]': send type, threshold",
        ),
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
            with pytest.raises(openai.BadRequestError, match="echo does not transcribe sounds") as caught:
                ask(client, model="echo", language=openai.omit)
            assert caught.value.param == "model"
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
