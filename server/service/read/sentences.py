"""Cuts a text into lines, and lines into sentences, in pieces of bounded length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

import sentencex

from seq2seq_serve.bundle.characters import INVISIBLE, WHITE_SPACE, is_blank
from seq2seq_serve.protos.languages import subtags

# With English abbreviations; the sentence terminators of all scripts end sentences.
DEFAULT_LANGUAGE = "en"

# ISO 639-1, and three-letter codes of languages for which the library has rules, or those of a relative.
_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee
el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is
it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms
mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk
sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi
yo za zh zu aae abs ace acm ady aeb aln alt ami anp apc arn arq ary arz ast atj avk awa azb ban bar bbc bcc
bci bdr bew bgn bjn blk bpy bqi btm bug bxr cdo cpx crh csb dsb dtp dty dua egl ext fit fon frc frp frr fur
gag gan gcf gcr gld glk gom gor gsw guc hak hif hke hrx hsb hsn hyw iba inh jut kaa kab kbd kbp kea kge khw
kiu kjh kjp koi krc krl ksh ksw kum lad lbe lez lij liv ljp lki lld lmo lrc ltg lua luz lzh lzz mad mag mai
mdf mhr min mnw mrj mui mwl myv mzn nah nan nap nds nia nrm nyo olo pcd pdc pdt pfl pms pnt pwn qug rgn rmy
rsk rue rup ruq rut sah scn sdc sdh ses sgs shi shy sjd skr sli sma smn srn sro stq sty szl szy tay tcy tet
trv ttj tyv udm vec vep vls vmf vmw vot vro wls wuu xal xmf yue zea
"""
_LANGUAGES = frozenset(_CODES.split())

# The library's time grows with the square of the text's length, and it does not release the global lock.
_WINDOW = 2048  # characters that the library gets at once
_KEPT = 1024  # characters at the end of a window that it gets again, if the sentence continues
_LOOKAHEAD = 64  # characters after a place that decide whether a sentence ends there

_CLOSING = "\"'”’»）」』】》〉〕］｝)"
# A mark of Chinese or Japanese ends a sentence without white space. At the end of a quotation, only white
# space or the next quotation shows that the sentence does not go on, as in 「はい。」と言った.
_END = re.compile(rf"[。．！？｡]([{re.escape(_CLOSING)}]*)$")
_OPENING = "“‘「『（【《〈〔［｛"
_MOST_MARKS = 8  # that are looked at before a place
# A capital letter and a full stop abbreviate a name or a title ("avec M. Dupont"). In English, such a letter
# ends a sentence after a word in lower case ("It is I.").
_INITIAL = re.compile(r"(?:^|[^\w.])([^\W\d_])\.$")
_ENGLISH_INITIAL = re.compile(r"(?:^|[^\w.])(?<![^\W\d_A-ZÀ-Þ] )([^\W\d_])\.$")
_LETTER = re.compile(r"[^\W\d_]")
_LONGEST_NUMBER = 24  # characters, and shorter than what is cut for its length
_HANGUL = re.compile("[\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f]")

# One sentence: nothing before its last character can end one. The library takes 12 microseconds of it.
_ONE_SENTENCE = re.compile(r"[\w ]*+.?")

_SPACES = {ord(character): " " for character in WHITE_SPACE}


def known_language(tag: str) -> str | None:
    """Returns the language of a tag such as "pt-BR" or "kor_Hang"; None if the splitter does not know it."""
    language = subtags(tag)[0]
    return language if language in _LANGUAGES else None


def lines(text: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text that are not blank, each with the text before the next of them."""
    line, between = "", ""
    for whole in text.splitlines(keepends=True):
        if is_blank(whole):
            between += whole
            continue
        content = whole.strip(WHITE_SPACE + INVISIBLE)
        start = whole.index(content)
        if line:
            yield line, between + whole[:start]
        line, between = content, whole[start + len(content) :]
    if line:
        yield line, ""


def sentences(
    line: str, language: str, before_window: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[str, str | None]]:
    """Yields the sentences of a line, each with the white space before the next; None if there is none.

    A sentence ends before white space, but not after an initial, or after a mark of Chinese or Japanese. A
    number such as "1." begins the sentence after it.
    Nothing follows the last one: "".

    Args:
        line: Begins and ends with a visible character.
        language: A result of `known_language`.
        before_window: Is called before each window with the length of the current sentence so far; an error
            that it raises ends the work.
    """
    if len(line) <= _WINDOW and _ONE_SENTENCE.fullmatch(line):
        before_window(0)
        yield line, ""
        return
    start = judged = seen_from = 0  # of the current sentence; end of the finished part; start of the window
    while True:
        before_window(seen_from - start)
        end = min(seen_from + _WINDOW, len(line))
        is_last = end == len(line)
        limit = end if is_last else end - _LOOKAHEAD
        for place in (seen_from + begin for begin in _beginnings(line[seen_from:end], language)):
            if (
                judged < place <= limit
                and _has_words(line[start:place])
                and _is_end(line, start, place, language)
            ):
                content = line[start:place].rstrip()
                yield content, line[start + len(content) : place] or None
                start = place
        if is_last:
            yield line[start:], ""
            return
        judged, seen_from = limit, max(start, end - _KEPT)


def space_after(target: str) -> str:
    """Returns what joins a target to the next one where nothing is between their sources.

    Targets in Chinese or Japanese follow each other without a space.
    """
    last = target.rstrip().rstrip(_CLOSING)[-1:] or "."
    return "" if unicodedata.east_asian_width(last) in "WF" and not _HANGUL.match(last) else " "


def _has_words(text: str) -> bool:
    """Returns whether a text is more than a number or a date, which a model would translate as a sentence."""
    return len(text) > _LONGEST_NUMBER or _LETTER.search(text) is not None


def _is_end(line: str, start: int, place: int, language: str) -> bool:
    """Returns whether the sentence from `start` on ends at a place where the library ends one."""
    before = line[max(start, place - _MOST_MARKS) : place]
    if before[-1].isspace():
        pattern = _ENGLISH_INITIAL if language == "en" else _INITIAL
        initial = pattern.search(line[start:place].rstrip()[-4:])
        return initial is None or not initial[1].isupper()
    mark = _END.search(before)
    return mark is not None and (not mark[1] or line[place] in _OPENING)


def _beginnings(window: str, language: str) -> Iterator[int]:
    """Yields the places where sentences begin."""
    # Same length; after a quotation the library fails at white space of more than one byte.
    window, end = window.translate(_SPACES), 0
    try:
        pieces = sentencex.segment(language, window)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a bug of the library; its class cannot be imported
            raise
        return
    for piece in pieces:
        if content := piece.strip():
            start = window.index(content, end)  # the library drops some white space between pieces
            yield start
            end = start + len(content)
