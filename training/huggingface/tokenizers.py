"""Tokenizers of Hugging Face checkpoints as files of the `tokenizers` library, and the frames of families.

A `tokenizer.json` is taken as it is: `transformers` rebuilds parts of it by class, and so may differ. Without
one, the files of the checkpoint are read (SentencePiece models, byte pairs). In both cases no text of a user
is cut into a special token, and the tokens around a text are in `TokenTemplate`, not in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from seq2seq_serve.bundle.charsmap import GUARD, HIDDEN
from seq2seq_serve.bundle.manifest import Choice, TemplateTokens, Timestamps, TokenTemplate
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK
from seq2seq_serve.bundle.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from seq2seq_serve.training.huggingface.checkpoint import read_json
from seq2seq_serve.training.huggingface.sentencepiece import PieceType, SentencePieceModel

ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")  # the file as it is
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "sentencepiece.bpe.model")  # of models of many languages
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS_OF_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_OF_PRETRAINING = re.compile(r"<(extra_id|mask|unk)_\d+>")
_SENTINEL = re.compile(r"\u2581?<extra_id_\d+>")
_TIME = re.compile(r"<\|\d+\.\d\d\|>")
_TIME_STEP_SECONDS = 0.02
_WHISPER_TASKS = ("transcribe", "translate")
_FEWEST_MULTILINGUAL = 51_865  # tokens; English models of Whisper have one token less
_MBART_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM "
    "ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MBART50_LANGUAGES = (
    f"{_MBART_LANGUAGES} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL "
    "ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_M2M100_LANGUAGES = {  # by `language_codes` of tokenizer_config.json
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha "
        "he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne "
        "nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo "
        "xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}


@dataclass(frozen=True)
class ImportedTokenizers:
    """The tokenizers of a checkpoint.

    Attributes:
        source: Cuts source texts.
        target: Turns targets into texts; the same object as `source` if both have one vocabulary.
        pad_id: Pads sources.
        template: The tokens around texts.
        choices: The languages and tasks that a request chooses.
        timestamps: The tokens of times; None without.
        own_marks: Special tokens that somebody added, such as one for a task. In a text they are text, so a
            request can only send their ids.
        num_tokens: The number of tokens of sources, or of targets if sources are not texts.
        source_language: The language of sources that the settings name; empty if they name none.
        target_language: The same of targets.
    """

    source: Tokenizer
    target: Tokenizer
    pad_id: int
    template: TokenTemplate
    choices: dict[str, Choice]
    timestamps: Timestamps | None = None
    own_marks: tuple[str, ...] = ()
    num_tokens: int = 0
    source_language: str = ""
    target_language: str = ""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files that describe a checkpoint's tokenizer.

    Attributes:
        settings: The content of `tokenizer_config.json` and `special_tokens_map.json`.
        config: The content of `config.json`.
    """

    folder: Path
    settings: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> TokenizerFiles:
        """Read the settings of a folder; files that it lacks have none."""
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                settings |= read_json(folder / name)
        return cls(folder, settings, config)

    @property
    def vocab_size(self) -> int:
        """The number of the model's token ids for sources."""
        return int(self.config["vocab_size"])

    def file(self, name: str) -> Path:
        """The path of a file; ValueError names one that is missing."""
        if not (self.folder / name).is_file():
            names = " and no ".join(dict.fromkeys((name, "tokenizer.json")))
            raise ValueError(
                f"{self.folder} has no {names}: copy the files of the tokenizer from the original model"
            )
        return self.folder / name

    def token(self, role: str, default: str) -> str:
        """The token of a role such as `eos_token`."""
        return _content(self.settings.get(role) or default)

    def special_tokens(self) -> list[str]:
        """The special tokens that the settings name."""
        added = self.settings.get("added_tokens_decoder") or {}
        special = [_content(added[key]) for key in sorted(added, key=int) if added[key].get("special")]
        return list(dict.fromkeys([*self._roles(), *self._listed(), *special]))

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that somebody added, by their ids, from where transformers reads them.

        They are matched in the text as it is given: files of before 2024 have no other way.
        """
        file, given = self.folder / "added_tokens.json", self.settings.get("added_tokens_decoder")
        if given:
            fields = {int(key): {"normalized": False, **value} for key, value in given.items()}
        else:
            special = {*self._roles(), *self._listed()}
            fields = {
                int(token_id): {"content": name, "special": name in special}
                for name, token_id in (read_json(file) if file.is_file() else {}).items()
            }
        return {
            token_id: tokenizers.AddedToken(
                value["content"],
                single_word=bool(value.get("single_word")),
                lstrip=bool(value.get("lstrip")),
                rstrip=bool(value.get("rstrip")),
                normalized=False,
                special=bool(value.get("special")),
            )
            for token_id, value in sorted(fields.items())
        }

    def own_marks(self, language: str) -> list[str]:
        """The special tokens that the settings list, without languages, roles, and those of pre-training."""
        known, roles = re.compile(language), self._roles()
        return [
            name
            for name in self._listed()
            if name not in roles and not known.fullmatch(name) and not _OF_PRETRAINING.fullmatch(name)
        ]

    def _roles(self) -> list[str]:
        return [_content(self.settings[role]) for role in _SPECIAL_ROLES if self.settings.get(role)]

    def _listed(self) -> list[str]:
        listed: list[Any] = []
        for name in _LISTS_OF_SPECIAL:
            values = self.settings.get(name) or []
            listed += values.values() if isinstance(values, dict) else values
        return list(dict.fromkeys(map(_content, listed)))


_Built = tokenizers.Tokenizer | tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]


@dataclass(frozen=True)
class TokenizerRecipe:
    """The tokenizer of a family.

    A frame names tokens by their roles ("bos", "eos") and languages by their choices.

    Attributes:
        classes: The classes of `tokenizer_config.json` that it stands for, without "Fast".
        build: Creates the tokenizer of a checkpoint without `tokenizer.json`, or those of both sides.
        language: A pattern for the tokens of languages, whose group is the language's name.
        prefix: The tokens before a source.
        suffix: The tokens after it.
        starts_with_language: Whether the decoder reads the target's language instead of a start token.
            Otherwise the language is the first token of a target.
        is_prompted: Whether the decoder reads Whisper's prompt before a target, and sources are sounds.
        has_own_frame: Whether each checkpoint has its own frame: `add_bos_token` and `add_eos_token` of its
            settings, and by default the one of `tokenizer.json`.
    """

    classes: tuple[str, ...]
    build: Callable[[TokenizerFiles], _Built]
    language: str = ""
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ("eos",)
    starts_with_language: bool = False
    is_prompted: bool = False
    has_own_frame: bool = False


def read_tokenizers(
    folder: Path, family: str, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> ImportedTokenizers:
    """Read the tokenizers of a checkpoint.

    Args:
        folder: The checkpoint.
        family: A name of `RECIPES`.
        config: The content of `config.json`.
        generation: The checkpoint's settings for `generate`.

    Raises:
        ValueError: A file is missing or damaged, the tokenizer's class is not supported, or the tokenizer
            does not fit the model's vocabulary.
    """
    recipe, checkpoint = RECIPES[family], TokenizerFiles.read(folder, config)
    name = str(checkpoint.settings.get("tokenizer_class") or ANY_CLASS[0]).removesuffix("Fast")
    if name not in (*recipe.classes, *ANY_CLASS):
        raise ValueError(
            f"{folder}: tokenizer_class is {name}; a model of the family {family} has "
            f"{' or '.join(recipe.classes)}"
        )
    has_file = (folder / "tokenizer.json").is_file()
    built = _of_file(checkpoint, recipe) if has_file else recipe.build(checkpoint)
    source, target = map(Tokenizer, built) if isinstance(built, tuple) else [Tokenizer(built)] * 2
    if recipe.is_prompted:
        read = _prompted(target, recipe, checkpoint, generation)
    else:
        read = _framed(source, target, recipe, checkpoint, generation)
    return replace(read, num_tokens=_num_tokens(built[0] if isinstance(built, tuple) else built))


def _num_tokens(inner: tokenizers.Tokenizer) -> int:
    """The number of a tokenizer's tokens, without pieces that the model's vocabulary lacks."""
    num_tokens = inner.get_vocab_size(with_added_tokens=True)
    if not isinstance(inner.model, models.Unigram):
        return num_tokens
    added = inner.get_added_tokens_decoder().values()
    return num_tokens - sum(token.special and not token.content.startswith(HIDDEN) for token in added)


def by_languages(checkpoint: TokenizerFiles, families: Collection[str]) -> list[str]:
    """Those of some families, names of `RECIPES`, whose languages the files of a tokenizer have.

    mBART's are among those of mBART-50, which is the only answer for a checkpoint with all of these. Without
    a `tokenizer.json`, the files need not name languages: those of mBART follow the pieces in a fixed order,
    and those of M2M100 follow `vocab.json`.
    """
    file, names = checkpoint.folder / "tokenizer.json", set(checkpoint.special_tokens())
    if file.is_file():
        names |= _tokens_of_file(file).keys()
    if "mbart" not in families:
        found = [name for name in families if any(re.fullmatch(RECIPES[name].language, one) for one in names)]
        return found or ["m2m100"] * (checkpoint.folder / "vocab.json").is_file()
    few, many = _MBART_LANGUAGES.split(), _MBART50_LANGUAGES.split()
    if names.isdisjoint(few) and not file.is_file():
        num_pieces = len(SentencePieceModel.read(checkpoint.file("sentencepiece.bpe.model")).pieces)
        names.update(many[: max(checkpoint.vocab_size - num_pieces - 2, 0)])  # without <unk> and <mask>
    return ["mbart50"] if names.issuperset(many) else ["mbart"] * names.issuperset(few)


def _framed(
    source: Tokenizer,
    target: Tokenizer,
    recipe: TokenizerRecipe,
    checkpoint: TokenizerFiles,
    generation: Mapping[str, Any],
) -> ImportedTokenizers:
    """Add the frames and choices of a family."""
    settings = checkpoint.settings
    languages = _languages(source, recipe.language)
    if not languages and SOURCE_LANGUAGE in (*recipe.prefix, *recipe.suffix):
        raise ValueError(
            f"{checkpoint.folder}: no token of the tokenizer is a language of its family, such as those that "
            f"fit {recipe.language}"
        )
    if len(languages) == 1 and not recipe.starts_with_language:
        languages = {}  # nothing to choose, and the texts of such models are used without it
    start, forced = generation.get("decoder_start_token_id"), generation.get("forced_bos_token_id")
    names: dict[int | None, str] = {token_id: name for name, token_id in languages.items()}
    prefix, suffix = recipe.prefix, recipe.suffix
    if recipe.has_own_frame:
        prefix, suffix = _own_frame(checkpoint)
    if settings.get("legacy_behaviour") and SOURCE_LANGUAGE in prefix:
        prefix, suffix = (), (*suffix, SOURCE_LANGUAGE)
    forced_places: TemplateTokens = () if forced is None else (int(forced),)
    first = generation.get("bos_token_id") if start is None else start
    start_places: TemplateTokens = () if first is None else (int(first),)
    default_target = _content(settings.get("tgt_lang") or "")
    if languages and TARGET_LANGUAGE not in prefix:
        if recipe.starts_with_language and (start is None or start in names):
            start_places, default_target = (TARGET_LANGUAGE,), names.get(start, default_target)
        elif not recipe.starts_with_language and (forced is None or forced in names):
            forced_places, default_target = (TARGET_LANGUAGE,), names.get(forced, default_target)
    if not start_places:
        raise ValueError(
            f"{checkpoint.folder}: the checkpoint has neither decoder_start_token_id nor bos_token_id"
        )
    template = TokenTemplate(
        start=start_places,
        forced=forced_places,
        source_prefix=_places(prefix, source, checkpoint, languages),
        source_suffix=_places(suffix, source, checkpoint, languages),
    )
    used = {place for places in vars(template).values() for place in places if isinstance(place, str)}
    defaults = {SOURCE_LANGUAGE: _content(settings.get("src_lang") or ""), TARGET_LANGUAGE: default_target}
    choices = {
        name: Choice(languages, default if default in languages else "")
        for name, default in defaults.items()
        if name in used
    }
    pad_id = generation.get("pad_token_id", checkpoint.config.get("pad_token_id"))
    if pad_id is None:
        pad_id = source.token_id(checkpoint.token("pad_token", "<pad>"))
    special = {*source.special_tokens.values()}
    own_marks = tuple(name for name in checkpoint.own_marks(recipe.language) if name in special)
    source_language, target_language = (
        str(settings.get(name) or "").casefold() for name in ("source_lang", "target_lang")
    )
    return ImportedTokenizers(
        source,
        target,
        int(pad_id),
        template,
        choices,
        own_marks=own_marks,
        source_language=source_language,
        target_language=target_language,
    )


def _prompted(
    tokenizer: Tokenizer, recipe: TokenizerRecipe, checkpoint: TokenizerFiles, generation: Mapping[str, Any]
) -> ImportedTokenizers:
    """Add Whisper's prompt: start, language and task of models of many languages, and "no timestamps".

    Without a language in the checkpoint's settings or in the request, the server detects it. The default task
    is to transcribe. Old checkpoints have both in `forced_decoder_ids`, which newer settings replace. Those
    that the model does not have are not taken.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # takes seconds

    start, pad_id = generation.get("decoder_start_token_id"), generation.get("pad_token_id")
    start = tokenizer.token_id("<|startoftranscript|>") if start is None else int(start)
    off_id = generation.get("no_timestamps_token_id")
    off_id = tokenizer.token_id("<|notimestamps|>") if off_id is None else int(off_id)
    given = generation.get("lang_to_id")
    is_multilingual = generation.get("is_multilingual", checkpoint.vocab_size >= _FEWEST_MULTILINGUAL)
    choices: dict[str, Choice] = {}
    if given or is_multilingual:
        languages = _languages(tokenizer, recipe.language)
        if given:
            languages = {name: languages[name] for name in languages if f"<|{name}|>" in given}
        tasks = {name: tokenizer.token_id(f"<|{name}|>") for name in _WHISPER_TASKS}
        language = str(generation.get("language") or "").strip("<|>").lower()
        language, task = TO_LANGUAGE_CODE.get(language, language), str(generation.get("task") or "")
        if not language and not task:
            sources = (generation, checkpoint.config)
            pairs = next(filter(None, (one.get("forced_decoder_ids") for one in sources)), ())
            known = pairs if isinstance(pairs, list) else []
            forced = [pair[1] for pair in known if isinstance(pair, list) and len(pair) == 2]
            language, task = _forced(languages, forced), _forced(tasks, forced)
        choices = {
            SOURCE_LANGUAGE: Choice(languages, language if language in languages else ""),
            TASK: Choice(tasks, task if task in tasks else _WHISPER_TASKS[0]),
        }
    # A step for each position of the encoder; tokens after them were added by somebody who tuned the model.
    num_steps = int(checkpoint.config.get("max_source_positions", 1500))
    max_first = generation.get("max_initial_timestamp_index")
    return ImportedTokenizers(
        source=tokenizer,
        target=tokenizer,
        pad_id=int(checkpoint.config.get("pad_token_id", 0) if pad_id is None else pad_id),
        template=TokenTemplate(start=(start, *choices, off_id)),
        choices=choices,
        timestamps=Timestamps(
            first_id=off_id + 1,
            last_id=min(
                off_id + 1 + num_steps, int(checkpoint.config.get("vocab_size", tokenizer.vocab_size)) - 1
            ),
            step_seconds=_TIME_STEP_SECONDS,
            off_id=off_id,
            max_first=max_first if isinstance(max_first, int) and max_first >= 0 else None,
        ),
    )


def _forced(names: Mapping[str, int], forced: Collection[int]) -> str:
    return next((name for name, token_id in names.items() if token_id in forced), "")


def _own_frame(checkpoint: TokenizerFiles) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The roles of the tokens that a checkpoint itself adds before and after a text."""
    inner = tokenizers.Tokenizer.from_file(str(checkpoint.file("tokenizer.json")))
    added = inner.encode("").tokens
    has = {
        role: checkpoint.settings.get(f"add_{role}_token", checkpoint.token(f"{role}_token", "") in added)
        for role in ("bos", "eos")
    }
    return ("bos",) * has["bos"], ("eos",) * has["eos"]


def _places(
    roles: Iterable[str], tokenizer: Tokenizer, checkpoint: TokenizerFiles, languages: Mapping[str, int]
) -> TemplateTokens:
    tokens = {"bos": checkpoint.token("bos_token", "<s>"), "eos": checkpoint.token("eos_token", "</s>")}
    return tuple(
        tokenizer.token_id(tokens[role]) if role in tokens else role
        for role in roles
        if role in tokens or languages
    )


def _languages(tokenizer: Tokenizer, pattern: str) -> dict[str, int]:
    """The languages among the special tokens, by the order of their ids."""
    if not pattern:
        return {}
    matches = ((re.fullmatch(pattern, name), token_id) for token_id, name in tokenizer.special_tokens.items())
    return {match[1]: token_id for match, token_id in sorted(matches, key=lambda pair: pair[1]) if match}


def _of_file(checkpoint: TokenizerFiles, recipe: TokenizerRecipe) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`, without its frame and special tokens beyond the vocabulary."""
    path, vocab_size = checkpoint.folder / "tokenizer.json", checkpoint.vocab_size
    described, ids = read_json(path), _tokens_of_file(path)
    model, added = described["model"], described["added_tokens"]
    is_unigram = isinstance(model["vocab"], list)
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path} has {len(ids)} tokens, and their ids have gaps")
    is_special = {token["content"] for token in added if token["special"]} | set(checkpoint.special_tokens())
    is_special |= {name for name in ids if _SENTINEL.fullmatch(name) or _TIME.fullmatch(name)}
    if recipe.language:
        is_special |= {name for name in ids if re.fullmatch(recipe.language, name)}
    too_high = [name for name, token_id in ids.items() if token_id >= vocab_size and name not in is_special]
    if too_high:
        raise ValueError(
            f"{path} has {len(too_high)} tokens beyond the model's vocabulary of {vocab_size}, such as "
            f"{too_high[0]!r}: the tokenizer is not that of the model"
        )
    known = {token["content"]: token for token in added}
    added = [
        known.get(name) or _ADDED | {"id": token_id, "content": name}
        for name, token_id in sorted(ids.items(), key=lambda item: item[1])
        if token_id < vocab_size and (name in known or name in is_special)
    ]
    for token in added:
        token["special"] = token["content"] in is_special
        if is_unigram and token["special"]:
            if token["id"] < len(model["vocab"]):
                model["vocab"][token["id"]][0] = HIDDEN + token["content"]
            token["content"] = HIDDEN + token["content"]
    if is_unigram:
        del model["vocab"][vocab_size:]
        steps = [json.loads(GUARD.__getstate__()), described.get("normalizer")]
        described["normalizer"] = {"type": "Sequence", "normalizers": list(filter(None, steps))}
    described |= {"added_tokens": added, "post_processor": None, "padding": None, "truncation": None}
    try:
        inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer file ({error})") from error
    for token in added:
        if inner.token_to_id(token["content"]) != token["id"]:
            raise ValueError(f"{path}: the ids of its added tokens have gaps, at {token['content']!r}")
    return inner


def _tokens_of_file(path: Path) -> dict[str, int]:
    """The ids of the tokens of a `tokenizer.json`."""
    described = read_json(path)
    try:
        vocab = described["model"]["vocab"]
        ids = {entry[0]: i for i, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        return ids | {token["content"]: token["id"] for token in described["added_tokens"]}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not a tokenizer file (it lacks {error})") from error


_ADDED: dict[str, Any] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a checkpoint without `tokenizer.json`, with those that somebody added.

    Attributes:
        ids: The id of each token, without a gap.
        special: The tokens that no text is cut into.
        matched: Added tokens that a text is searched for before it is cut.
    """

    ids: dict[str, int]
    special: set[str]
    matched: list[tokenizers.AddedToken]

    @classmethod
    def of(
        cls,
        checkpoint: TokenizerFiles,
        ids: Mapping[str, int],
        special: Iterable[str],
        vocab_size: int,
        *,
        has_added: bool = True,
    ) -> _Vocabulary:
        """Append the added tokens of a checkpoint, and leave out special tokens beyond the vocabulary.

        Raises:
            ValueError: Ids have gaps, two tokens have one id, or a token is beyond the vocabulary.
        """
        folder, all_special = checkpoint.folder, set(special)
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"{folder}: the vocabulary has {len(ids)} tokens, and their ids have gaps")
        all_ids, added = dict(ids), checkpoint.added_tokens() if has_added else {}
        for token_id, token in added.items():
            if token.special:
                all_special.add(token.content)
            if token.content not in all_ids and token_id < vocab_size:
                # M2M100 has such rows between its languages and added tokens.
                unused = {f"<unused_{i}>": i for i in range(len(all_ids), token_id)}
                all_special |= unused.keys()
                all_ids |= unused
            if all_ids.setdefault(token.content, max(token_id, len(all_ids))) != token_id:
                raise ValueError(
                    f"{folder}: the added token {token.content!r} has the id {token_id}, and the vocabulary "
                    f"has another token there, or this one elsewhere"
                )
        too_high = [name for name, token_id in all_ids.items() if token_id >= vocab_size]
        if wrong := [name for name in too_high if name not in all_special]:
            raise ValueError(
                f"{folder}: the tokenizer has {len(wrong)} tokens beyond the model's vocabulary of "
                f"{vocab_size}, such as {min(wrong)!r}: it is not that of the model"
            )
        kept = {name: token_id for name, token_id in all_ids.items() if token_id < vocab_size}
        matched = [token for token in added.values() if token.content in kept.keys() - all_special]
        return cls(kept, all_special & kept.keys(), matched)


def _marian(checkpoint: TokenizerFiles) -> _Built:
    """Pieces of one SentencePiece model a side, with the ids of `vocab.json`."""
    config, unk = checkpoint.config, checkpoint.token("unk_token", "<unk>")
    vocab = read_json(checkpoint.file("vocab.json"))
    target_vocab, target_size = vocab, checkpoint.vocab_size
    if checkpoint.settings.get("separate_vocabs"):
        target_vocab = read_json(checkpoint.file("target_vocab.json"))
        target_size = int(config.get("decoder_vocab_size") or target_size)

    def side(file: str, ids: Mapping[str, int], vocab_size: int, *, has_added: bool) -> tokenizers.Tokenizer:
        special = [unk, checkpoint.token("eos_token", "</s>"), checkpoint.token("pad_token", "<pad>")]
        special += [name for name in ids if re.fullmatch(RECIPES["marian"].language, name)]
        special = [name for name in special if name in ids]
        vocabulary = _Vocabulary.of(checkpoint, ids, special, vocab_size, has_added=has_added)
        return _of_pieces(checkpoint, file, vocabulary, unk)

    # The ids of added tokens are those of sources.
    return (
        side("source.spm", vocab, checkpoint.vocab_size, has_added=True),
        side("target.spm", target_vocab, target_size, has_added=target_vocab is vocab),
    )


def _of_pieces(
    checkpoint: TokenizerFiles, file: str, vocabulary: _Vocabulary, unk: str
) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece model whose pieces have the ids of a vocabulary."""
    if unk not in vocabulary.ids:
        raise ValueError(f"{checkpoint.folder}: the vocabulary has no token {unk!r} for unknown pieces")
    model = SentencePieceModel.read(checkpoint.file(file))
    special = {name: vocabulary.ids[name] for name in vocabulary.special}
    return model.tokenizer(vocabulary.ids, unk, special, vocabulary.matched)


def _m2m100(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    vocab = read_json(checkpoint.file("vocab.json"))
    codes = str(checkpoint.settings.get("language_codes") or "m2m100")
    if codes not in _M2M100_LANGUAGES:
        raise ValueError(
            f"{checkpoint.folder}: language_codes is {codes!r}, and must be one of m2m100, wmt21"
        )
    languages = [f"__{code}__" for code in _M2M100_LANGUAGES[codes].split()]
    vocab |= {name: len(vocab) + i for i, name in enumerate(languages)}
    special = [name for name in ("<s>", "<pad>", "</s>", "<unk>") if name in vocab] + languages
    vocabulary = _Vocabulary.of(checkpoint, vocab, special, checkpoint.vocab_size)
    return _of_pieces(checkpoint, "sentencepiece.bpe.model", vocabulary, "<unk>")


def _fairseq(languages: str | None) -> Callable[[TokenizerFiles], tokenizers.Tokenizer]:
    """The order of mBART and NLLB: four special tokens, pieces, languages, mask.

    Without a list (""), the languages are those among the special tokens; None if there are no languages.
    """

    def build(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
        file = "sentencepiece.bpe.model"
        model = SentencePieceModel.read(checkpoint.file(file))
        first = ["<s>", "<pad>", "</s>", "<unk>"]
        codes = (languages or "").split()
        if languages == "":
            pattern = RECIPES["nllb"].language
            codes = [name for name in checkpoint.special_tokens() if re.fullmatch(pattern, name)]
        if languages is not None and not codes:
            raise ValueError(f"{checkpoint.folder} has no tokenizer.json, and its settings name no languages")
        names = [*first, *(piece.text for piece in model.pieces[3:]), *codes, "<mask>"]
        vocabulary = _numbered(names, [*first, *codes, "<mask>"], checkpoint)
        return _of_pieces(checkpoint, file, vocabulary, "<unk>")

    return build


def _t5(num_sentinels: int) -> Callable[[TokenizerFiles], tokenizers.Tokenizer]:
    def build(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
        model = SentencePieceModel.read(checkpoint.file("spiece.model"))
        count = checkpoint.settings.get("extra_ids")
        listed = sum(bool(_SENTINEL.fullmatch(name)) for name in checkpoint.special_tokens())
        count = (listed or num_sentinels) if count is None else int(count)
        pieces = [piece.text for piece in model.pieces]
        names = pieces + [f"<extra_id_{i}>" for i in reversed(range(count))]
        control = (PieceType.CONTROL, PieceType.UNKNOWN)
        special = [piece.text for piece in model.pieces if piece.type in control]
        special += [name for name in names if _SENTINEL.fullmatch(name)]
        unk = checkpoint.token("unk_token", "<unk>")
        return _of_pieces(checkpoint, "spiece.model", _numbered(names, special, checkpoint), unk)

    return build


def _pegasus(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    model = SentencePieceModel.read(checkpoint.file("spiece.model"))
    offset = int(checkpoint.settings.get("offset", 103))
    roles = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "mask_token_sent": "<mask_1>",
        "mask_token": "<mask_2>",
    }
    first = [
        checkpoint.token(role, default) for role, default in roles.items() if offset or "mask" not in role
    ]
    first += [f"<unk_{i}>" for i in range(2, offset)]
    names = [*first, *(piece.text for piece in model.pieces[2:])]
    unk = checkpoint.token("unk_token", "<unk>")
    return _of_pieces(checkpoint, "spiece.model", _numbered(names, [*first, unk], checkpoint), unk)


def _byte_pairs(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    ids = read_json(checkpoint.file("vocab.json"))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *checkpoint.special_tokens()]
    names = [*ids, *(token.content for token in checkpoint.added_tokens().values())]
    special += [name for name in names if re.fullmatch(r"<\|.+\|>", name)]  # Whisper's
    lines = checkpoint.file("merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#version"))
    merges = [(left, right) for left, _, right in pairs]
    has_space = bool(
        checkpoint.settings.get("add_prefix_space", checkpoint.config.get("model_type") == "blenderbot")
    )
    return _of_bytes(
        _Vocabulary.of(checkpoint, ids, special, checkpoint.vocab_size),
        merges,
        pre_tokenizers.ByteLevel(add_prefix_space=has_space),
    )


def _of_bytes(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], pre_tokenizer: pre_tokenizers.ByteLevel
) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges))
    inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(vocabulary.matched)
    inner.add_special_tokens(sorted(vocabulary.special))
    return inner


def _trocr(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    """The tokenizer of RoBERTa, or of XLM-RoBERTa in small models."""
    has_pieces = (checkpoint.folder / "sentencepiece.bpe.model").is_file()
    return _fairseq(None)(checkpoint) if has_pieces else _byte_pairs(checkpoint)


def _no_pieces(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(checkpoint.file("tokenizer.json")))  # there is none


def _byt5(checkpoint: TokenizerFiles) -> tokenizers.Tokenizer:
    """Byte pairs without merges: the id of a byte is the byte + 3."""
    special = ["<pad>", "</s>", "<unk>"]
    ids = {name: i for i, name in enumerate(special)}
    ids |= {character: 3 + byte for character, byte in BYTE_OF_CHARACTER.items()}
    sentinels = [f"<extra_id_{i}>" for i in range(min(125, checkpoint.vocab_size - len(ids)))]
    ids |= {name: len(ids) + i for i, name in enumerate(sentinels)}
    vocabulary = _Vocabulary.of(checkpoint, ids, [*special, *sentinels], checkpoint.vocab_size)
    return _of_bytes(vocabulary, [], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def _numbered(names: Sequence[str], special: Iterable[str], checkpoint: TokenizerFiles) -> _Vocabulary:
    """The vocabulary of tokens in the order of their ids."""
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) != len(names):
        raise ValueError(f"{checkpoint.folder}: a token occurs twice in the vocabulary")
    return _Vocabulary.of(checkpoint, ids, special, checkpoint.vocab_size)


def _content(token: Any) -> str:
    """The text of a token that is a string, or an object with settings."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


_T5 = ("T5Tokenizer", "MT5Tokenizer")
_MBART = ("MBartTokenizer", "MBart50Tokenizer")
_GEMMA = ("GemmaTokenizer",)
_LANGUAGE_FIRST = (SOURCE_LANGUAGE,)
RECIPES = {
    "marian": TokenizerRecipe(("MarianTokenizer",), _marian, r">>(.+)<<", prefix=(TARGET_LANGUAGE,)),
    "pegasus": TokenizerRecipe(("PegasusTokenizer",), _pegasus),
    "bart": TokenizerRecipe(("BartTokenizer", "RobertaTokenizer"), _byte_pairs, prefix=("bos",)),
    "mbart": TokenizerRecipe(
        _MBART, _fairseq(_MBART_LANGUAGES), r"([a-z]{2}_[A-Z]{2})", (), ("eos", SOURCE_LANGUAGE), True
    ),
    "mbart50": TokenizerRecipe(_MBART, _fairseq(_MBART50_LANGUAGES), r"([a-z]{2}_[A-Z]{2})", _LANGUAGE_FIRST),
    "m2m100": TokenizerRecipe(("M2M100Tokenizer",), _m2m100, r"__([a-z]+)__", _LANGUAGE_FIRST),
    "nllb": TokenizerRecipe(("NllbTokenizer",), _fairseq(""), r"([a-z]{3}_[A-Z][a-z]{3})", _LANGUAGE_FIRST),
    "t5": TokenizerRecipe(_T5, _t5(100)),
    "mt5": TokenizerRecipe(_T5, _t5(0)),
    "byt5": TokenizerRecipe(("ByT5Tokenizer",), _byt5),
    "blenderbot": TokenizerRecipe(("BlenderbotTokenizer",), _byte_pairs),
    "whisper": TokenizerRecipe(
        ("WhisperTokenizer",), _byte_pairs, r"<\|([a-z]{2,3})\|>", suffix=(), is_prompted=True
    ),
    "trocr": TokenizerRecipe(("RobertaTokenizer", "XLMRobertaTokenizer", "BartTokenizer"), _trocr, suffix=()),
    "t5gemma": TokenizerRecipe(_GEMMA, _no_pieces, has_own_frame=True),
    "t5gemma2": TokenizerRecipe(_GEMMA, _no_pieces, has_own_frame=True),
}
