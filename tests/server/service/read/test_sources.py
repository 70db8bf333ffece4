"""What becomes of sources that are longer than the model takes."""

import asyncio
import threading
from contextlib import suppress

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.manifest import Generation
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import QueueLimits
from tests.server.service.harness import EOS, EchoRunner, serving, with_manifest

TRUNCATE, SPLIT = pb.LONG_SOURCE_TRUNCATE, pb.LONG_SOURCE_SPLIT
SENTENCES = ["첫 문장입니다.", "Mr. Smith came here yesterday, and he was late.", "끝이 없는 문장", "가나다!"]
TEXT = f"{SENTENCES[0]} {SENTENCES[1]}\n\n{SENTENCES[2]}\n\n{SENTENCES[3]}  "
JOINED = f"{SENTENCES[0]} {SENTENCES[1]}\n\n{SENTENCES[2]}\n\n{SENTENCES[3]}"


def request(text: str, **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


async def refusal(served, message) -> str:
    with pytest.raises(AioRpcError) as caught:
        await served.stub.Generate(message)
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    return caught.value.details()


@pytest.fixture
def single() -> EchoRunner:
    """Of a model that learned from single sentences."""
    return EchoRunner(generation=Generation(splits_sentences=True))


async def test_a_model_of_single_sentences_splits_by_default_and_keeps_paragraphs(single):
    """It answered the first sentence, and nothing showed that the others were missing."""
    expected = ["첫 문장입니다.", "둘.", "셋!"]
    async with serving(single) as served:
        answer = await served.stub.Generate(request("첫 문장입니다. 둘.\n\n셋!", log_probabilities=True))
        assert [sentence.source_text for sentence in answer.sentences] == expected
        [joined] = answer.hypotheses
        assert joined.text == "첫 문장입니다. 둘.\n\n셋!"
        each = [sentence.hypotheses[0] for sentence in answer.sentences]
        assert joined.score == sum(one.score for one in each)
        assert joined.log_probabilities == [value for one in each for value in one.log_probabilities]
        assert (await served.stub.ListModels(pb.ListModelsRequest())).models[0].splits_sentences


@pytest.mark.parametrize(
    "options",
    [
        {"long_source": pb.LONG_SOURCE_REFUSE},
        {"num_hypotheses": 2},
        {"stop_sequences": ["?"]},
        {"target_prefix": pb.Target(text="On")},
    ],
)
async def test_what_is_for_one_target_keeps_the_text_whole(single, options):
    async with serving(single) as served:
        answer = await served.stub.Generate(request("One. Two.", **options))
        assert not answer.sentences
        assert answer.hypotheses[0].text == "One. Two."


async def test_a_long_text_is_truncated_only_when_asked_and_the_answer_says_how_much():
    async with serving() as served:
        answer = await served.stub.Generate(request("x" * 70, long_source=TRUNCATE))
        assert answer.hypotheses[0].text == "x" * 63
        assert answer.usage.source_tokens == 64
        assert answer.usage.truncated_source_tokens == 7
        short = await served.stub.Generate(request("x" * 63, long_source=TRUNCATE))
        assert short.usage.truncated_source_tokens == 0
        for kind in (pb.LONG_SOURCE_REFUSE, pb.LONG_SOURCE_UNSPECIFIED):
            message = await refusal(served, request("x" * 70, long_source=kind))
            assert message.startswith("the source has 71 tokens, and echo takes at most 64")


async def test_long_token_ids_keep_their_end_when_they_are_truncated():
    async with serving() as served:
        ids = [*served.model.source_tokenizer.encode("y" * 80), EOS]
        message = request("", long_source=TRUNCATE)
        message.sources[0].token_ids.values.extend(ids)
        answer = await served.stub.Generate(message)
        assert answer.hypotheses[0].text == "y" * 63
        assert answer.usage.truncated_source_tokens == 17


async def test_a_long_text_is_split_generated_at_once_and_joined_in_order():
    async with serving() as served:
        answer = await served.stub.Generate(request(TEXT, long_source=SPLIT, attention=True))
        [joined] = answer.hypotheses
        assert joined.text == JOINED
        assert joined.finish_reason == pb.FINISH_REASON_EOS
        assert [sentence.source_text for sentence in answer.sentences] == SENTENCES
        assert [sentence.hypotheses[0].text for sentence in answer.sentences] == SENTENCES
        ids = [i for sentence in answer.sentences for i in sentence.hypotheses[0].token_ids]
        assert list(joined.token_ids) == ids
        total = sum(sentence.usage.source_tokens for sentence in answer.sentences)
        assert answer.usage.source_tokens == total == len("".join(SENTENCES).encode()) + 4
        assert all(sentence.hypotheses[0].HasField("attention") for sentence in answer.sentences)
        await served.check_that_everything_is_back()


async def test_the_pieces_of_a_split_text_come_in_order_and_join_to_the_result():
    async with serving() as served:
        message = request(TEXT, long_source=SPLIT, beam_size=2)
        message.options.max_new_tokens = 30
        *pieces, last = [event async for event in served.stub.GenerateStream(message)]
        text = "".join(event.piece.text for event in pieces)
        assert text == last.result.hypotheses[0].text
        assert len(last.result.sentences) == 4
        await served.check_that_everything_is_back()


async def test_split_keeps_short_lines_whole_and_always_cuts_every_sentence():
    text = " One.  Two.\n\n\nThree\r\n\u200b\nFour. "
    joined = text.strip()
    async with serving() as served:
        for kind, expected in (
            (SPLIT, ["One.  Two.", "Three", "Four."]),
            (pb.LONG_SOURCE_SPLIT_ALWAYS, ["One.", "Two.", "Three", "Four."]),
        ):
            answer = await served.stub.Generate(request(text, long_source=kind))
            assert [sentence.source_text for sentence in answer.sentences] == expected
            assert answer.hypotheses[0].text == joined
        one = await served.stub.Generate(request("One.", long_source=pb.LONG_SOURCE_SPLIT_ALWAYS))
        assert (one.hypotheses[0].text, len(one.sentences)) == ("One.", 0)


async def test_sentences_without_white_space_between_them_join_as_their_targets_do():
    async with serving() as served:
        given = request("好。是！ 真的？\n「是。」「对。」", long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
        answer = await served.stub.Generate(given)
        cut = ["好。", "是！", "真的？", "「是。」", "「对。」"]
        assert [sentence.source_text for sentence in answer.sentences] == cut
        assert answer.hypotheses[0].text == given.sources[0].text
        events = [event async for event in served.stub.GenerateStream(given)]
        assert "".join(event.piece.text for event in events) == given.sources[0].text


async def test_sentences_are_split_by_the_rules_of_the_request_or_the_bundle():
    text = "Das ist z.B. gut. Ja."

    async def parts(served, language: str) -> int:
        always = pb.LONG_SOURCE_SPLIT_ALWAYS
        answer = await served.stub.Generate(request(text, long_source=always, source_language=language))
        return len(answer.sentences)

    async with serving() as served:
        num_english = await parts(served, "")
        assert await parts(served, "de-AT") == 2
        num_amharic = await parts(served, "am")
        assert num_amharic > 2
        model = served.model
        for language, expected in (("am", num_amharic), ("tlh", num_english)):
            served.app.models.put(with_manifest(model, source_language=language))
            assert await parts(served, "") == expected
        served.app.models.put(model)
        message = await refusal(served, request("a", source_language="korean"))
        assert message.startswith("source_language is 'korean', and the server cannot split its sentences")


async def test_text_that_takes_long_is_cut_beside_the_loop(monkeypatch):
    """Also where it is not long for the model, and for targets that are scored."""
    threads = []

    def noted(self, *given, inner=Tokenizer.encode_truncated):
        threads.append(threading.current_thread().name)
        return inner(self, *given)

    monkeypatch.setattr(Tokenizer, "encode_truncated", noted)
    async with serving() as served:
        for text in ("a" * 50, "x" * 3000, "x" * 60_000):
            await refusal_or_answer(served, request(text, long_source=TRUNCATE))
        await refusal_or_answer(served, request("x" * 3000))
        source, target = pb.Source(text="x" * 3000), pb.Target(text="y")
        with pytest.raises(AioRpcError, match="the source has 3001 tokens"):
            await served.stub.Score(pb.ScoreRequest(sources=[source], target=target))
    assert threads[0] == "MainThread"
    assert [name.rsplit("_", 1)[0] for name in threads[1:]] == ["short-texts", "long-texts"] + 2 * [
        "short-texts"
    ]


async def refusal_or_answer(served, message) -> None:
    with suppress(AioRpcError):
        await served.stub.Generate(message)


async def test_what_cannot_be_split_is_refused_by_name():
    async with serving() as served:
        for text, options, expected in (
            ("가. " + "나" * 40, {}, "sentence 2 of the source has 121 tokens, and echo takes"),
            ("Go. " * 300, {}, "the text has more than 256 sentences and lines"),
            ("Go.", {"stop_sequences": ["x"]}, "stop_sequences applies to one target"),
            ("Go.", {"target_prefix": pb.Target(text="a")}, "target_prefix applies to one target"),
            ("« " * 20_000, {}, "sentence 1 of the source has more than "),
            ("Go. " * 262_145, {}, "the text has 1048580 bytes"),
        ):
            message = await refusal(served, request(text, long_source=SPLIT, **options))
            assert message.startswith(expected)
        message = await refusal(served, request("a", long_source=9))
        assert message.startswith("long_source is 9, and must be one of LONG_SOURCE_UNSPECIFIED, ")
        assert served.turns.num_submitted == 0


async def test_when_one_sentence_is_refused_none_is_left_running():
    runner = EchoRunner(num_slots=1)
    async with serving(runner, queue=QueueLimits(max_waiting_requests=4)) as served:
        runner.gate.clear()
        running = asyncio.ensure_future(served.stub.Generate(request("a")))
        await asyncio.to_thread(runner.stepping.wait, 20)
        waiting = asyncio.ensure_future(served.stub.Generate(request("b")))
        await served.turns.until(lambda: served.turns.num_submitted == 2)
        with pytest.raises(AioRpcError, match="the queue is full"):
            await served.stub.Generate(request(TEXT, long_source=SPLIT))
        runner.gate.set()
        await asyncio.gather(running, waiting)
        await served.check_that_everything_is_back()


@pytest.mark.parametrize("options", [{}, {"attention": True}, {"beam_size": 2, "num_hypotheses": 2}])
async def test_words_that_belong_together_are_linked(options):
    async with serving() as served:
        answer = await served.stub.Generate(request("오늘 ab c", word_alignment=True, **options))
        for hypothesis in answer.hypotheses:
            alignment = hypothesis.word_alignment
            assert list(alignment.source_words) == ["오늘", "ab", "c"]
            assert list(alignment.target_words) == hypothesis.text.split()
            # the echo attends to the source token at the same place
            linked = [(link.source_word, link.target_word) for link in alignment.links]
            assert linked == [(i, i) for i in range(len(alignment.target_words))]
            assert hypothesis.HasField("attention") == ("attention" in options)
            assert not alignment.links or alignment.links[0].weight == 1
