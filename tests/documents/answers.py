"""Translates documents in tests without a model: each answer is aligned with its text."""

import re
from collections.abc import Callable
from pathlib import Path

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.terms import NO_TERMS, WholeTerms
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateResponse,
    Hypothesis,
    Sentence,
    WordAlignment,
    WordLink,
)


def backwards(text: str) -> GenerateResponse:
    """The words in capitals and the other way round, each aligned with its source word."""
    words = text.split()
    links = [WordLink(source_word=len(words) - 1 - place, target_word=place) for place in range(len(words))]
    targets = [word.upper() for word in reversed(words)]
    alignment = WordAlignment(source_words=words, target_words=targets, links=links)
    return GenerateResponse(hypotheses=[Hypothesis(text=" ".join(targets), word_alignment=alignment)])


def capitals(text: str) -> GenerateResponse:
    """The same words in capitals, sentence by sentence as a text that was split."""
    sentences = []
    for sentence in re.split(r"(?<=[.,!?]) ", text):
        words = sentence.split()
        links = [WordLink(source_word=place, target_word=place) for place in range(len(words))]
        alignment = WordAlignment(source_words=words, target_words=[w.upper() for w in words], links=links)
        one = Hypothesis(text=sentence.upper(), word_alignment=alignment)
        sentences.append(Sentence(source_text=sentence, hypotheses=[one]))
    return GenerateResponse(hypotheses=[Hypothesis(text=text.upper())], sentences=sentences)


def translated(
    name: str, content: str | bytes, translate, terms: WholeTerms = NO_TERMS
) -> tuple[list[str], str | bytes]:
    """The texts of a document, and its content after their translation."""
    is_text = isinstance(content, str)
    path = Path(name)
    document = FILES[path.suffix](content.encode() if is_text else content, path)
    texts = [segment.text for segment in document.segments]
    for segment in document.segments:
        segment.translate(translate(segment.text), terms)
    written = document.content()
    return texts, written.decode() if is_text else written


def aligned(target: str, links: str = "", sources: str = "") -> Callable[[str], GenerateResponse]:
    """A translation, and for each of its words the number of the source word that it belongs to.

    Its words and those of the source are the given ones, or those between white space.
    """

    def translate(text: str) -> GenerateResponse:
        places = map(int, links.split())
        targets, words = target.replace("|", "").split(), (sources or text).replace("|", " ").split()
        if "|" in target:
            targets = target.replace("|", " ").split()
        alignment = WordAlignment(
            source_words=words,
            target_words=targets,
            links=[WordLink(source_word=place, target_word=number) for number, place in enumerate(places)],
        )
        one = Hypothesis(text=target.replace("|", ""), word_alignment=alignment if links else None)
        return GenerateResponse(hypotheses=[one])

    return translate
