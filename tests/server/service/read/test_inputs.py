"""Named sources of every form, through `seq2seq.v1`, in one server for models of every kind."""

import asyncio
import io
import random
import struct
import threading
import zlib

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from PIL import Image

from seq2seq_serve.bundle.names import CLIP, FEATURES, PICTURE, QUESTION, SOURCE_IDS, STORY
from seq2seq_serve.client import ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.read import inputs
from tests.server.service.harness import byte_tokenizer, serving_bundles
from tests.server.toys import KINDS, MAX_TARGET_LENGTH

DATATYPES = {"uint8": "UINT8", "int64": "INT64", "float32": "FP32"}


def tensor(array: np.ndarray, **changes) -> pb.Tensor:
    fields = {"datatype": DATATYPES[str(array.dtype)], "shape": array.shape, "data": array.tobytes()}
    return pb.Tensor(**fields | changes)


def source(name: str, array: np.ndarray) -> pb.Source:
    if name in (SOURCE_IDS, QUESTION):
        return pb.Source(name=name, token_ids=pb.TokenIds(values=array.tolist()))
    return pb.Source(name=name, tensor=tensor(array))


def message(model: str, *sources: pb.Source, **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, sources=sources, options=pb.GenerateOptions(**options))


def picture_file(picture: np.ndarray, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, form)
    return buffer.getvalue()


def clip_file(clip: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    first, *others = map(Image.fromarray, clip)
    first.save(buffer, "PNG", save_all=True, append_images=others)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    """A whole PNG file that declares many pixels and has none."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def gif(num_frames: int, width: int = 1, height: int = 1) -> bytes:
    """A whole GIF file of frames of one pixel."""
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return header + num_frames * (b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0") + b";"


def token_ids(text: str) -> np.ndarray:
    return np.array(byte_tokenizer().encode(text))


def story_of(*sentences: str) -> np.ndarray:
    rows = [token_ids(sentence) for sentence in sentences]
    story = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, ids in zip(story, rows, strict=True):
        row[: len(ids)] = ids
    return story


def serving_all(toy_paths):
    return serving_bundles(*toy_paths.values())


async def test_every_form_is_answered_alone_and_in_any_batch_beside_the_others(toy_paths):
    rng, chance = np.random.default_rng(0), random.Random(0)
    cases = []
    for name, kind in KINDS.items():
        for length in [1, kind.max_source_length, *rng.integers(1, kind.max_source_length + 1, 4)]:
            sources = kind.draw(rng, length)
            count = chance.randint(1, MAX_TARGET_LENGTH)
            given = [source(*pair) for pair in sources.items()]
            chance.shuffle(given)
            cases.append((name, sources, message(name, *given, max_new_tokens=count, attention=True)))

    def check(name, sources, request, answer):
        kind, count = KINDS[name], request.options.max_new_tokens
        [hypothesis] = answer.hypotheses
        assert list(hypothesis.token_ids) == kind.tokens(sources, count)
        attention = np.array(kind.attention(sources, count))  # (T, S) or (T, hops, S)
        hops = np.moveaxis(attention, 1, 0) if attention.ndim == 3 else attention[None]
        assert list(hypothesis.attention.weights) == hops[-1].ravel().tolist()
        shown = [list(hop.weights) for hop in hypothesis.attention.hops]
        assert shown == ([hop.ravel().tolist() for hop in hops] if kind.has_hops else [])
        assert answer.usage.source_tokens == attention.shape[-1]

    async with serving_all(toy_paths) as served:
        for case in cases[::3]:
            check(*case, await served.stub.Generate(case[-1]))
        chance.shuffle(cases)
        answers = await asyncio.gather(*(served.stub.Generate(case[-1]) for case in cases))
        for case, answer in zip(cases, answers, strict=True):
            check(*case, answer)


async def test_a_file_is_read_as_its_pixels_are(toy_paths):
    rng = np.random.default_rng(0)
    picture, clip = (KINDS[name].draw(rng, 5)[name] for name in (PICTURE, CLIP))
    scaled = {name: array.astype(np.float32) / 255 for name, array in ((PICTURE, picture), (CLIP, clip))}
    async with serving_all(toy_paths) as served:
        for name, array, file in (
            (PICTURE, picture, picture_file(picture)),
            (CLIP, clip, clip_file(clip)),
            (CLIP, clip[:1], picture_file(clip[0])),
            (CLIP, clip[:1], clip_file(clip[:1])),
        ):
            expected = KINDS[name].tokens({name: array}, 5)
            pixels = scaled[name] if array.ndim == picture.ndim else scaled[name][: len(array)]
            for given in (pb.Source(file=file), pb.Source(name=name, tensor=tensor(pixels))):
                answer = await served.stub.Generate(message(name, given, max_new_tokens=5))
                assert list(answer.hypotheses[0].token_ids) == expected
        jpeg = pb.Source(file=picture_file(picture.repeat(9, axis=0), "JPEG"))
        assert (await served.stub.Generate(message(PICTURE, jpeg))).hypotheses[0].token_ids


async def test_a_file_is_decoded_beside_the_loop_however_small_it_is(toy_paths, monkeypatch):
    threads = []

    def noted(*given, inner=inputs.read_picture):
        threads.append(threading.current_thread().name.rsplit("_", 1)[0])
        return inner(*given)

    monkeypatch.setattr(inputs, "read_picture", noted)
    async with serving_bundles(toy_paths[PICTURE]) as served:
        file = pb.Source(file=picture_file(np.zeros((6, 6, 3), np.uint8)))
        await served.stub.Generate(message(PICTURE, file))
        target = pb.Target(token_ids=pb.TokenIds(values=[5]))
        await served.stub.Score(pb.ScoreRequest(sources=[file], target=target))
    assert threads == ["files"] * 2


async def test_a_story_is_split_into_sentences_which_label_the_attention(toy_paths):
    sentences = ["Sam walks into the kitchen.", "Sam picks up an apple!", "Gut, 나비"]
    question = "Where is the apple, and is it red or green?"
    sources = {STORY: story_of(*sentences), QUESTION: token_ids(question)}
    text, padded = "  ".join(sentences[:2]) + "\n" + sentences[2], np.pad(sources[STORY], ((0, 0), (0, 7)))
    async with serving_all(toy_paths) as served:
        for story in (pb.Source(text=text), pb.Source(tensor=tensor(padded))):
            story.name = STORY
            given = [pb.Source(name=QUESTION, text=question), story]
            answer = await served.stub.Generate(message(STORY, *given, max_new_tokens=3, attention=True))
            [hypothesis] = answer.hypotheses
            assert list(hypothesis.token_ids) == KINDS[STORY].tokens(sources, 3)
            assert list(hypothesis.attention.source_tokens) == sentences
            assert [len(hop.weights) for hop in hypothesis.attention.hops] == [9, 9]
            assert answer.usage.source_tokens == 3
        for model, sources_ in ((PICTURE, KINDS[PICTURE].draw(np.random.default_rng(0), 1)),):
            given = [source(*pair) for pair in sources_.items()]
            answer = await served.stub.Generate(message(model, *given, max_new_tokens=3, attention=True))
            attention = answer.hypotheses[0].attention
            assert (len(attention.source_tokens), len(attention.weights)) == (0, 3 * 9)


async def test_a_question_may_be_longer_than_its_story(toy_paths):
    sources = {STORY: story_of("Go."), QUESTION: token_ids("x" * inputs.MAX_WORDS)}
    async with serving_all(toy_paths) as served:
        given = [pb.Source(name=STORY, text="Go."), pb.Source(name=QUESTION, text="x" * inputs.MAX_WORDS)]
        answer = await served.stub.Generate(message(STORY, *given, max_new_tokens=4))
        assert list(answer.hypotheses[0].token_ids) == KINDS[STORY].tokens(sources, 4)


async def test_a_target_is_scored_for_any_sources(toy_paths):
    async with serving_all(toy_paths) as served:
        for name, kind in KINDS.items():
            sources = kind.draw(np.random.default_rng(1), 5)
            given = [source(*pair) for pair in sources.items()]
            tokens = kind.tokens(sources, 6)
            scores = []
            for ids in (tokens, tokens[::-1]):
                target = pb.Target(token_ids=pb.TokenIds(values=ids))
                request = pb.ScoreRequest(model=name, sources=given, target=target)
                scores.append(sum((await served.stub.Score(request)).log_probabilities[:-1]))
            assert scores[0] > scores[1]


async def test_a_model_says_what_it_reads(toy_paths):
    async with serving_all(toy_paths) as served:
        models = {
            model.name: model for model in (await served.stub.ListModels(pb.ListModelsRequest())).models
        }
        assert {name: dict(model.sources) for name, model in models.items()} == {
            name: dict(kind.forms) for name, kind in KINDS.items()
        }
        lengths = {name: model.max_source_length for name, model in models.items()}
        assert lengths == {name: kind.memory_capacity for name, kind in KINDS.items()}
        assert all(model.has_attention for model in models.values())
        shapes = {
            source: list(shape.sizes)
            for model in models.values()
            for source, shape in model.source_shapes.items()
        }
        assert shapes == {
            SOURCE_IDS: [-1],
            PICTURE: [6, 6, 3],
            CLIP: [-1, 2, 2, 3],
            FEATURES: [-1, 3],
            STORY: [-1, -1],
            QUESTION: [-1],
        }


PIXELS = np.zeros((6, 6, 3), np.uint8)
FRAMES = np.zeros((4, 2, 2, 3), np.uint8)
WIDTH_3 = np.zeros((4, 3), np.float32)
GO = pb.Source(name=STORY, text="Go.")
ASK = pb.Source(name=QUESTION, text="Where?")


def picture(**value) -> pb.GenerateRequest:
    return message(PICTURE, pb.Source(**value))


def clip(**value) -> pb.GenerateRequest:
    return message(CLIP, pb.Source(**value))


def features(array: np.ndarray, **changes) -> pb.GenerateRequest:
    return message(FEATURES, pb.Source(tensor=tensor(array, **changes)))


def story(**value) -> pb.GenerateRequest:
    return message(STORY, pb.Source(name=STORY, **value), ASK)


def question(**value) -> pb.GenerateRequest:
    return message(STORY, GO, pb.Source(name=QUESTION, **value))


def changed(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


BAD = [
    # names
    (message(STORY, GO), "sources", "the request has 1 sources, and story takes exactly 2"),
    (message(STORY, GO, ASK, ASK), "sources", "the request has 3 sources, and story takes exactly 2"),
    (message(STORY, GO, GO), "sources[1].name", "two sources are named story, and story takes one of each"),
    (
        message(STORY, GO, pb.Source(name="query", text="a")),
        "sources[1].name",
        "story has no source named 'query': send story, question",
    ),
    (
        message(PICTURE, ASK),
        "sources[0].name",
        "picture has no source named 'question': its only one is 'pict",
    ),
    # kinds of values
    (picture(text="a.png"), "sources[0]", "the source picture is sent as text, and picture reads picture"),
    (
        message(FEATURES, pb.Source(file=b"a")),
        "sources[0]",
        "the source features is sent as file, and features",
    ),
    # pictures
    (picture(file=b"%PDF-1.7 " * 9), "sources[0].file", "picture: the file is not PNG, JPEG, WebP or GIF"),
    (
        picture(file=picture_file(PIXELS)[:-20]),
        "sources[0].file",
        "picture: the PNG file is truncated or damaged",
    ),
    (
        picture(file=png(50_000, 50_000)),
        "sources[0].file",
        "picture: the picture is 50000 x 50000, 2500000000 pix",
    ),
    (
        picture(tensor=tensor(PIXELS[:5])),
        "sources[0].tensor.shape",
        "picture has the shape [5, 6, 3], and picture t",
    ),
    (
        picture(tensor=tensor(PIXELS, shape=[6, 6, -3])),
        "sources[0].tensor.shape",
        "picture has the shape [6, 6, -3], and picture takes [6, 6, 3]",
    ),
    (
        picture(tensor=tensor(PIXELS, datatype="INT64")),
        "sources[0].tensor.datatype",
        "picture has the datatype 'INT64', and picture takes UINT8 or FP32",
    ),
    *[
        (
            picture(tensor=tensor(changed(PIXELS.astype(np.float32), (1, 2, 0), value))),
            "sources[0].tensor.data",
            message,
        )
        for value, message in (
            (1.5, "picture is 1.5 at [1, 2, 0], and must be from 0 to 1: divide by 255, or send UINT8"),
            (-0.1, "picture is -0.1 at [1, 2, 0], and must be from 0 to 1: divide by 255, or send UINT8"),
            (np.nan, "picture is nan at [1, 2, 0], and must be from 0 to 1"),
            (np.inf, "picture is inf at [1, 2, 0], and must be from 0 to 1"),
        )
    ],
    # clips
    (clip(file=gif(42)), "sources[0].file", "clip: the clip has 42 frames, and at most 41 are read"),
    (
        clip(tensor=tensor(np.zeros((10_000, 2, 2, 3), np.uint8))),
        "sources[0].tensor.shape",
        "clip has the shape [10000, 2, 2, 3], and clip takes [1 to 41, 2, 2, 3]",
    ),
    (
        clip(tensor=tensor(FRAMES, shape=[2**62, 2, 2, 3])),
        "sources[0].tensor.shape",
        "clip has the shape [46116860",
    ),
    # features
    (
        features(np.zeros((26, 3), np.float32)),
        "sources[0].tensor.shape",
        "features has the shape [26, 3], and feat",
    ),
    (
        features(WIDTH_3, datatype=""),
        "sources[0].tensor.datatype",
        "features has the datatype '', and features tak",
    ),
    (
        features(changed(WIDTH_3, (1, 2), -3e38)),
        "sources[0].tensor.data",
        "features is -3e+38 at [1, 2], and must be from -65504 to 65504",
    ),
    # stories
    (story(text="Go. " * 10_000), "sources[0].text", "story has 10000 sentences, and story takes at most 20"),
    (
        picture(tensor=tensor(PIXELS, data=bytes(107))),
        "sources[0].tensor.data",
        "picture has 107 bytes of data, and UINT8 of the shape [6, 6, 3] has 108",
    ),
    (story(text=""), "sources[0].text", "story has no sentences"),
    (story(text=" .. \n ? \u200b"), "sources[0].text", "story has no sentences"),
    (
        story(text="가" * 40_000),
        "sources[0].text",
        "story has 120000 bytes, and story takes at most 20 sentences of 64 words, never more than 81920",
    ),
    (
        story(text=f"Go. {'x' * 65}."),
        "sources[0].text",
        "sentence 2 of story has 66 words, and story takes 1 to 64",
    ),
    (
        story(tensor=tensor(np.ones((21, 4), np.int64))),
        "sources[0].tensor.shape",
        "story has the shape [21, 4], and story takes [1 to 20, 1 to 64]",
    ),
    (
        story(tensor=tensor(np.array([[5, 0], [0, 0]]))),
        "sources[0].tensor.data",
        "sentence 2 of story is empty, or ha",
    ),
    (
        story(tensor=tensor(np.array([[5, -1]]))),
        "sources[0].tensor.data",
        "token id -1 at [0, 1] of story is outsi",
    ),
    # questions
    (question(token_ids=pb.TokenIds()), "sources[1].token_ids", "question has no tokens"),
    (question(text=""), "sources[1].text", "question: the text is empty"),
    (question(text="x" * 65), "sources[1].text", "question has 65 tokens, and story takes at most 64"),
    (
        question(token_ids=pb.TokenIds(values=[5, 0])),
        "sources[1].token_ids.values[1]",
        "token id 0 is padding",
    ),
    # options of texts
    (
        message(PICTURE, source(PICTURE, PIXELS), word_alignment=True),
        "options.word_alignment",
        "word_alignment needs the words of a text, and picture reads picture",
    ),
    (
        message(STORY, GO, ASK, long_source=pb.LONG_SOURCE_TRUNCATE),
        "options.long_source",
        "long_source applies to a text or a sound, and story reads story, question",
    ),
]


async def test_a_bad_source_is_refused_with_its_field_and_nothing_is_lost(toy_paths, monkeypatch):
    encoded = []
    monkeypatch.setattr(OnnxRunner, "encode", lambda *_: encoded.append(1))
    async with serving_all(toy_paths) as served:
        encoded.clear()
        for request, field, expected in BAD:
            for call in (
                served.stub.Generate,
                lambda request: served.stub.GenerateStream(request).read(),
            ):
                with pytest.raises(AioRpcError) as caught:
                    await call(request)
                error = ClientError.from_rpc(caught.value, "")
                assert caught.value.code() is StatusCode.INVALID_ARGUMENT
                assert error.message.startswith(expected)
                assert [violation.field for violation in error.field_violations] == [field]
        await served.check_that_everything_is_back()
        assert not encoded


async def test_the_price_of_a_source_is_that_of_what_will_be_decoded(toy_paths, monkeypatch):
    """A picture model paid for all frames, and a clip that would be refused kept its caller out for hours."""
    prices = []

    async def noted(self, work, num_bytes, inner=RemoteCall.read, **options):
        if num_bytes:  # the options have none
            prices.append(num_bytes)
        return await inner(self, work, num_bytes, **options)

    monkeypatch.setattr(RemoteCall, "read", noted)
    large, small = gif(9_999, 2000, 2000), gif(41, 100, 100)
    many = np.zeros((25, 3), np.float32)
    num_headers = 100  # the most bytes of a message besides its contents
    async with serving_all(toy_paths) as served:
        await served.stub.Generate(picture(file=large))
        assert prices[0] == min(len(large) // 8, 32_000)  # for its headers
        assert 0 <= prices.pop() - (2000 * 2000 + len(large)) // 64 < num_headers
        prices.clear()
        await served.stub.Generate(clip(file=small))
        assert 0 <= prices.pop() - (41 * 100 * 100 + len(small)) // 64 < num_headers
        prices.clear()
        await served.stub.Generate(features(many))
        assert 0 <= prices.pop() - many.nbytes // 64 < num_headers
        assert not prices
        # However much waits to be read, such a clip is not worth another try.
        served.app.calls.files.shares.limit = 0
        for number in (9_999, 42):
            with pytest.raises(AioRpcError, match=f"clip: the clip has {number} frames") as caught:
                await served.stub.Generate(clip(file=gif(number, 2000, 2000)))
            assert caught.value.code() is StatusCode.INVALID_ARGUMENT


async def test_a_clip_is_not_decoded_further_when_its_caller_has_left(toy_paths, monkeypatch):
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    numbers = []

    def noted(content, size, max_frames, inner=inputs.read_frames):
        try:
            for number, frame in enumerate(inner(content, size, max_frames)):
                numbers.append(number)
                begun.set()
                assert go.wait(20)
                yield frame
        finally:
            ended.set()

    monkeypatch.setattr(inputs, "read_frames", noted)
    async with serving_bundles(toy_paths[CLIP]) as served:
        call = served.stub.Generate(clip(file=gif(41)))
        await asyncio.to_thread(begun.wait, 20)
        call.cancel()
        await served.until_calls_are_over()
        go.set()
        assert await asyncio.to_thread(ended.wait, 20)
    assert numbers == [0]
