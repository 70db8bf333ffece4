"""The ids, texts and frames of imported tokenizers against the libraries that checkpoints are used with.

The oracle is the tokenizer of `transformers` before it is saved. Where a folder has SentencePiece models
only, sentencepiece itself is the oracle: `transformers` would read them by the `tokenizers` library, which
leaves decomposed Hangul as it is and drops accents.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers

from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.service.read.options import Decoding, with_mark
from seq2seq_serve.training.huggingface.tokenizers import (
    RECIPES,
    ImportedTokenizers,
    TokenizerFiles,
    read_tokenizers,
)
from tests.export.huggingface.checkpoints import edit
from tests.export.huggingface.tokenizer_files import (
    CONTROL_TEXTS,
    FAMILIES,
    HARD_TEXTS,
    Files,
    m2m100,
    marian,
    mbart,
    nllb,
    only_pieces,
    sentences,
    t5,
    t5gemma,
    whisper,
)

FEW, MANY = 300, 10_000
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
BY_PIECES = ("t5", "pegasus", "mbart", "mbart50", "nllb", "trocr-small")


def imported(files: Files) -> ImportedTokenizers:
    return read_tokenizers(files.folder, files.family, files.config, files.generation)


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory) -> Files:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(files) -> ImportedTokenizers:
    return imported(files)


def texts(count: int) -> list[str]:
    # NUL ends a text for some versions of sentencepiece.
    return [text for text in (*sentences(count, 99), *HARD_TEXTS) if "\0" not in text]


def assert_same(
    tokenizer: Tokenizer, expected: Callable[[str], Sequence[int]], count: int, ties: float
) -> None:
    """The ids are equal; at most `ties` of the texts may have the same ids in another order.

    Two orders of the same pieces have the same probability. sentencepiece adds in 32 bits from the text's
    beginning, so that its choice among them depends on all that is before.
    """
    given = texts(count)
    differ = [
        (text, ids, list(expected(text)))
        for text, ids in zip(given, tokenizer.encode_batch(given), strict=True)
        if ids != list(expected(text))
    ]
    assert [case for case in differ if sorted(case[1]) != sorted(case[2])] == []
    assert len(differ) <= ties * len(given), differ


@pytest.mark.parametrize("count", COUNTS)
def test_ids_are_those_of_transformers(files, ours, count):
    ties = 0.005 if files.family == "marian" else 0
    assert_same(ours.source, lambda text: files.theirs(text, add_special_tokens=False).input_ids, count, ties)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", BY_PIECES)
def test_ids_of_pieces_alone_are_those_of_sentencepiece(family, count, tmp_path):
    files = only_pieces(tmp_path, family)
    (model,) = tmp_path.glob("*.model")
    theirs, vocab = sentencepiece.SentencePieceProcessor(model_file=str(model)), files.theirs.get_vocab()
    tokenizer = imported(files).source
    assert_same(
        tokenizer,
        lambda text: [vocab.get(piece, vocab["<unk>"]) for piece in theirs.encode(text, out_type=str)],
        count,
        ties=0.005,
    )


ADDED = ["<sep>", "김치찌개", "①<SEP>"]  # SentencePiece would change the last one
FORMS = "added_tokens_decoder", "added_tokens.json"
SLOW = ("marian", "m2m100", "byt5", "bart", "blenderbot", *BY_PIECES[:-1])


def with_added(folder, family: str, form: str) -> Files:
    """A folder without `tokenizer.json` whose tokenizer somebody added tokens to, the last one special."""
    files = only_pieces(folder, family) if family in BY_PIECES else FAMILIES[family](folder)
    if family in ("bart", "blenderbot"):
        without_tokenizer_json(files, has_times=False)
    first = imported(files).num_tokens
    ids = {name: first + place for place, name in enumerate([*ADDED, "<task>"])}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if form == "added_tokens.json":
        kept = folder / "added_tokens.json"
        before = json.loads(kept.read_text()) if kept.is_file() else {}
        kept.write_text(json.dumps(before | ids))
        listed = [*settings.pop("additional_special_tokens", []), *settings.get("extra_special_tokens", [])]
        settings = settings | {"extra_special_tokens": [*dict.fromkeys(listed), "<task>"]}
        settings.pop("added_tokens_decoder", None)
    else:
        settings["added_tokens_decoder"] = settings.get("added_tokens_decoder", {}) | {
            str(token_id): {"content": name, "special": name == "<task>"} for name, token_id in ids.items()
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = {"vocab_size": first + len(ids), "decoder_vocab_size": first + len(ids)}
    return replace(files, config=files.config | size)


def piecewise(files: Files) -> Callable[[str], list[int]]:
    """As classes of `transformers` 4 do it: sentencepiece cuts what is between added tokens."""
    (file,) = files.folder.glob("*.model")
    model, vocab = sentencepiece.SentencePieceProcessor(model_file=str(file)), files.theirs.get_vocab()
    first = files.config["vocab_size"] - len(ADDED) - 1
    parts = re.compile("|".join(f"({re.escape(name)})" for name in ADDED))

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in filter(None, parts.split(text)):
            if part in ADDED:
                ids.append(first + ADDED.index(part))
            else:
                ids += [vocab.get(piece, vocab["<unk>"]) for piece in model.encode(part, out_type=str)]
        return ids

    return encode


# slow: the others have pieces of one of these kinds, which the tests above compare
QUICK = (("marian", FORMS[1]), ("t5", FORMS[0]), ("bart", FORMS[0]))
OTHERS = (case for case in product(SLOW, FORMS) if case not in QUICK)


@pytest.mark.parametrize(
    ("family", "form"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_tokens_that_somebody_added_are_read_without_a_tokenizer_json(family, form, tmp_path):
    files = with_added(tmp_path, family, form)
    ours, first = imported(files), files.config["vocab_size"] - len(ADDED) - 1
    assert ours.num_tokens == files.config["vocab_size"]
    if family in BY_PIECES:
        expected = piecewise(files)
    else:
        theirs = type(files.theirs).from_pretrained(tmp_path)
        expected = lambda text: theirs(text, add_special_tokens=False).input_ids  # noqa: E731
    given = ["a <sep> 김치찌개 b", "<sep>a<sep>b", " <sep>", "김치찌개<sep>①<SEP>", "x ①<SEP>y", "<SEP> 김치"]
    for text in [*given, *texts(30)]:
        assert ours.source.encode(text) == list(expected(text)), text
    assert ours.target.encode("<sep>김치찌개①<SEP>") == [first, first + 1, first + 2]
    assert ours.target.decode(range(first, first + 4)) == "<sep>김치찌개①<SEP>"
    assert ours.target.pieces([first + 3]) == ["<task>"]
    assert first + 3 not in ours.source.encode("a <task> b")
    loaded = Tokenizer.from_bytes(ours.source.to_json().encode(), "")
    assert loaded.encode_batch(given) == ours.source.encode_batch(given)


def test_added_tokens_with_the_ids_of_others_are_refused(tmp_path):
    files = with_added(tmp_path, "t5", "added_tokens.json")
    for wrong in ({"<sep>": 5}, {"</s>": 1900}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"the added token '.*' has the id \d+, and the vocabulary has"):
            imported(files)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": 10**9}))
    with pytest.raises(ValueError, match=r"1 tokens beyond the model's vocabulary of \d+, such as '<sep>'"):
        imported(files)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("separate", [False, True])
def test_a_marian_target_has_its_own_pieces(count, separate, tmp_path):
    files = marian(tmp_path, separate=separate)
    target = imported(files).target
    assert_same(
        target,
        lambda text: files.theirs(text_target=text, add_special_tokens=False).input_ids,
        count,
        ties=0.005,
    )


def test_marian_knows_pieces_that_only_the_target_can_cut(tmp_path):
    files = marian(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    # A run of characters that the source's model does not know is one piece, and vocab.json may have it.
    surface = next(
        piece for piece in vocab if len(piece) == 1 and source.piece_to_id(piece) == source.unk_id()
    )
    assert vocab[surface] in imported(files).source.encode(f"a {surface} b")


@pytest.mark.parametrize("count", COUNTS)
def test_texts_of_ids_are_those_of_transformers(files, ours, count):
    for text in texts(count):
        ids = ours.target.encode(text)
        theirs = files.theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        decoded = ours.target.decode(ids)
        # Marian's and M2M100's classes strip the text; the other ones keep a space at its end.
        assert (decoded.strip() if files.family in ("marian", "m2m100") else decoded) == theirs
        stream = ours.target.stream()
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.finish()]) == decoded
        assert "".join(ours.target.pieces(ids)).replace("<unk>", "") == stream_text(ours.target, ids)


def stream_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    unk = {token_id for token_id, name in tokenizer.special_tokens.items() if name == "<unk>"}
    return tokenizer.decode([token_id for token_id in ids if token_id not in unk])


def test_a_file_that_is_saved_and_loaded_is_the_same(files, ours, tmp_path):
    for tokenizer in (ours.source, ours.target):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = Tokenizer.load(tmp_path / "tokenizer.json")
        given = [*sentences(100, 5), *HARD_TEXTS, *CONTROL_TEXTS]
        assert loaded.encode_batch(given) == tokenizer.encode_batch(given)
        assert loaded.token_bytes == tokenizer.token_bytes
        assert loaded.special_tokens == tokenizer.special_tokens


def test_control_tokens_that_a_user_types_are_text(files, ours):
    for tokenizer in (ours.source, ours.target):
        unk = tokenizer.token_id("<unk>")
        special = tokenizer.special_tokens.keys() - {unk}
        for text in CONTROL_TEXTS:
            ids = tokenizer.encode(text)
            assert not special & set(ids), text
            assert ids != [unk]
            if unk not in ids:
                assert tokenizer.decode(ids).strip() == text


def test_special_tokens_keep_their_names_and_have_no_text(files, ours):
    eos = ours.source.token_id(files.theirs.eos_token)
    assert eos == files.theirs.eos_token_id
    assert ours.source.piece(eos) == files.theirs.eos_token
    assert ours.source.decode([eos, *ours.source.encode("ab"), eos]).strip() == "ab"


def test_an_id_without_a_token_has_no_text(files, ours):
    assert ours.target.decode([files.config["vocab_size"] + 100]) == ""


def framed(ours: ImportedTokenizers, text: str, **chosen: str) -> list[int]:
    def ids(places) -> list[int]:
        return [
            ours.choices[place].ids[chosen[place]] if isinstance(place, str) else place for place in places
        ]

    return [*ids(ours.template.source_prefix), *ours.source.encode(text), *ids(ours.template.source_suffix)]


LANGUAGES = {"mbart": "ko_KR", "mbart50": "sv_SE", "m2m100": "ko", "nllb": "kor_Hang"}


def test_a_source_of_blenderbot_ends_with_eos_which_its_class_forgets(tmp_path):
    """The frames of all other families are compared with transformers by `compare_tokenizers`."""
    assert imported(FAMILIES["blenderbot"](tmp_path)).template.source_suffix == (2,)


def test_targets_begin_with_their_language(files, ours):
    template = ours.template
    if files.family == "mbart":
        assert (template.start, template.forced) == (("target_language",), ())
    elif files.family in LANGUAGES:
        assert (template.start, template.forced) == ((2,), ("target_language",))
    else:
        assert (template.start, template.forced) == ((files.generation["decoder_start_token_id"],), ())
    language = LANGUAGES.get(files.family)
    if language:
        token = f"__{language}__" if files.family == "m2m100" else language
        expected = ours.source.token_id(token)
        assert ours.choices["target_language"].ids[language] == expected
        assert ours.choices["target_language"].default == ""


def test_a_language_that_the_checkpoint_fixes_is_the_default(tmp_path):
    files = nllb(tmp_path)
    language = files.theirs.convert_tokens_to_ids("fra_Latn")
    choices = read_tokenizers(
        tmp_path, "nllb", files.config, {**files.generation, "forced_bos_token_id": language}
    ).choices
    assert choices["target_language"].default == "fra_Latn"


def test_mbart_starts_with_the_language_that_the_checkpoint_fixes(tmp_path):
    files = mbart(tmp_path)
    language = files.theirs.convert_tokens_to_ids("ro_RO")
    ours = read_tokenizers(tmp_path, "mbart", files.config, {"decoder_start_token_id": language})
    assert ours.template.start == ("target_language",)
    assert ours.choices["target_language"].default == "ro_RO"


def test_nllb_of_before_2023_has_its_language_behind(tmp_path):
    files = nllb(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"legacy_behaviour": True}))
    template = imported(files).template
    assert (template.source_prefix, template.source_suffix) == ((), (2, "source_language"))


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_eos_token": False}])
def test_t5gemma_has_the_frame_of_its_file_unless_its_settings_have_another(settings, tmp_path):
    files = t5gemma(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert not {"add_bos_token", "add_eos_token"} & written.keys()
    edit(tmp_path / "tokenizer_config.json", **settings)
    template = imported(files).template
    assert template.source_prefix == (2,) * settings.get("add_bos_token", True)
    assert template.source_suffix == (1,) * settings.get("add_eos_token", True)


def test_bytes_without_a_token_stream_as_they_become_characters(tmp_path):
    """The library's own stream would take back a character that bytes of an incomplete one follow."""
    tokenizer = imported(t5gemma(tmp_path)).target
    complete, cut = ([tokenizer.token_id(f"<0x{byte:02X}>") for byte in "힣".encode()[:n]] for n in (3, 2))
    word = tokenizer.encode("ab")
    stream = tokenizer.stream()
    given = [*word, *complete, *cut, *word]
    pieces = [stream.push([token_id]) for token_id in given]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(given) == "ab힣\ufffdab"
    assert pieces[len(word) : len(word) + 3] == ["", "", "힣"]


def test_marian_chooses_its_target_language_in_the_source(tmp_path):
    files = marian(tmp_path, languages=("fra", "ron", "cmn_Hans"))
    ours = imported(files)
    assert ours.template.source_prefix == ("target_language",)
    assert list(ours.choices) == ["target_language"]
    assert framed(ours, "a b", target_language="ron") == files.theirs(">>ron<< a b").input_ids
    choice = ours.choices["target_language"]
    assert not set(choice.ids.values()) & set(ours.source.encode(">>ron<< a b"))
    frame = ((choice.ids["fra"],), (files.theirs.eos_token_id,))
    model = SimpleNamespace(manifest=SimpleNamespace(template=ours.template))
    decoding = Decoding(model, None, GenerateOptions(), frame)
    for text in (">>ron<< a b", ">>cmn_Hans<<a  b", ">>fra<<"):
        rest, marked = with_mark(text, decoding, choice, "")
        assert ours.source.encode_truncated(rest, 99, *marked.frame)[0] == files.theirs(text).input_ids


@pytest.mark.parametrize("family", [nllb, mbart, t5])
def test_a_long_text_has_the_same_tokens_in_pieces(family, tmp_path):
    """A piece that ended in white space had a token for it."""
    source = imported(family(tmp_path)).source
    for text in ("a" + " " * 6000 + "b a", "a  b " * 2000, "a b" * 4000):
        token_ids = source.encode(text)
        assert source.encode_truncated(text, 16) == (token_ids[:16], max(len(token_ids) - 16, 0))


def test_marian_with_one_language_has_no_choice(tmp_path):
    ours = imported(marian(tmp_path, languages=("deu",)))
    assert (ours.template.source_prefix, ours.choices) == ((), {})


def test_an_exported_file_has_no_frame_of_its_own(files, ours):
    assert ours.source.encode_source("a b") == ours.source.encode("a b")


@pytest.mark.parametrize("stop", ["b", " b", "b ", "\n", "ﬁ", "</s>"])
def test_a_stop_sequence_is_normalised_as_the_text_is(stop, ours):
    inside = ours.target.normalize_inside(stop)
    assert "\ue000" not in inside
    assert "\u2581" not in inside
    if stop.strip() == "b":
        assert inside == stop


class TestRefusals:
    def test_a_tokenizer_of_another_model_is_refused(self, tmp_path):
        files = t5(tmp_path)
        with pytest.raises(ValueError, match="beyond the model's vocabulary of 1000"):
            read_tokenizers(tmp_path, "t5", {"vocab_size": 1000}, files.generation)

    def test_pieces_of_another_model_are_refused(self, tmp_path):
        files = marian(tmp_path)
        with pytest.raises(ValueError, match="beyond the model's vocabulary of 1000"):
            read_tokenizers(tmp_path, "marian", {"vocab_size": 1000}, files.generation)

    def test_languages_beyond_the_vocabulary_cannot_be_chosen(self, tmp_path):
        files = m2m100(tmp_path)
        num_pieces = len(json.loads((tmp_path / "vocab.json").read_text()))
        ours = read_tokenizers(tmp_path, "m2m100", {"vocab_size": num_pieces + 3}, files.generation)
        assert list(ours.choices["source_language"].ids) == ["af", "am", "ar"]

    @pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
    def test_a_missing_file_is_refused_by_its_name(self, name, tmp_path):
        files = marian(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=f"no {name}"):
            imported(files)

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"no spiece\.model"):
            read_tokenizers(tmp_path, "t5", {"vocab_size": 100}, {"decoder_start_token_id": 0})

    def test_a_damaged_model_of_pieces_is_refused(self, tmp_path):
        files = marian(tmp_path)
        content = (tmp_path / "source.spm").read_bytes()
        for damaged in (b"", b"\xff" * 20, content[: len(content) // 2], b"{}"):
            (tmp_path / "source.spm").write_bytes(damaged)
            with pytest.raises(ValueError, match=r"source\.spm: not a SentencePiece model"):
                imported(files)

    def test_a_damaged_file_is_refused(self, tmp_path):
        files = t5(tmp_path)
        for damaged in ("", "{", "[]", "{}", '{"model": {"vocab": [1]}, "added_tokens": []}'):
            (tmp_path / "tokenizer.json").write_text(damaged)
            with pytest.raises(ValueError, match=r"tokenizer\.json"):
                imported(files)

    def test_a_tokenizer_class_of_another_family_is_refused(self, tmp_path):
        files = t5(tmp_path)
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(settings | {"tokenizer_class": "BertTokenizerFast"})
        )
        with pytest.raises(
            ValueError, match="tokenizer_class is BertTokenizer; a model of the family t5 has T5Tokenizer"
        ):
            imported(files)

    @pytest.mark.parametrize(("family", "other"), [("m2m100", nllb), ("nllb", m2m100), ("mbart", nllb)])
    def test_a_tokenizer_without_the_languages_of_its_family_is_refused(self, family, other, tmp_path):
        files = other(tmp_path)
        edit(tmp_path / "tokenizer_config.json", tokenizer_class=None)
        with pytest.raises(ValueError, match=r"no token of the tokenizer is a language|no languages"):
            read_tokenizers(tmp_path, family, files.config, files.generation)

    def test_a_vocabulary_with_gaps_is_refused(self, tmp_path):
        files = marian(tmp_path)
        vocab = json.loads((tmp_path / "vocab.json").read_text())
        vocab.popitem()
        (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"z": 5}))
        with pytest.raises(ValueError, match="their ids have gaps"):
            imported(files)

    def test_a_model_without_a_start_token_is_refused(self, tmp_path):
        files = t5(tmp_path)
        with pytest.raises(ValueError, match="neither decoder_start_token_id nor bos_token_id"):
            read_tokenizers(tmp_path, "t5", files.config, {})


def test_a_file_is_taken_as_it_is_where_transformers_rebuilds_it(tmp_path):
    """Its class for mBART drops the normaliser of the file, and these texts would be unknown."""
    files = mbart(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "NFKC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    given = texts(50)
    theirs = [expected.encode(text, add_special_tokens=False).ids for text in given]
    assert imported(files).source.encode_batch(given) == theirs


def without_tokenizer_json(files: Files, *, has_times: bool) -> None:
    """The files of Whisper before 2023: vocab.json, merges.txt and added_tokens.json."""
    described = json.loads((files.folder / "tokenizer.json").read_text())
    (files.folder / "tokenizer.json").unlink()
    vocab = described["model"]["vocab"]
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    if not has_times:
        added = {name: token_id for name, token_id in added.items() if "." not in name}
    merges = "".join(f"{first} {second}\n" for first, second in described["model"]["merges"])
    (files.folder / "vocab.json").write_text(json.dumps(vocab))
    (files.folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    others = {name: token_id for name, token_id in added.items() if name not in vocab}
    (files.folder / "added_tokens.json").write_text(json.dumps(others))


def prompted(files: Files, **generation) -> ImportedTokenizers:
    """With other settings of generate; None removes one."""
    settings = files.generation | generation
    settings = {name: value for name, value in settings.items() if value is not None}
    return read_tokenizers(files.folder, files.family, files.config, settings)


class TestWhisper:
    @pytest.fixture
    def files(self, tmp_path) -> Files:
        return whisper(tmp_path)

    @pytest.mark.parametrize("form", ["tokenizer.json", "pieces", "pieces without times"])
    def test_ids_and_texts_are_those_of_transformers(self, files, form):
        if form != "tokenizer.json":
            without_tokenizer_json(files, has_times=form == "pieces")
        tokenizer = imported(files).target
        for text in texts(FEW):
            ids = files.theirs(text, add_special_tokens=False).input_ids
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == files.theirs.decode(ids, skip_special_tokens=True)
        special = range(files.generation["eos_token_id"], files.config["vocab_size"])
        assert tokenizer.decode([*special, *tokenizer.encode("ab"), *special]) == "ab"  # times have no text

    @pytest.mark.parametrize("text", ["<|endoftext|>", "<|en|>", "<|0.00|>", "<|notimestamps|>"])
    def test_a_special_token_that_a_user_types_is_text(self, files, text):
        tokenizer = imported(files).target
        assert max(tokenizer.encode(text)) < files.generation["eos_token_id"]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_prompt_has_the_language_the_task_and_no_timestamps(self, files):
        ours = imported(files)
        chosen = {"source_language": "ko", "task": "translate"}
        start = [ours.choices[p].ids[chosen[p]] if isinstance(p, str) else p for p in ours.template.start]
        names = ["<|startoftranscript|>", "<|ko|>", "<|translate|>", "<|notimestamps|>"]
        assert start == files.theirs.convert_tokens_to_ids(names)
        assert ours.template.forced == ours.template.source_prefix == ours.template.source_suffix == ()
        assert list(ours.choices["source_language"].ids) == ["en", "de", "ko"]
        assert ours.choices["source_language"].default == ""
        assert (sorted(ours.choices["task"].ids), ours.choices["task"].default) == (
            ["transcribe", "translate"],
            "transcribe",
        )
        assert ours.timestamps == Timestamps(
            first_id=files.theirs.convert_tokens_to_ids("<|0.00|>"),
            last_id=len(files.theirs) - 1,
            step_seconds=0.02,
            off_id=files.theirs.convert_tokens_to_ids("<|notimestamps|>"),
            max_first=10,
        )

    def test_words_that_were_added_after_the_times_are_no_times(self, files):
        """A model that was tuned with a new word ended its text there."""
        times = imported(files).timestamps
        config = files.config | {"max_source_positions": 10, "vocab_size": times.last_id + 6}
        tuned = read_tokenizers(files.folder, files.family, config, files.generation).timestamps
        assert (tuned.first_id, tuned.last_id) == (times.first_id, times.first_id + 10)
        assert not tuned.has(times.last_id + 1)

    def test_an_english_model_has_nothing_to_choose(self, files):
        for settings in ({"is_multilingual": False}, {"is_multilingual": None}):  # by its number of tokens
            ours = prompted(files, **settings, lang_to_id=None, task_to_id=None)
            ids = files.generation
            assert ours.template.start == (ids["decoder_start_token_id"], ids["no_timestamps_token_id"])
            assert ours.choices == {}

    def test_ids_that_the_settings_lack_are_those_of_the_tokenizer(self, files):
        names = ("decoder_start_token_id", "no_timestamps_token_id", "lang_to_id", "pad_token_id")
        ours = prompted(files, **dict.fromkeys(names))
        assert replace(ours, source=None, target=None, pad_id=0) == replace(
            imported(files), source=None, target=None, pad_id=0
        )

    @pytest.mark.parametrize("language", ["ko", "<|ko|>", "Korean"])
    def test_a_language_and_a_task_of_the_settings_are_the_defaults(self, files, language):
        choices = prompted(files, language=language, task="translate").choices
        assert (choices["source_language"].default, choices["task"].default) == ("ko", "translate")

    def test_forced_ids_of_old_settings_are_the_defaults_where_there_are_no_newer_ones(self, files):
        ids = imported(files).choices["source_language"].ids, imported(files).choices["task"].ids
        old = [[1, ids[0]["de"]], [2, ids[1]["translate"]], [3, files.generation["no_timestamps_token_id"]]]
        without_language = [[1, None], old[1]]
        in_config = replace(files, config=files.config | {"forced_decoder_ids": old})
        for ours, expected in (
            (prompted(files, forced_decoder_ids=old), ("de", "translate")),
            (prompted(files, forced_decoder_ids=without_language), ("", "translate")),
            (prompted(files, forced_decoder_ids=old, language="ko"), ("ko", "transcribe")),
            (prompted(files, forced_decoder_ids=old, task="transcribe"), ("", "transcribe")),
            (prompted(in_config), ("de", "translate")),
            (prompted(in_config, forced_decoder_ids=without_language), ("", "translate")),
        ):
            assert tuple(choice.default for choice in ours.choices.values()) == expected

    @pytest.mark.parametrize(
        "settings",
        [
            {"language": "fr", "task": "sing"},
            {"forced_decoder_ids": [[1, 10**6], [2], 3, None]},
            {"forced_decoder_ids": 5},
        ],
    )
    def test_a_default_that_the_checkpoint_lacks_is_not_taken(self, files, settings):
        choices = prompted(files, **settings).choices
        assert (choices["source_language"].default, choices["task"].default) == ("", "transcribe")

    @pytest.mark.parametrize(("given", "expected"), [(50, 50), (-1, None), ("50", None), ([50], None)])
    def test_the_latest_first_time_is_a_number_of_steps(self, files, given, expected):
        assert prompted(files, max_initial_timestamp_index=given).timestamps.max_first == expected


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("t5", ["<extra_id_0>", "<extra_id_99>"]),
        ("nllb", ["ace_Arab", "zul_Latn"]),
        ("mbart50", ["ar_AR", "sl_SI"]),
        ("m2m100", ["__af__", "__ceb__"]),
        ("pegasus", ["<mask_1>", "<unk_2>", "<unk_102>"]),
        ("bart", [{"content": "<mask>", "lstrip": True}]),
    ],
)
def test_special_tokens_of_published_checkpoints_are_nobodys_own(tmp_path, family, published):
    for name in ("additional_special_tokens", "extra_special_tokens"):
        settings = {name: [*published, "<task>"], "mask_token": "<mask>"}
        own_marks = TokenizerFiles(tmp_path, settings, {}).own_marks(RECIPES[family].language)
        assert own_marks == ["<task>"]
