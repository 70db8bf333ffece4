"""Checks what the records of a manifest say of each other."""

from __future__ import annotations

from itertools import chain

from seq2seq_serve.bundle.manifest.schema import (
    LengthRule,
    Manifest,
    TemplateTokens,
    TensorSpec,
    TokenTemplate,
    Variant,
)
from seq2seq_serve.bundle.names import (
    ADAPTER_RANKS,
    CHOICES,
    SOURCE_LANGUAGE,
    Axis,
    Form,
    Role,
    Verb,
    buffer_of,
    lengths_of,
)

# The element type and the number of axes of each form of source, without the batch
_FORMS = {
    Form.TEXT: ("int64", 1),
    Form.SENTENCES: ("int64", 2),
    Form.PICTURE: ("uint8", 3),
    Form.CLIP: ("uint8", 4),
    Form.FEATURES: ("float32", 2),
    Form.SOUND: ("float32", 2),
}
_D_HEAD_MULTIPLE = 8  # GroupQueryAttention refuses others


def contradictions(manifest: Manifest) -> list[str]:
    """The problems of a manifest that neither a file nor a single field shows."""
    problems = []
    d_head = manifest.sizes.get("d_head", _D_HEAD_MULTIPLE)
    if d_head < 1 or d_head % _D_HEAD_MULTIPLE:
        problems.append(f"sizes.d_head is {d_head}, and must be a multiple of {_D_HEAD_MULTIPLE}")
    ids = manifest.special_ids
    if set(ids.eos_ids) <= set(manifest.generation.suppressed_token_ids):
        problems.append("generation.suppressed_token_ids has all eos_ids: no token would end a target")
    if ids.pad_id and Form.SENTENCES in manifest.sources.values():
        problems.append(f"special_ids.pad_id is {ids.pad_id}, and sentences are padded with 0: it must be 0")
    for name, (limit, places) in _id_fields(manifest).items():
        for place in places:
            if isinstance(place, str):
                if place not in manifest.choices:
                    problems.append(f"{name} has the place {place!r}, which is none of choices")
            elif not 0 <= place < limit:
                problems.append(f"{name} has the id {place}, outside the vocabulary of {limit}")
    for name, choice in manifest.choices.items():
        if not choice.ids or (choice.default and choice.default not in choice.ids):
            problems.append(f"choices.{name} has the default {choice.default!r}, and the names {choice.ids}")
        if name not in CHOICES:
            problems.append(f"choices has {name!r}, and a request may choose {', '.join(CHOICES)}")
    if Form.SOUND in manifest.sources.values() and len(manifest.sources) > 1:
        problems.append(f"sources are {', '.join(manifest.sources)}, and a sound must be the only source")
    if manifest.detects_language:
        problems += _detection_problems(manifest.template)
    times = manifest.timestamps
    if times is not None and times.off_id not in manifest.template.start[1:][-1:]:
        problems.append(f"timestamps.off_id is {times.off_id}, and must be the last of several frames.start")
    if times is not None and times.last_id < times.first_id:
        problems.append(f"timestamps.last_id is {times.last_id}, and must be at least {times.first_id}")
    if manifest.max_target_length < manifest.template.num_read_first:
        problems.append(
            f"max_target_length is {manifest.max_target_length}, and must be at least "
            f"{manifest.template.num_read_first}, the tokens of frames.start and frames.forced"
        )
    for precision, variant in manifest.variants.items():
        missing = [verb.value for verb in (Verb.ENCODE, Verb.STEP) if verb not in variant.graphs]
        if missing:
            problems.append(f"{precision} lacks the graphs {', '.join(missing)}")
        else:
            problems += [f"{precision}: {problem}" for problem in _graph_problems(manifest, variant)]
    return problems


def _detection_problems(template: TokenTemplate) -> list[str]:
    """The places in which a language would have to be detected, and cannot be."""
    problems = [
        f"frames.{name} has the place {SOURCE_LANGUAGE!r}, and the model detects a language only among "
        "frames.start: give the choice a default"
        for name in ("forced", "source_prefix", "source_suffix")
        if SOURCE_LANGUAGE in getattr(template, name)
    ]
    if SOURCE_LANGUAGE in template.start[:1] or template.start.count(SOURCE_LANGUAGE) > 1:
        problems.append(
            f"frames.start is {template.start}, and a language is detected once, after the first token: "
            "give the choice a default"
        )
    return problems


def _id_fields(manifest: Manifest) -> dict[str, tuple[int, TemplateTokens]]:
    """The vocabulary size and the ids of each field that has ids, by its name."""
    source, target = manifest.source_vocab_size or manifest.target_vocab_size, manifest.target_vocab_size
    template, generation = manifest.template, manifest.generation
    forced_eos = () if generation.forced_eos_id is None else (generation.forced_eos_id,)
    times = manifest.timestamps
    return {
        "special_ids.pad_id": (source, (manifest.special_ids.pad_id,)),
        "special_ids.eos_ids": (target, manifest.special_ids.eos_ids),
        "frames.start": (target, template.start),
        "frames.forced": (target, template.forced),
        "frames.source_prefix": (source, template.source_prefix),
        "frames.source_suffix": (source, template.source_suffix),
        "generation.suppressed_token_ids": (target, generation.suppressed_token_ids),
        "generation.forbidden_sequences": (target, tuple(chain(*generation.forbidden_sequences))),
        "generation.begin_suppressed_token_ids": (target, generation.begin_suppressed_token_ids),
        "generation.forced_eos_id": (target, forced_eos),
        "timestamps.first_id": (target, () if times is None else (times.first_id,)),
        "timestamps.last_id": (target, () if times is None else (times.last_id,)),
        **{
            f"choices.{name}": (max(source, target), tuple(choice.ids.values()))
            for name, choice in manifest.choices.items()
        },
    }


def _graph_problems(manifest: Manifest, variant: Variant) -> list[str]:
    """The contradictions between a variant's graphs and the rules of roles."""
    encode, step = variant.graphs[Verb.ENCODE], variant.graphs[Verb.STEP]
    problems = []
    sources = {spec.name: spec for spec in encode.inputs if spec.role is Role.SOURCE}
    for name in {
        lengths_of(axis) for spec in sources.values() for axis in spec.axes[1:] if isinstance(axis, str)
    }:
        sources.pop(name, None)
    if manifest.memory.source not in sources:
        problems.append(f"memory.source is {manifest.memory.source!r}, and encode reads {', '.join(sources)}")
    if sources.keys() != manifest.sources.keys():
        problems.append(f"sources are {', '.join(manifest.sources)}, and encode reads {', '.join(sources)}")
    for name in sources.keys() & manifest.sources.keys():
        form, spec = manifest.sources[name], sources[name]
        dtype, num_axes = _FORMS[form]
        if (spec.dtype, len(spec.axes) - 1) != (dtype, num_axes):
            problems.append(
                f"sources.{name} is {form}, which is {dtype} of {num_axes} axes, and encode reads "
                f"{spec.dtype} of {len(spec.axes) - 1}"
            )
        if form is Form.SOUND:
            problems += _sound_problems(name, spec, manifest.memory)
    lacks_decode = Verb.DECODE not in variant.graphs and not manifest.drafts_only
    num_start = len(manifest.template.start)
    if num_start > 1 and lacks_decode:
        problems.append(f"frames.start has {num_start} tokens, and must have one without a decode graph")
    state = {spec.name for spec in step.inputs if spec.role is Role.STATE}
    for verb, graph in ((Verb.ENCODE, encode), (Verb.STEP, step)):
        written = {buffer_of(spec.name) for spec in graph.outputs if spec.role is Role.STATE}
        if written != state:
            problems.append(f"{verb} writes the state {sorted(written)}, and step reads {sorted(state)}")
    has_cache = any(spec.role is Role.CACHE for spec in step.inputs)
    if has_cache and lacks_decode:
        problems.append("step has a cache, and there is no decode graph to fill it")
    num_parts = sum(len(each.parts) for each in manifest.adapted_maps)
    for verb, graph in variant.graphs.items():
        found = [spec.axes[-1] for spec in graph.inputs if spec.name == ADAPTER_RANKS]
        if found != ([num_parts] if num_parts else []):
            problems.append(f"{verb} reads ranks of {found} adapted parts, and adapted_maps has {num_parts}")
    if state and Verb.DECODE in variant.graphs:
        problems.append("step has state, which a decode graph cannot follow: leave decode out")
    return problems


def _sound_problems(name: str, spec: TensorSpec, rule: LengthRule) -> list[str]:
    """The contradictions between a sound's axes and the rule for its positions of memory."""
    _, num_bands, length = spec.axes
    # Windows are shorter than `constant` positions only where both say so.
    varies = None if rule.constant is None or rule.axis != 1 else Axis.SOUND_LENGTH
    if isinstance(num_bands, int) and (length == varies or (rule.axis is None and isinstance(length, int))):
        return []
    return [
        f"sources.{name} is a sound of {spec.axes[1:]}, and both axes need a fixed size; or the second is "
        f"{Axis.SOUND_LENGTH.value!r}, with memory.axis 1 and memory.constant"
    ]
