"""Translates texts, and segments of documents, that a request brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE
from seq2seq_serve.documents.segments import Document, kind_of, options_by_kind, software_text, with_tags
from seq2seq_serve.documents.terms import WholeTerms
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.libretranslate.fields import Fields
from seq2seq_serve.server.service.libretranslate.languages import Route
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.terms import Glossary
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding, with_patience

_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class TranslationUnit:
    """A text, or a segment of a document, that a model translates.

    Attributes:
        text: The text.
        end: Is called with its answer, on a thread.
        place: The number of the text of the request that it belongs to.
    """

    text: str
    end: Callable[[pb.GenerateResponse], None]
    place: int = 0


def jobs_of(
    document: Document, terms: WholeTerms, place: int = 0, *, is_software: bool = False
) -> list[TranslationUnit]:
    """Returns the jobs for the segments of a document, which may be one of a program; raises WrongFile."""
    jobs = list[TranslationUnit]()
    for segment in document.segments:
        text = software_text(segment.text, segment.with_tags) if is_software else segment.text
        jobs.append(TranslationUnit(text, partial(segment.translate, terms=terms), place))
    return jobs


async def run(
    jobs: Sequence[TranslationUnit],
    route: Route,
    call: RemoteCall,
    fields: Fields,
    *,
    refused: list[InvalidRequest] | None = None,
) -> None:
    """Translates texts, some of them at once. After the first ones, the others wait while the queue is full.

    Args:
        jobs: The texts.
        route: What translates them.
        call: The call that brought them.
        fields: Its fields.
        refused: Gets the errors of texts that the model refuses, which end the request otherwise.

    Raises:
        InvalidRequest: A text is refused; `row` is the place of the job's text.
        ServerError: The request fails.
    """
    async with call.calls.models.use(call, route.model) as model:
        options = _options(route, fields.num_alternatives, model)
        options.MergeFrom(fields.options)
        has_attention = model.sizing.num_hops > 0
        if not has_attention:
            jobs = [replace(job, text=with_tags(job.text)) for job in jobs]
        by_kind = options_by_kind(
            options, has_attention=has_attention, keeps_placeholders=fields.keeps_placeholders
        )
        glossaries = dict[bool, Glossary | None]()  # by whether placeholders are kept
        for kind, its in by_kind.items():
            if waiting := [job for job in jobs if kind_of(job.text) == kind]:
                known = glossaries.get(its.keep_placeholders)
                decoding = await read_decoding(its, model, call, glossary=known)
                glossaries[its.keep_placeholders] = decoding.glossary
                await _run_alike(waiting, decoding, call, refused)


async def _run_alike(
    waiting: list[TranslationUnit], decoding: Decoding, call: RemoteCall, refused: list[InvalidRequest] | None
) -> None:
    """Translates texts that are decoded in the same way, in their order."""
    num_at_once = _MOST_AT_ONCE
    while waiting:
        batch = waiting[:num_at_once]
        try:
            answers = await with_patience(call, partial(_generate, batch, decoding, call))
        except InvalidRequest as error:
            if error.row is None and len(batch) > 1:  # their sentences are more than the queue takes
                num_at_once = len(batch) // 2
                continue
            place = error.row or 0
            if refused is None:
                error.row = batch[place].place
                raise
            refused.append(error)
            del waiting[place]
            continue
        call.is_accepted = True
        del waiting[: len(batch)]
        await call.read(partial(_end, batch, answers), sum(len(job.text) for job in batch))


async def _generate(
    batch: Sequence[TranslationUnit], decoding: Decoding, call: RemoteCall
) -> list[pb.GenerateResponse]:
    items: list[Sequence[pb.Source]] = [[pb.Source(text=job.text)] for job in batch]
    return await generate(items, decoding, call)


def _end(batch: Sequence[TranslationUnit], answers: Sequence[pb.GenerateResponse], _: YieldPoint) -> None:
    for job, answer in zip(batch, answers, strict=True):
        job.end(answer)


def _options(route: Route, num_alternatives: int, model: ServedModel) -> pb.GenerateOptions:
    """Returns the options of a route, with as many hypotheses as the model has, up to the wanted number."""
    options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
    for name, language in ((SOURCE_LANGUAGE, route.source), (TARGET_LANGUAGE, route.target)):
        if name in model.manifest.choices:
            setattr(options, name, language)
    if num_alternatives:
        beam_size, most = model.manifest.generation.beam_size, model.sizing.num_slots
        options.num_hypotheses = min(num_alternatives + 1, most, model.sizing.vocab_size)
        if beam_size > 1:
            options.beam_size = min(max(beam_size, options.num_hypotheses), most)
    return options


def alternatives(answer: pb.GenerateResponse) -> list[str]:
    """Returns the further translations of a text.

    Of a text with several sentences, one is the joined further translations of each sentence; a sentence that
    has fewer of them repeats its last one.
    """
    best = answer.hypotheses[0].text
    sentences = [[one.text for one in sentence.hypotheses] for sentence in answer.sentences or [answer]]
    separators, end = list[str](), 0  # what stands before each sentence
    for texts in sentences:
        begin = best.index(texts[0], end)
        separators.append(best[end:begin])
        end = begin + len(texts[0])
    others = [
        "".join(
            separator + texts[min(number, len(texts) - 1)]
            for separator, texts in zip(separators, sentences, strict=True)
        )
        for number in range(1, max(map(len, sentences)))
    ]
    return [text for text in dict.fromkeys(map(str.strip, others)) if text and text != best.strip()]
