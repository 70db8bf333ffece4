"""The commands `answer` and `caption`, against one server with a model of every form."""

import io
import json
import math
import re
import shutil
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import image
from PIL import Image

from seq2seq_serve.bundle.manifest import file_spec, load_bundle, write_manifest
from seq2seq_serve.client import Client, ClientError, GenerateOptions, Model
from seq2seq_serve.client.__main__ import main
from seq2seq_serve.client.forms import find_captioner
from seq2seq_serve.client.output import one_line
from seq2seq_serve.training.data.tokenizer import train_word_tokenizer
from tests.server.service.harness import on_a_thread, serving_bundles
from tests.server.service.read.test_inputs import clip_file, picture_file

OF_ANSWER = "warning: the answer ended at its length limit (this is the model's own limit)"
STORY = "Sam walks into the kitchen. Sam picks up an apple.\nSam sleeps!"
QUESTION = "Where is the apple?"
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (6, 6, 3), np.uint8)
CLIP = RNG.integers(0, 256, (5, 2, 2, 3), np.uint8)
FEATURES = RNG.integers(-50, 50, (4, 3)).astype(np.float64)


@pytest.fixture(scope="module")
def server(toy_paths):
    with on_a_thread(serving_bundles(*toy_paths.values())) as served:
        yield served


@pytest.fixture
def run(run, tmp_path):
    """Run the command in a folder with a story, a picture, a clip and features."""
    (tmp_path / "story.txt").write_text(STORY)
    (tmp_path / "picture.png").write_bytes(picture_file(PICTURE))
    (tmp_path / "clip.png").write_bytes(clip_file(CLIP))
    np.save(tmp_path / "features.npy", FEATURES)
    return run


def failure(result: tuple[int, str, list[str]]) -> str:
    """The only line of a command that failed."""
    code, out, [line] = result
    assert (code, out) == (1, "")
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def expected(client, model, source, **options):
    return client.generate(source, model=model, options=GenerateOptions(**options)).hypotheses[0]


@pytest.fixture
def of_words(toy_paths, tmp_path):
    """The address of a model of stories whose vocabulary has the words of one story only."""
    folder = tmp_path / "words"
    shutil.copytree(toy_paths["story"], folder)
    train_word_tokenizer([STORY, QUESTION], 100).save(folder / "words.json")
    words = replace(
        load_bundle(toy_paths["story"]).manifest, source_tokenizer=file_spec(folder, "words.json")
    )
    write_manifest(folder, words)
    with on_a_thread(serving_bundles(folder)) as served:
        yield served


def test_words_that_the_model_does_not_know_are_reported(of_words, run):
    """The answer to a question of unknown words was the most frequent place, with confidence."""
    flags = "--address", of_words.address, "--story", "story.txt", "--question"
    assert "does not know" not in str(run("answer", *flags, QUESTION))
    _, out, err = run("answer", *flags, "Is the Zebra in the zoo, zebra?", "--json")
    warning = "warning: words does not know Zebra, in, zoo, zebra: an answer about these is a guess"
    assert warning in err
    assert json.loads(out)["unknown_words"] == ["Zebra", "in", "zoo", "zebra"]
    body = json.dumps({"story": "Sam flies. A bird.", "question": QUESTION}).encode()
    url = f"http://127.0.0.1:{of_words.app.http.port}/v2/models/words/generate"
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
        assert json.load(answer)["parameters"] == {"unknown_words": "flies A bird"}


def test_a_question_about_a_story_is_answered(run, client):
    text = expected(client, "story", {"question": QUESTION, "story": STORY}).text
    arguments = ["answer", "--question", QUESTION, "--story"]
    assert run(*arguments, "story.txt") == (0, text + "\n", [OF_ANSWER])
    assert run(*arguments, "-", stdin=STORY.encode()) == (0, text + "\n", [OF_ANSWER])
    assert run(*arguments, "story.txt", "--model", "story") == (0, text + "\n", [OF_ANSWER])


def test_alternatives_have_probabilities(run, client):
    arguments = ["answer", "--story", "story.txt", "--question", QUESTION, "--top", "3"]
    code, out, err = run(*arguments)
    sources = {"story": STORY, "question": QUESTION}
    best = expected(client, "story", sources, num_alternatives=3)
    wanted = [
        f"{math.exp(each.log_probability):8.4f}  {one_line(each.text).strip()}"
        for each in best.alternatives[0].tokens
    ]
    assert (code, err) == (0, [OF_ANSWER])
    assert len(wanted) == 3
    assert out == "\n".join([best.text, *wanted, ""])
    content = json.loads(run(*arguments, "--json")[1])
    assert content["hypotheses"][0]["text"] == best.text
    assert len(content["hypotheses"][0]["alternatives"][0]["tokens"]) == 3


def test_the_attention_of_a_story_is_written_by_hop(run, tmp_path):
    arguments = ["answer", "--story", "story.txt", "--question", QUESTION, "--attention"]
    assert run(*arguments, "hops.png")[::2] == (0, [OF_ANSWER])
    assert (tmp_path / "hops.png").read_bytes().startswith(b"\x89PNG")
    assert run(*arguments, "hops.json")[0] == 0
    content = json.loads((tmp_path / "hops.json").read_text())
    assert content["source_tokens"] == [
        "Sam walks into the kitchen.",
        "Sam picks up an apple.",
        "Sam sleeps!",
    ]
    first, last = np.array(content["hops"])
    assert np.array_equal(first, 2 * last)
    assert content["weights"] == last.tolist()
    assert last.shape == (len(content["target_tokens"]), 3)


@pytest.mark.parametrize("kind", ["picture", "clip", "features"])
def test_the_command_caption_prints_the_answer_of_the_client(run, client, tmp_path, kind):
    file, array = {
        "picture": ("picture.png", PICTURE),
        "clip": ("clip.png", CLIP),
        "features": ("features.npy", FEATURES.astype(np.float32)),
    }[kind]
    wanted = one_line(expected(client, kind, array, max_new_tokens=4).text)
    for name in (file, "-"):
        stdin = (tmp_path / file).read_bytes()
        code, out, err = run("caption", name, "--model", kind, "--max-new-tokens", "4", stdin=stdin)
        assert (code, out) == (0, wanted + "\n")
        assert err == ["warning: the caption ended at its length limit (raise --max-new-tokens)"]
    assert json.loads(run("caption", file, "--model", kind, "--json")[1])["model"] == kind


@pytest.mark.parametrize("kind", ["picture", "clip"])
def test_the_attention_of_a_caption_is_drawn_or_written(run, client, tmp_path, kind):
    arguments = ["caption", f"{kind}.png", "--model", kind, "--max-new-tokens", "3", "--attention"]
    assert run(*arguments, "attention.png")[0] == 0
    assert image.imread(tmp_path / "attention.png").std() > 0.1
    assert run(*arguments, "attention.json")[0] == 0
    content = json.loads((tmp_path / "attention.json").read_text())
    array = {"picture": PICTURE, "clip": CLIP}[kind]
    attention = expected(client, kind, array, max_new_tokens=3, attention=True).attention
    assert np.ravel(content["weights"]).tolist() == list(attention.weights)
    assert np.shape(content["weights"]) == (3, {"picture": 9, "clip": 3}[kind])
    assert "hops" not in content


def test_the_attention_over_features_is_written_but_cannot_be_drawn(run, tmp_path):
    arguments = ["caption", "features.npy", "--model", "features", "--attention"]
    assert run(*arguments, "a.json")[0] == 0
    assert failure(run(*arguments, "a.png")).startswith(
        "INVALID_ARGUMENT: features takes features, which cannot be drawn: write the attention to a .json"
    )


def animation(kind: str, num_frames: int = 3) -> bytes:
    buffer, images = io.BytesIO(), [Image.fromarray(frame) for frame in CLIP[:num_frames]]
    images[0].save(buffer, kind, save_all=True, append_images=images[1:])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (animation("PNG"), "clip"),
        (animation("GIF"), "clip"),
        (animation("GIF", 1), "picture"),
        (picture_file(np.full((6, 6, 4), 99, np.uint8), "WEBP"), "picture"),  # VP8X for its alpha
        (picture_file(PICTURE, "JPEG"), "picture"),
    ],
)
def test_without_a_name_an_animation_is_for_clips_and_other_files_for_pictures(run, content, model):
    """A server with a model of each refused every file."""
    assert json.loads(run("caption", "-", "--json", stdin=content)[1])["model"] == model


def test_without_a_name_the_only_model_that_takes_the_file_is_asked(run, toy_paths):
    def caption(file, *names):
        with on_a_thread(serving_bundles(*(toy_paths[name] for name in names))) as served:
            return run("caption", file, "--json", "--address", served.address)

    assert json.loads(run("caption", "features.npy", "--json")[1])["model"] == "features"
    assert json.loads(caption("picture.png", "text", "features", "clip")[1])["model"] == "clip"
    assert json.loads(caption("clip.png", "text", "picture")[1])["model"] == "picture"
    assert "are features (features)" in failure(caption("clip.png", "text", "features"))
    refused = failure(caption("features.npy", "text", "picture", "clip"))
    assert "NumPy array (.npy): " in refused
    assert "are picture (picture), clip (clip)" in refused


def test_several_models_for_a_file_are_named():
    forms = {"a": "clip", "b": "clip", "c": "picture"}
    models = [Model(name=name, sources={"x": form}) for name, form in forms.items()]
    with pytest.raises(ClientError, match=r"--model: a \(clip\), b \(clip\)$"):
        find_captioner(SimpleNamespace(models=lambda: models), "", animation("GIF"))
    for content in (animation("GIF", 1), animation("WEBP")[:16], animation("PNG")[:9], b"GIF8", b""):
        assert find_captioner(SimpleNamespace(models=lambda: models), "", content).name == "c"


@pytest.mark.parametrize(
    ("command", "model", "message"),
    [
        ("caption picture.png", "text", "text takes text: .*translate"),
        ("caption picture.png", "story", "story takes sentences and text: .*answer"),
        ("answer --story story.txt --question a", "clip", "clip takes clip: .*caption"),
        ("translate abc", "picture", "picture takes picture: .*caption"),
        ("score a b", "picture", r"picture takes picture: .*Client\.score"),
        ("score a b", "story", r"story takes sentences and text: .*Client\.score"),
    ],
)
def test_a_model_of_another_command_is_refused_by_its_name(run, command, model, message):
    found = failure(run(*command.split(), "--model", model))
    assert re.match(f"INVALID_ARGUMENT: {message}", found), found


def test_without_a_name_the_first_model_that_translates_is_asked(run, toy_paths, tmp_path, monkeypatch):
    """It was the server's first model, and the command failed if that was a captioner."""
    with on_a_thread(serving_bundles(*(toy_paths[name] for name in ("picture", "story", "text")))) as served:
        with Client(served.address) as client:
            text = one_line(client.generate("abc", model="text").hypotheses[0].text)
            score = client.score("abc", "d", model="text").score
        (tmp_path / "in.txt").write_text("abc\n")
        calls = []
        monkeypatch.setattr(served.app.calls, "_sinks", [calls.append])

        def out(*arguments):
            calls.clear()
            code, out, _ = run(*arguments, "--address", served.address)
            assert code == 0
            assert len(calls) == 2
            return out

        assert one_line(out("translate", "abc").rstrip("\n")) == text
        assert out("translate", "--stream", "abc", "--json").splitlines()[-1].count('"model": "text"') == 1
        assert out("translate", "--input", "in.txt") == text + "\n"
        assert out("translate", "--model", "text", "--input", "in.txt") == text + "\n"
        assert float(out("score", "abc", "d").splitlines()[-1]) == pytest.approx(score, abs=1e-3)


def test_a_server_without_a_model_for_a_command_is_reported(toy_paths, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture_file(PICTURE))
    deeds = {"caption": "describes files", "transcribe": "reads sounds"}
    with on_a_thread(serving_bundles(toy_paths["text"])) as served:
        for command, deed in deeds.items():
            assert main([command, str(tmp_path / "a.png"), "--address", served.address]) == 1
            expected = f"error: INVALID_ARGUMENT: no model here {deed}: the server has text (text)\n"
            assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("answer --story none.txt --question a", "none.txt: No such file or directory"),
        ("caption picture.png --model nobody", "NOT_FOUND: no model is named 'nobody'"),
        (
            "caption story.txt --model picture",
            "INVALID_ARGUMENT: picture: the file is not PNG, JPEG, WebP or GIF",
        ),
        ("caption huge --model picture", "huge: the file has more than 4194304 bytes, the most of a request"),
        ("caption picture.png --model features", "picture.png: the file is not a NumPy array (.npy)"),
        (
            "caption wide.npy --model features",
            "INVALID_ARGUMENT: features has the shape [4, 9], and features takes",
        ),
        ("caption picture.png --beam-size 99 --model picture", "INVALID_ARGUMENT: --beam-size is 99"),
        ("answer --story - --question a", "INVALID_ARGUMENT: story has no sentences: send at least one"),
        ("answer --story bytes --question a", "bytes: the file is not UTF-8: byte 4 is wrong"),
    ],
)
def test_bad_input_is_one_clear_line(run, tmp_path, arguments, message):
    (tmp_path / "bytes").write_bytes(b"Sam\xff walks.")
    (tmp_path / "huge").write_bytes(bytes(5 * 2**20))
    np.save(tmp_path / "wide.npy", np.zeros((4, 9)))
    assert failure(run(*arguments.split())).startswith(message)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npy_header(shape: str, descr: str = "'<f8'") -> bytes:
    """The header of an array, without its numbers."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(np.zeros(8)), "the array is 8, and must be annotations x width"),
        (npy(FEATURES + 1j), "the array is of complex128, and must be of real numbers, such as float32"),
        (npy(FEATURES.astype(object)), "the array is of object, and must be of real numbers, such as"),
        (npy(np.full((4, 3), -1e99)), "the array has -1e+99 at [0, 0], which is beyond float32: scale it"),
        (
            npy_header("(999999999999, 8)"),
            "the array is 999999999999 x 8 of float64, 63999999999936 bytes, and the file has 0 bytes for it",
        ),
        (npy(FEATURES)[:-1], "the array is 4 x 3 of float64, 96 bytes, and the file has 95 bytes for it: it"),
        *(
            (content, "the file is not a NumPy array (.npy)")
            for content in (b"", npy(FEATURES)[:9], npy(FEATURES)[:30], npy_header("(" * 5000))
        ),
    ],
)
def test_a_wrong_array_is_one_clear_line(run, tmp_path, content, message):
    """Some were a traceback or NumPy's own warning."""
    (tmp_path / "a.npy").write_bytes(content)
    assert failure(run("caption", "a.npy", "--model", "features")).startswith(f"a.npy: {message}")


@pytest.mark.parametrize(
    "array", [np.asfortranarray(FEATURES), FEATURES.astype(">i2"), FEATURES.astype(np.float16)]
)
def test_an_array_of_any_real_numbers_is_read_as_float32(run, client, tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    wanted = one_line(expected(client, "features", FEATURES.astype(np.float32)).text)
    assert run("caption", "a.npy")[:2] == (0, wanted + "\n")


def test_many_sources_of_any_form_are_answered_in_order(client):
    pictures = RNG.integers(0, 256, (20, 6, 6, 3), np.uint8)
    results = list(
        client.translate_many(pictures, model="picture", options=GenerateOptions(max_new_tokens=3))
    )
    assert [result.text for result in results] == [
        client.generate(each, model="picture", options=GenerateOptions(max_new_tokens=3)).hypotheses[0].text
        for each in pictures
    ]
    assert results[3].source is not None
    given = [picture_file(PICTURE), b"no picture", {"picture": PICTURE}]
    first, wrong, last = client.translate_many(given, model="picture")
    assert first.text == last.text
    assert "the file is not PNG" in str(wrong.error)
    with pytest.raises(TypeError, match="must be several"):
        next(client.translate_many({"picture": PICTURE}))
