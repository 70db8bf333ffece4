"""Pairs for the proof of int8: sources, and the model's own targets for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from seq2seq_serve.bundle.manifest import Choice, Places
from seq2seq_serve.export.huggingface.model import ImportedModel
from seq2seq_serve.export.huggingface.tokenizers import ImportedTokenizers
from seq2seq_serve.training.data.sources import Numbers

_MAX_TARGET_LENGTH = 48
_BATCH_ROWS = 16

SENTENCES = (
    "In 2019 the company opened three new factories and hired about 1,200 people.",
    "summarize: The council met on Monday. It approved the new library, but not the car park.",
    "translate English to German: The house at the end of the street is for sale.",
    "Können Sie mir bitte sagen, wie ich zum Rathaus komme?",
    "Le rapport compte 40 pages et décrit les causes de l'accident.",
    "La reunión empezará a las nueve y durará unas dos horas.",
    "Il museo resta chiuso il lunedì, ma il parco è sempre aperto.",
    "O barco saiu do porto antes do nascer do sol.",
    "De fiets stond al weken tegen de muur van de kerk.",
    "Tåget från Göteborg är tjugo minuter försenat.",
    "Kissa nukkuu ikkunalaudalla koko iltapäivän.",
    "Stary młyn nad rzeką został w zeszłym roku odnowiony.",
    "Děti si hrály na dvoře, dokud nezačalo pršet.",
    "A könyvtár szombaton csak délig van nyitva.",
    "Pachetul a ajuns astăzi, cu o săptămână mai târziu.",
    "Toplantı saat üçte başlayacak ve yaklaşık bir saat sürecek.",
    "Chuyến tàu cuối cùng rời ga lúc mười một giờ đêm.",
    "Hujan turun sepanjang malam, jadi pasar buka lebih siang.",
    "Новая дорога соединит два города к концу 2026 года.",
    "Де можна купити квитки на вечірній потяг?",
    "Το μικρό καφενείο κοντά στο λιμάνι ανοίγει στις έξι το πρωί.",
    "وصل القطار إلى المحطة قبل موعده بعشر دقائق.",
    "הספר החדש שלה יצא לאור בתחילת הקיץ.",
    "यह पुल पिछले साल की बाढ़ में टूट गया था।",
    "আজ সকালে নদীর জল অনেক বেড়ে গেছে।",
    "இந்த ஊரில் ஒரு பழைய நூலகம் இருக்கிறது.",
    "รถไฟขบวนสุดท้ายออกจากสถานีตอนห้าทุ่ม",
    "请问最近的邮局在哪里？我想寄一个包裹。",
    "駅前の小さな店で、温かいうどんを食べました。",
    "할머니는 아침마다 마당에서 고양이에게 밥을 주신다.",
)


def frame_texts(
    texts: Sequence[str], tokenizers: ImportedTokenizers, max_source_length: int
) -> list[Numbers]:
    """The token ids of texts, each in its frame.

    A place for a language without a default takes one language after another.
    """
    frames, choices = tokenizers.frames, tokenizers.choices
    cut = max_source_length - len(frames.source_prefix) - len(frames.source_suffix)
    sources: list[Numbers] = []
    for row, text_ids in enumerate(tokenizers.source.encode_batch(texts)):
        prefix, suffix = (
            _fill(places, choices, row) for places in (frames.source_prefix, frames.source_suffix)
        )
        sources.append([*prefix, *text_ids[:cut], *suffix])
    return sources


def make_pairs(
    model: ImportedModel, tokenizers: ImportedTokenizers, eos_ids: Sequence[int], sources: Sequence[Numbers]
) -> list[tuple[Numbers, list[int]]]:
    """Each encoded source, and the target that greedy search finds, with its start tokens."""
    frames = tokenizers.frames
    places = (*frames.start, *frames.forced)
    starts = [_fill(places, tokenizers.choices, row) for row in range(len(sources))]
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    targets: list[list[int]] = [[] for _ in sources]
    num_rows = _BATCH_ROWS if model.config.media is None else 1
    for first in range(0, len(order), num_rows):
        rows = order[first : first + num_rows]
        found = _greedy(model, [sources[row] for row in rows], [starts[row] for row in rows], eos_ids)
        for row, target in zip(rows, found, strict=True):
            targets[row] = target
    return list(zip(sources, targets, strict=True))


def _fill(places: Places, choices: dict[str, Choice], row: int) -> list[int]:
    filled = []
    for place in places:
        if isinstance(place, str):
            choice = choices[place]
            names = list(choice.ids)
            filled.append(choice.ids[choice.default or names[row % len(names)]])
        else:
            filled.append(place)
    return filled


def _greedy(
    model: ImportedModel,
    sources: Sequence[Numbers],
    starts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
) -> list[list[int]]:
    """The start tokens and those of greedy search, eos included; all starts are equally long."""
    kind = model.source_kind
    targets = [list(start) for start in starts]
    longest = min(model.config.max_target_length, _MAX_TARGET_LENGTH)
    with torch.inference_mode():
        *source, mask = kind.tensors([kind.inputs(ids) for ids in sources])
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
