"""Pairs for the proof of a precision: sources, and the model's own targets for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seq2seq_serve.bundle.manifest import Choice, TemplateTokens
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE
from seq2seq_serve.training.data.sources import Inputs, Numbers
from seq2seq_serve.training.huggingface.tokenizers import ImportedTokenizers
from seq2seq_serve.training.models.transformer import Transformer

_MAX_TARGET_LENGTH = 48
_BATCH_ROWS = 16
_NUM_TEXTS = 12

_TEXTS = (  # with the codes of their languages, ISO 639-1 and 639-3
    ("en eng", "In 2019 the company opened three new factories and hired about 1,200 people."),
    ("en eng", "summarize: The council met on Monday. It approved the new library, but not the car park."),
    ("en eng", "translate English to German: The house at the end of the street is for sale."),
    ("de deu", "Können Sie mir bitte sagen, wie ich zum Rathaus komme?"),
    ("fr fra", "Le rapport compte 40 pages et décrit les causes de l'accident."),
    ("es spa", "La reunión empezará a las nueve y durará unas dos horas."),
    ("it ita", "Il museo resta chiuso il lunedì, ma il parco è sempre aperto."),
    ("pt por", "O barco saiu do porto antes do nascer do sol."),
    ("nl nld", "De fiets stond al weken tegen de muur van de kerk."),
    ("sv swe", "Tåget från Göteborg är tjugo minuter försenat."),
    ("fi fin", "Kissa nukkuu ikkunalaudalla koko iltapäivän."),
    ("pl pol", "Stary młyn nad rzeką został w zeszłym roku odnowiony."),
    ("cs ces", "Děti si hrály na dvoře, dokud nezačalo pršet."),
    ("hu hun", "A könyvtár szombaton csak délig van nyitva."),
    ("ro ron", "Pachetul a ajuns astăzi, cu o săptămână mai târziu."),
    ("tr tur", "Toplantı saat üçte başlayacak ve yaklaşık bir saat sürecek."),
    ("vi vie", "Chuyến tàu cuối cùng rời ga lúc mười một giờ đêm."),
    ("id ind", "Hujan turun sepanjang malam, jadi pasar buka lebih siang."),
    ("ru rus", "Новая дорога соединит два города к концу 2026 года."),
    ("uk ukr", "Де можна купити квитки на вечірній потяг?"),
    ("el ell", "Το μικρό καφενείο κοντά στο λιμάνι ανοίγει στις έξι το πρωί."),
    ("ar arb", "وصل القطار إلى المحطة قبل موعده بعشر دقائق."),
    ("he heb", "הספר החדש שלה יצא לאור בתחילת הקיץ."),
    ("hi hin", "यह पुल पिछले साल की बाढ़ में टूट गया था।"),
    ("bn ben", "আজ সকালে নদীর জল অনেক বেড়ে গেছে।"),
    ("ta tam", "இந்த ஊரில் ஒரு பழைய நூலகம் இருக்கிறது."),
    ("th tha", "รถไฟขบวนสุดท้ายออกจากสถานีตอนห้าทุ่ม"),
    ("zh zho", "请问最近的邮局在哪里？我想寄一个包裹。"),
    ("ja jpn", "駅前の小さな店で、温かいうどんを食べました。"),
    ("ko kor", "할머니는 아침마다 마당에서 고양이에게 밥을 주신다."),
)
SENTENCES = tuple(text for _, text in _TEXTS)


def sample_texts(tokenizers: ImportedTokenizers, max_source_length: int) -> list[Numbers]:
    """The token ids of texts as the model reads them: in its own languages, each in its frame.

    The first ones are in the source language that the checkpoint names. Then come those with the fewest
    unknown pieces, and of these the ones that are cut into the fewest tokens for their length: a tokenizer
    cuts those languages best that it was trained on. With languages to choose, each text has its own.
    """
    template, choices = tokenizers.template, tokenizers.choices
    cut = max_source_length - len(template.source_prefix) - len(template.source_suffix)
    languages = {
        name.casefold().split("_")[0]: name for name in getattr(choices.get(SOURCE_LANGUAGE), "ids", {})
    }
    ranked = []
    for (codes, text), text_ids in zip(_TEXTS, tokenizers.source.encode_batch(SENTENCES), strict=True):
        language = next((languages[code] for code in codes.split() if code in languages), "")
        if languages and not language:
            continue
        num_unknown = sum(token_id in tokenizers.source.special_tokens for token_id in text_ids)
        is_own = tokenizers.source_language in codes.split()
        ranked.append(((not is_own, num_unknown, len(text_ids) / len(text)), language, text_ids))
    chosen = sorted(ranked, key=lambda one: one[0])[:_NUM_TEXTS]
    sources: list[Numbers] = []
    for row, (_, language, text_ids) in enumerate(chosen):
        prefix, suffix = (
            _fill(places, choices, row, language)
            for places in (template.source_prefix, template.source_suffix)
        )
        sources.append([*prefix, *text_ids[:cut], *suffix])
    return sources


def make_pairs(
    model: Transformer, tokenizers: ImportedTokenizers, eos_ids: Sequence[int], sources: Sequence[Inputs]
) -> list[tuple[Inputs, list[int]]]:
    """Each source, and the target that greedy search finds, with its start tokens."""
    template = tokenizers.template
    places = (*template.start, *template.forced)
    starts = [_fill(places, tokenizers.choices, row) for row in range(len(sources))]
    order = sorted(range(len(sources)), key=lambda row: model.source_kind.memory_length(sources[row]))
    targets: list[list[int]] = [[] for _ in sources]
    num_rows = _BATCH_ROWS if model.architecture.media is None else 1
    for first in range(0, len(order), num_rows):
        rows = order[first : first + num_rows]
        found = _greedy(model, [sources[row] for row in rows], [starts[row] for row in rows], eos_ids)
        for row, target in zip(rows, found, strict=True):
            targets[row] = target
    return list(zip(sources, targets, strict=True))


def largest_channel(model: Transformer, sources: Sequence[Inputs]) -> float:
    """How many times as large as the median channel the largest one of the encoder's output is.

    Sizes are root mean squares over all positions of the sources.
    """
    squares: list[Tensor] = []
    reader = next(iter(model.decoder_layers)).memory_attention.key
    hook = reader.register_forward_pre_hook(lambda _, given: squares.append(given[0][0].square()))
    try:
        with torch.inference_mode():
            for source in sources:
                model.encode(*model.source_kind.tensors([source]))
    finally:
        hook.remove()
    sizes = torch.cat(squares).mean(dim=0).sqrt()  # (D,)
    return float(sizes.max() / sizes.median())


def _fill(
    places: TemplateTokens, choices: dict[str, Choice], row: int, source_language: str = ""
) -> list[int]:
    """The ids of places; one for a language without a default takes one language after another."""
    filled = []
    for place in places:
        if isinstance(place, str):
            choice = choices[place]
            names = list(choice.ids)
            given = source_language if place == SOURCE_LANGUAGE else ""
            filled.append(choice.ids[given or choice.default or names[row % len(names)]])
        else:
            filled.append(place)
    return filled


def _greedy(
    model: Transformer,
    sources: Sequence[Inputs],
    starts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
) -> list[list[int]]:
    """The start tokens and those of greedy search, eos included; all starts are equally long."""
    targets = [list(start) for start in starts]
    longest = min(model.config.max_target_length, _MAX_TARGET_LENGTH)
    with torch.inference_mode():
        *source, mask = model.source_kind.tensors(sources)
        memory = model.encode(*source, mask)
        state = model.start(memory, mask)
        for position in range(longest):
            states, state = model.step(torch.tensor([ids[position] for ids in targets]), state, memory, mask)
            if position + 1 < len(starts[0]):
                continue
            for target, token_id in zip(targets, model.project(states).argmax(dim=1).tolist(), strict=True):
                target.append(token_id)
    return [_until_eos(target, len(start), eos_ids) for target, start in zip(targets, starts, strict=True)]


def _until_eos(target: list[int], num_start: int, eos_ids: Sequence[int]) -> list[int]:
    ends = (place for place, token_id in enumerate(target) if place >= num_start and token_id in eos_ids)
    return target[: next(ends, len(target)) + 1]
