"""The terms and placeholders of texts, over an engine whose model echoes."""

import gc
import math
import random
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import tokenizers
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from seq2seq_serve.bundle.manifest import Generation
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.terms import RequiredTerms, Spelling
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service import calls
from seq2seq_serve.server.service.read.terms import Glossary
from tests.server.service.harness import EOS, EchoRunner, byte_tokenizer, serving


def term(source: str, target: str, **options) -> pb.Term:
    return pb.Term(source=source, target=target, **options)


def glossary(*terms: pb.Term, tokenizer=None, **options) -> Glossary:
    generation = SimpleNamespace(length_penalty=1.0, length_penalty_formula="wu", early_stopping=False)
    model = SimpleNamespace(
        name="echo",
        target_tokenizer=tokenizer or byte_tokenizer(),
        manifest=SimpleNamespace(generation=generation),
        sizing=SimpleNamespace(num_slots=4),
    )
    return Glossary(pb.GenerateOptions(terms=terms, **options), model, lambda: None)


def required(known: Glossary, text: str) -> Counter[str]:
    found = known.required(text, "sources[0]", lambda: None)
    if found is None:
        return Counter()
    return Counter({text: each.number for text, each in zip(found.texts, found.terms, strict=True)})


def test_terms_are_whole_words_and_the_longest_come_first():
    known = glossary(
        term("machine", "A"),
        term("Machine learning model", "B"),
        term("deep machine", "C"),
        term("state-of-the-art", "D"),
        term("模型", "E"),
    )
    assert required(known, "A MACHINE. Machines, machine-made") == Counter({"A": 2})
    assert required(known, "deep machine  learning model; deep machine") == Counter({"B": 1, "C": 1})
    assert required(known, "state-of-the-art, state of the art") == Counter({"D": 1})
    assert required(known, "新模型 machine learning") == Counter({"E": 1, "A": 1})
    assert required(known, "learning model") == Counter()


some_words = st.lists(st.sampled_from("abA"), min_size=1, max_size=4).map(" ".join)


@given(
    st.dictionaries(st.tuples(some_words, st.booleans()), st.sampled_from("xyz"), max_size=8),
    st.lists(st.sampled_from("abAc"), max_size=12),
)
def test_the_terms_of_a_text_are_those_of_trying_each_at_each_place(targets, text):
    terms = dict[tuple[str, bool], str]()
    for (source, has_case), target in targets.items():
        terms.setdefault((source if has_case else source.casefold(), has_case), target)
    known = glossary(*(term(one, it, case_sensitive=has_case) for (one, has_case), it in terms.items()))
    matches = []
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            exact = " ".join(text[begin:end])
            for key in ((exact, True), (exact.casefold(), False)):
                if key in terms:
                    matches.append((begin - end, begin, not key[1], terms[key]))
    expected, is_taken = Counter[str](), [False] * len(text)
    for minus_length, begin, _, target in sorted(matches):
        if not any(is_taken[begin : begin - minus_length]):
            is_taken[begin : begin - minus_length] = [True] * -minus_length
            expected[target] += 1
    assert required(known, " ".join(text)) == expected


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda chance: "".join(chance.choices(".,;:!?()-*/=", k=256)), id="marks"),
        pytest.param(lambda chance: " ".join(chance.choices("abcdefgh", k=128)), id="letters"),
        pytest.param(
            lambda chance: "".join(chr(0x4E00 + chance.randrange(20_000)) for _ in "a" * 256), id="한자"
        ),
    ],
)
def test_a_glossary_takes_little_more_memory_than_its_message_and_counts_it(source):
    """A node for each word took 288 times as much."""
    chance = random.Random(0)
    terms = [term(source(chance), f"t{number}", case_sensitive=number % 2) for number in range(100)]
    known = glossary(*terms)
    found, waiting = dict[int, int](), [known._terms]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and not isinstance(each, type):
            found[id(each)] = sys.getsizeof(each)
            waiting += gc.get_referents(each)
    assert sum(found.values()) < known.num_bytes < 4 * sum(each.ByteSize() for each in terms)


def test_where_a_long_term_does_not_fit_the_shorter_one_counts():
    known = glossary(term("a", "1"), term("a b", "2"), term("b c d", "3"))
    assert required(known, "a b c d") == Counter({"1": 1, "3": 1})


def test_case_matters_for_a_term_that_says_so_and_its_translation_comes_first():
    known = glossary(term("US", "USA", case_sensitive=True), term("us", "uns"))
    assert required(known, "us, Us and US") == Counter({"uns": 2, "USA": 1})
    assert required(glossary(term("Turkey", "T", case_sensitive=True)), "a turkey") == Counter()


def test_the_same_term_twice_is_one_and_equal_targets_add_up():
    known = glossary(term("car", "Auto"), term("Car", "Auto"), term("automobile", "Auto"))
    assert required(known, "The car is an automobile.") == Counter({"Auto": 2})


def test_placeholders_stand_as_often_as_in_the_source_and_have_no_terms_inside():
    known = glossary(term("name", "N"), keep_placeholders=True)
    assert required(known, "name: {name}, {name} and %s") == Counter({"N": 1, "{name}": 2, "%s": 1})
    found = known.required("{name} <b>", "sources[0]", lambda: None)
    assert all(each.is_exact for each in found.terms)
    assert required(glossary(term("name", "N")), "{name}") == Counter({"N": 1})


def test_invisible_characters_and_spaces_around_a_term_do_not_matter():
    known = glossary(term("soft\u00adware ", " S\n"), term("car", "A"))
    assert required(known, "software, soft\u00adware, ca\u200br") == Counter({"S": 2, "A": 1})


@pytest.mark.parametrize(
    "text",
    [
        "{h}:{m}",
        "%s%s$%d v{version}",
        "“{a}” l’{b} mail:a@b.com",
        "{name} ${name}",
        "{x} {{x}}",
        "http://a.com, http://a.com/b",
        "( {name} ) [ %s",
    ],
)
def test_a_text_has_its_own_placeholders_wherever_they_stand(text):
    tokenizer = byte_tokenizer()
    found = glossary(keep_placeholders=True, tokenizer=tokenizer).required(text, "sources[0]", lambda: None)
    required = RequiredTerms(found.terms, tokenizer.token_bytes)
    progress, ids = required.start, tokenizer.encode(text)
    for place, token_id in enumerate(ids):
        assert not required.spoils(progress, ids[:place], token_id)
        progress = required.advance(progress, token_id)
    assert not any(progress.at_end)


def test_the_reading_of_terms_can_end_at_any_time():
    calls = 0

    def checkpoint():
        nonlocal calls
        calls += 1

    known = glossary(term("a b", "x"), term("b", "y"))
    assert known.required("a b " * 32_000, "sources[0]", checkpoint).terms[0].number == 32_000
    assert calls >= 1500  # for the words, and for the places where terms occur
    calls = 0
    found = glossary(keep_placeholders=True).required("%%" * 32_000, "sources[0]", checkpoint)
    assert found.terms[0].number == 32_000
    assert calls >= 500


def test_a_term_is_spelled_after_a_space_after_a_mark_and_at_the_beginning():
    tokenizer = byte_tokenizer()
    found = glossary(term("car", "Auto"), tokenizer=tokenizer).required("car", "sources[0]", lambda: None)
    inside, first = tokenizer.encode(" Auto"), tokenizer.encode("Auto")
    [each] = found.terms
    assert each.spellings == (
        Spelling(tuple(inside), begins_after_break=False, ends_before_break=True),
        Spelling(tuple(first), begins_after_break=True, ends_before_break=True),
    )


def spoils(source: str, target: str) -> bool:
    """Whether the engine avoids a target because of the placeholders of its source."""
    tokenizer = byte_tokenizer()
    found = glossary(keep_placeholders=True, tokenizer=tokenizer).required(source, "sources[0]", lambda: None)
    required, ids = RequiredTerms(found.terms, tokenizer.token_bytes), tokenizer.encode(target)
    progress = required.start
    for place, token_id in enumerate(ids):
        if required.spoils(progress, ids[:place], token_id):
            return True
        progress = required.advance(progress, token_id)
    return any(progress.at_end)


@pytest.mark.parametrize(
    ("source", "target", "glued"),
    [
        ("나는 {name}", "I {name}.", "I{name}."),
        ("{name}은 학생", "a student, {name}", "a student{name}"),
        ("{name}은 학생", "{name} is", "{name}is"),
        ("오늘은 %s 입니다 %1$s", "Today is %s %1$s.", "Today is %s%1$s."),
        ("{a} 은 {b} 의", "{a} is {b}", "{a}{b} is"),
        ("파일 %d개", "%d files", "%dfiles"),
        ("({name})", "I ({name})", "I{name}"),
        ("나는 <b>학생</b> 이다", "I <b>student</b> am", "I<b>student</b> am"),
        ("나는 <b>학생</b> 이다", "I <b>student</b>, am", "I <b>student</b>am"),
        ("v{version} px", "v{version} x", "v{version}x"),
        ("나는 https://a.com 을", "I https://a.com x", "xhttps://a.com x"),
        ("나는 {name}", "나는{name}은", "I{name}"),
        ("{n}px", "{n}px", "{n}px {n}"),
        ("{a} 은 {b} 의", "A. {b} is {a}", "A.{b} is {a}"),
        ("<b>a</b> <i>b</i>", "<b>x</b> <i>x</i>", "<b>x</b><i>x</i>"),
        ("이름: {name}", "name: {name}", "name:{name}"),
        ("file.{ext}", "file.{ext}", ".{ext}x"),
        ("({name})", "I am [{name}]", "I am ( {name})"),
        ("({a}, {b})", "{b} ({a})", "( {b} {a})"),
    ],
)
def test_a_placeholder_has_breaks_around_it_as_in_the_source(source, target, glued):
    """Its tokens without a space before them followed a word: I{name}."""
    assert not spoils(source, source)
    assert not spoils(source, target)
    assert spoils(source, glued)


@pytest.mark.parametrize(
    ("source", "target", "changed"),
    [
        ("{n} 은", "x {n}.", "x {{n}}"),
        ("{n} 은", "({n})", "${n}"),
        ("{n} {m}", "{m} {({n}", "{m} {{n}}"),
        ("%s 개 %s", "%s/%s", "%%s %s"),
        ("%1 개", "%1.", "%1$"),
        ("https://a.com 을", "https://a.com.", "https://a.com/b"),
        ("https://a.com 을", "(https://a.com)", "https://a.com-"),
        ("www.a.com 을", "“www.a.com”", "https://www.a.com"),
        ("a@b.com 을", "a@b.com.", "a@b.com-"),
    ],
)
def test_no_mark_beside_a_placeholder_makes_it_another(source, target, changed):
    assert not spoils(source, source)
    assert not spoils(source, target)
    assert spoils(source, changed)


def test_a_placeholder_that_is_in_a_word_once_needs_no_breaks():
    assert not spoils("v{n} {n}", "{n} v{n} x")
    assert spoils("v {n} {n}", "{n} v{n} x")


@pytest.mark.parametrize("text", ["v{n}", "_{n}", "<b>v</b>"])
def test_a_placeholder_in_a_word_is_written_without_a_space_before_it(text):
    tokenizer = byte_tokenizer()
    found = glossary(keep_placeholders=True, tokenizer=tokenizer).required(text, "sources[0]", lambda: None)
    [spelling] = found.terms[-1].spellings
    assert spelling.token_ids == tuple(tokenizer.encode(found.texts[-1]))


@pytest.mark.parametrize(
    ("source", "target", "changed"),
    [
        ("a {n}", "{n} b", []),
        ("a {n}", "{{n}} b", ["{n}", "{{n}}"]),
        ("%s, {n}", "{n}, 100%%s", ["%s", "%%"]),
        ("%1 of %1", "%1$s of %1", ["%1", "%1$s"]),
        ("https://a.com a@b.com", "a@b.com.kr https://a.com.", ["a@b.com", "a@b.com.kr"]),
        ("{n} {n}", "{n}", ["{n}"]),
        ("{n}", "{n} {m} {n}", ["{n}", "{m}"]),
        ("a", "a <b>", ["<b>"]),
        ("car {n}", "{n} <i>auto</i>", []),  # that of a term
        ("car {n}", "{n} <i>auto", ["</i>"]),
    ],
)
def test_the_text_of_a_target_decides_whether_it_has_the_placeholders(source, target, changed):
    """Its tokens decided: `{{n}}` counted as `{n}`."""
    known = glossary(term("car", "<i>auto</i>"), keep_placeholders=True)
    assert known.required(source, "sources[0]", lambda: None).missing((), target) == changed


async def test_an_answer_names_placeholders_that_its_source_does_not_have():
    async with serving() as served:
        message = request("a cat", keep_placeholders=True)
        message.options.target_prefix.text = "{m} "
        assert (await served.stub.Generate(message)).hypotheses[0].missing_terms == ["{m}"]
        message.options.keep_placeholders = False
        assert not (await served.stub.Generate(message)).hypotheses[0].missing_terms


async def test_a_model_that_writes_no_spaces_gets_one_before_a_placeholder():
    async with serving() as served:
        answer = await served.stub.Generate(request("ab {c}", keep_placeholders=True))
        assert answer.hypotheses[0].text.count(" {c}") == 1


def test_what_a_tokenizer_cannot_write_is_refused_or_named(word_tokenizer):
    with pytest.raises(
        InvalidRequest, match="echo cannot write the target 'dog cat' of a term with its tokens"
    ):
        glossary(term("x", "dog"), term("y", "dog cat"), tokenizer=word_tokenizer)
    known = glossary(term("x", "dog"), tokenizer=word_tokenizer, keep_placeholders=True)
    found = known.required("x {name}", "sources[0]", lambda: None)
    assert found.missing((0,), "dog") == ["{name}"]
    assert found.missing((), "dog") == ["{name}"]
    assert found.missing((1,), "a") == ["dog", "{name}"]


@pytest.fixture
def word_tokenizer():
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "▁dog": 4, "▁a": 5}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    inner.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return Tokenizer(inner)


def request(text: str, **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


async def test_targets_have_their_terms_and_greedy_requests_get_a_beam():
    async with serving() as served:
        answer = await served.stub.Generate(request("a cat", terms=[term("cat", "Katze")]))
        [hypothesis] = answer.hypotheses
        assert "Katze" in hypothesis.text.split()
        assert not hypothesis.missing_terms
        [required] = served.turns.requests
        assert required.beam == Beam(4, 0.6, "wu", True)  # 5, or the slots that there are
        other = await served.stub.Generate(request("a cat", terms=[term("dog", "Hund")]))
        assert other.hypotheses[0].text == "a cat"
        assert served.turns.requests[-1].beam is None
        wide = await served.stub.Generate(request("cat", terms=[term("cat", "K")], beam_size=2))
        assert "K" in wide.hypotheses[0].text
        assert served.turns.requests[-1].beam.size == 2


async def test_what_the_prefix_of_a_target_has_is_not_required_again():
    """It was required again, and did not fit."""
    async with serving() as served:
        message = request("a cat", terms=[term("cat", "Katze")], max_new_tokens=3)
        message.options.target_prefix.text = "Katze "
        [hypothesis] = (await served.stub.Generate(message)).hypotheses
        assert not hypothesis.missing_terms
        message.options.target_prefix.text = "Hund"
        with pytest.raises(AioRpcError, match="takes 6 tokens, and at most 3 fit"):
            await served.stub.Generate(message)


async def test_a_model_that_forces_the_end_of_a_target_has_one_token_less_for_terms():
    async with serving(EchoRunner(generation=Generation(forced_eos_id=EOS))) as served:
        message = request("a cat", terms=[term("cat", "Katze")], max_new_tokens=7)
        [hypothesis] = (await served.stub.Generate(message)).hypotheses
        assert not hypothesis.missing_terms
        message.options.max_new_tokens = 6
        with pytest.raises(AioRpcError, match="takes 6 tokens, and at most 5 fit"):
            await served.stub.Generate(message)


async def test_a_short_text_is_read_beside_the_event_loop_if_it_may_have_long_terms(monkeypatch):
    threads, found = [], Glossary.required

    def find(*arguments):
        threads.append(threading.current_thread())
        return found(*arguments)

    monkeypatch.setattr(Glossary, "required", find)
    async with serving(EchoRunner(max_source_length=1000, max_target_length=1000)) as served:
        for number, length in ((1, 1), (500, 1), (500, 60)):
            terms = [term(f"word {place}", "Wort" * length) for place in range(number)]
            await served.stub.Generate(request("a text without any", terms=terms))
        for number in (3, 40):  # these took 4 ms of the event loop
            text = " ".join(f"%{place}" for place in range(1, number + 1))
            await served.stub.Generate(request(text, keep_placeholders=True))
    assert [each is threading.main_thread() for each in threads] == [True, True, False, True, False]


async def test_a_glossary_is_read_once_for_messages_with_equal_options(monkeypatch):
    """Each message read all of its terms anew, which took 3 ms a text for 1,000 of them."""
    read, init = [], Glossary.__init__

    def count(self, options, *others):
        read.append([each.target for each in options.terms])
        init(self, options, *others)

    monkeypatch.setattr(Glossary, "__init__", count)
    async with serving() as served:
        for text, target in (("a cat", "K"), ("cat", "K"), ("cat", "L"), ("a cat", "K")):
            answer = await served.stub.Generate(request(text, terms=[term("cat", target)]))
            assert target in answer.hypotheses[0].text
    assert read == [["K"], ["L"]]


async def test_a_message_with_many_terms_is_read_beside_the_event_loop(monkeypatch):
    """161 terms in 1,986 bytes took 6 ms of the loop."""
    threads, init = [], Glossary.__init__

    def read(*arguments):
        threads.append(threading.current_thread())
        init(*arguments)

    monkeypatch.setattr(Glossary, "__init__", read)
    async with serving() as served:
        for number in (5, 100):
            terms = [term(f"{place}", "x") for place in range(number)]
            await served.stub.Generate(request("a text without any", terms=terms))
    assert [each is threading.main_thread() for each in threads] == [True, False]


async def test_a_glossary_counts_as_held_until_its_request_has_the_answer(monkeypatch):
    """Only the bytes of a large message counted, and these were a small part of the glossary."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 50_000)
    terms = [term(f"w{number}", "x") for number in range(150)]
    async with serving() as served:
        served.runner.gate.clear()
        waiting = served.stub.Generate(request("a text", terms=terms))
        await served.turns.until(lambda: served.turns.num_submitted == 1)
        held = served.app.calls.held.held.total()
        assert 50_000 > held > 100 * len(terms)
        with pytest.raises(AioRpcError, match=f"large requests and answers of {held} bytes"):
            await served.stub.Generate(request("a text", terms=terms))
        served.runner.gate.set()
        assert (await waiting).hypotheses
        await served.until_calls_are_over()
        assert (await served.stub.Generate(request("a text", terms=terms))).hypotheses


async def test_the_terms_of_a_waiting_request_count_in_the_queue():
    async with serving(EchoRunner(max_source_length=1000, max_target_length=1000)) as served:
        text = " ".join(f"%{number}" for number in range(1, 50))
        for is_kept in (False, True):
            await served.stub.Generate(request(text, keep_placeholders=is_kept))
        plain, kept = served.turns.requests
        assert kept.terms.num_bytes > 49 * 512
        assert plain.queue_tokens == plain.memory_length
        assert kept.queue_tokens == max(kept.memory_length, kept.terms.num_bytes // 1024)


async def test_each_sentence_has_its_own_terms_and_a_stream_is_the_answer():
    text, terms = "A cat. A dog. A cow.", [term("cat", "Katze"), term("dog", "Hund")]
    message = request(text, terms=terms, long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
    async with serving() as served:
        answer = await served.stub.Generate(message)
        first, second, third = (sentence.hypotheses[0].text for sentence in answer.sentences)
        assert "Katze" in first
        assert "Hund" in second
        assert third == "A cow."
        assert answer.sentences[0].hypotheses[0].HasField("score")
        assert not answer.hypotheses[0].HasField("score")  # one of its sentences does not have any
        assert [one.terms is None for one in served.turns.requests] == [False, False, True]
        pieces = [event async for event in served.stub.GenerateStream(message)]
        assert "".join(event.piece.text for event in pieces) == answer.hypotheses[0].text


async def test_a_length_bound_leaves_room_for_the_terms():
    async with serving() as served:
        message = request("a b", terms=[term("b", "a long translation")], max_length_ratio=0.5)
        [hypothesis] = (await served.stub.Generate(message)).hypotheses
        assert "a long translation" in hypothesis.text


class Forbidding(EchoRunner):
    """Its model never writes a token that a term wants."""

    def step(self, rows, num_steps=1):
        selected = super().step(rows, num_steps)
        for table in selected.candidates:
            table.found[:] = -math.inf
        return selected


@pytest.mark.parametrize("is_split", [False, True])
async def test_an_answer_names_the_terms_that_its_target_lacks(is_split):
    terms = [term("cat", "K"), term("a", "a"), term("dog", "H")]
    how = pb.LONG_SOURCE_SPLIT_ALWAYS if is_split else pb.LONG_SOURCE_REFUSE
    async with serving(Forbidding()) as served:
        message = request("a cat.\na dog {x}.", terms=terms, max_new_tokens=12, long_source=how)
        [hypothesis] = (await served.stub.Generate(message)).hypotheses
        assert sorted(hypothesis.missing_terms) == ["H", "K"]


async def test_more_terms_than_can_be_required_are_refused_and_token_ids_too():
    terms = [term(f"w{number}", "b") for number in range(65)]
    async with serving(EchoRunner(max_source_length=1000, max_target_length=1000)) as served:
        text = " ".join(each.source for each in terms)
        await served.stub.Generate(request(text, terms=terms))  # they have one target
        for number, each in enumerate(terms):
            each.target = f"t{number}"
        with pytest.raises(AioRpcError, match="the source has 65 terms, and at most 64 can be required"):
            await served.stub.Generate(request(text, terms=terms))
        placed = " ".join(each.source for each in terms[:60])
        message = request(placed + " {a} {b} {c} {d} {e}", terms=terms, keep_placeholders=True)
        with pytest.raises(AioRpcError, match="the source has 65 terms and placeholders, and at most 64"):
            await served.stub.Generate(message)
        message.sources[0].text = f"{placed}.\n{' '.join(each.source for each in terms[1:])}"
        message.options.long_source = pb.LONG_SOURCE_SPLIT_ALWAYS  # each sentence for itself
        await served.stub.Generate(message)
        message = pb.GenerateRequest(sources=[pb.Source(token_ids=pb.TokenIds(values=[5]))])
        message.options.keep_placeholders = True
        with pytest.raises(AioRpcError, match="the source has token ids: send the text"):
            await served.stub.Generate(message)
