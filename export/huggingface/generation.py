"""The settings of `generate` in a checkpoint, as the manifest's defaults and rules of search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seq2seq_serve.bundle.manifest import Choice, EarlyStopping, Generation
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TASK
from seq2seq_serve.training.huggingface.checkpoint import SINGLE_IDS, CheckpointError, eos_ids, known_ids
from seq2seq_serve.training.huggingface.whisper import named_heads
from seq2seq_serve.training.models.options import PublishedConfig

_EARLY_STOPPING: dict[Any, EarlyStopping] = {None: False, **{one: one for one in (True, False, "never")}}
# What changes the output of `generate`, with its neutral value, and does not exist here
_NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "encoder_repetition_penalty": 1.0,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_decoder_ids": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "num_return_sequences": 1,
    "stop_strings": None,
    "max_time": None,
    "dola_layers": None,
}


def generation_of(
    settings: Mapping[str, Any], num_start: int, max_target_length: int, vocab_size: int
) -> Generation:
    """The manifest's form of the settings.

    Args:
        settings: `CheckpointFolder.generation`.
        num_start: The number of tokens that the decoder reads before a target; `max_length` counts them.
        max_target_length: The model's limit.
        vocab_size: The number of token ids of targets.

    Raises:
        CheckpointError: A setting has a value that `generate` would refuse.
    """
    set_ones = {name: value for name, value in settings.items() if value is not None}
    most = set_ones.get("max_new_tokens", set_ones.get("max_length", 0) - num_start)
    least = set_ones.get("min_new_tokens", max(set_ones.get("min_length", 0) - num_start, 0))
    early_stopping = set_ones.get("early_stopping")
    if early_stopping not in _EARLY_STOPPING:
        raise CheckpointError(f"early_stopping is {early_stopping!r}, and must be true, false or 'never'")
    ends = eos_ids(settings, vocab_size)
    # `generate` ignores an end of sequence among the bad words.
    banned = [ids for ids in set_ones.get("bad_words_ids", ()) if ids not in [[end] for end in ends]]
    needed = {name: [set_ones[name]] for name in SINGLE_IDS[:3] if name in set_ones}
    needed["bad_words_ids"] = [token_id for ids in banned for token_id in ids]
    for name, ids in needed.items():
        if unknown := [one for one in ids if not known_ids([one], vocab_size)]:
            raise CheckpointError(f"{name} has {unknown[0]}, and targets have {vocab_size} tokens")
    single = [ids[0] for ids in banned if len(ids) == 1]
    suppressed = {*known_ids(set_ones.get("suppress_tokens"), vocab_size), *single}
    return Generation(
        beam_size=set_ones.get("num_beams", 1),
        length_penalty=float(set_ones.get("length_penalty", 1.0)),
        length_penalty_formula="power",
        early_stopping=_EARLY_STOPPING[early_stopping],
        max_new_tokens=min(most, max_target_length) if most > 0 else None,
        min_new_tokens=least,
        repetition_penalty=float(set_ones.get("repetition_penalty", 1.0)),
        no_repeat_ngram_size=set_ones.get("no_repeat_ngram_size", 0),
        encoder_no_repeat_ngram_size=set_ones.get("encoder_no_repeat_ngram_size", 0),
        suppressed_token_ids=tuple(sorted(suppressed)),
        forbidden_sequences=tuple(tuple(ids) for ids in banned if len(ids) > 1),
        begin_suppressed_token_ids=known_ids(set_ones.get("begin_suppress_tokens"), vocab_size),
        forced_eos_id=set_ones.get("forced_eos_token_id"),
        is_renormalized=bool(set_ones.get("renormalize_logits", False)),
        penalizes_log_probabilities=True,
        repeats_start=True,
    )


def left_out(settings: Mapping[str, Any]) -> list[str]:
    """The settings of the checkpoint that change `generate` and are not taken over."""
    names = [name for name, neutral in _NEUTRAL.items() if settings.get(name, neutral) not in (neutral, None)]
    if "no_timestamps_token_id" in settings:  # Whisper's prompt, which is in the frames
        names = [name for name in names if name != "forced_decoder_ids"]
    return names


def unknown_parts(
    settings: Mapping[str, Any], config: PublishedConfig, choices: Mapping[str, Choice]
) -> Iterator[str]:
    """Yields a line for each optional setting that names what the model does not have, with what is used."""
    heads = config.alignment_heads
    known = [list(pair) for pair in heads]
    if heads and (unknown := [pair for pair in named_heads(settings) if pair not in known]):
        yield (
            f"alignment_heads has {str(unknown[0])[:40]}, which the model does not have: times of words come "
            f"from the heads {', '.join(map(str, known))}"
        )
    for name, choice in (("language", choices.get(SOURCE_LANGUAGE)), ("task", choices.get(TASK))):
        given = settings.get(name)
        if given and choice and (not choice.default if name == "language" else choice.default != given):
            used = choice.default or "detected"
            yield f"the settings' {name} {str(given)[:40]!r} is none of the model's: by default it is {used}"
