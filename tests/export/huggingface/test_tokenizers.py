"""The ids, texts and frames of imported tokenizers against those that the libraries of checkpoints gave."""

import json
from collections.abc import Sequence
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
    ADDED,
    ADDED_FORMS,
    ADDED_TEXTS,
    CAN_ADD,
    CONTROL_TEXTS,
    FAMILIES,
    GOLDEN,
    GOLDEN_CASES,
    TEXTS,
    Files,
    m2m100,
    marian,
    mbart,
    nllb,
    t5,
    t5gemma,
    whisper,
    with_added,
    without_tokenizer_json,
)

RECORDED = {line["family"]: line for line in map(json.loads, GOLDEN.read_text(encoding="utf-8").splitlines())}


def imported(files: Files) -> ImportedTokenizers:
    return read_tokenizers(files.folder, files.family, files.config, files.generation)


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory) -> Files:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(files) -> ImportedTokenizers:
    return imported(files)


@pytest.mark.parametrize("name", [name for name in GOLDEN_CASES if not name.endswith(" added")])
def test_ids_and_texts_are_those_of_transformers(name, tmp_path):
    make, texts = GOLDEN_CASES[name]
    files, line = make(tmp_path), RECORDED[name]
    ours = imported(files)
    if not name.endswith("target"):
        assert_same(ours.source, texts, line["ids"])
        ids = files.theirs.get_vocab()
        if name != "nllb pieces":  # whose class now has the mask before the languages
            special = ours.source.special_tokens.items()
            assert [ids.get(token, token_id) for token_id, token in special] == [one for one, _ in special]
    if ours.target is not ours.source and not name.endswith("target"):
        return
    assert_same(ours.target, texts, line["ids"])
    for ids, text in zip(line["ids"], line["texts"], strict=True):
        decoded = ours.target.decode(ids)
        # Marian's and M2M100's classes strip the text; the other ones keep a space at its end.
        assert (decoded.strip() if name.startswith(("marian", "m2m100")) else decoded) == text
        stream = ours.target.stream()
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.finish()]) == decoded
        assert "".join(ours.target.pieces(ids)).replace("<unk>", "") == decoded.replace("<unk>", "")


def assert_same(tokenizer: Tokenizer, texts: Sequence[str], expected: Sequence[list[int]]) -> None:
    """Also of a file that was saved and loaded."""
    loaded = Tokenizer.from_bytes(tokenizer.to_json().encode(), "")
    for each in (tokenizer, loaded):
        found = dict(zip(texts, each.encode_batch(texts), strict=True))
        assert found == dict(zip(texts, expected, strict=True))
    assert (loaded.token_bytes, loaded.special_tokens) == (tokenizer.token_bytes, tokenizer.special_tokens)


@pytest.mark.parametrize(("family", "form"), [*product(CAN_ADD, ADDED_FORMS)])
def test_tokens_that_somebody_added_are_read_without_a_tokenizer_json(family, form, tmp_path):
    files = with_added(tmp_path, family, form)
    ours, first = imported(files), files.config["vocab_size"] - len(ADDED) - 1
    assert ours.num_tokens == files.config["vocab_size"]
    assert_same(ours.source, ADDED_TEXTS, RECORDED[f"{family} added"]["ids"])
    assert ours.target.encode("<sep>김치찌개①<SEP>") == [first, first + 1, first + 2]
    assert ours.target.decode(range(first, first + 4)) == "<sep>김치찌개①<SEP>"
    assert ours.target.pieces([first + 3]) == ["<task>"]
    assert first + 3 not in ours.source.encode("a <task> b")


def test_added_tokens_with_the_ids_of_others_are_refused(tmp_path):
    files = with_added(tmp_path, "t5", "added_tokens.json")
    for wrong in ({"<sep>": 5}, {"</s>": 1900}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"added token '.*' has the id \d+"):
            imported(files)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": 10**9}))
    with pytest.raises(ValueError, match=r"beyond .*'<sep>'"):
        imported(files)


def test_marian_knows_pieces_that_only_the_target_can_cut(tmp_path):
    files = marian(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    # A run of characters that the source's model does not know is one piece, and vocab.json may have it.
    surface = next(
        piece for piece in vocab if len(piece) == 1 and source.piece_to_id(piece) == source.unk_id()
    )
    assert vocab[surface] in imported(files).source.encode(f"a {surface} b")


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


def test_a_text_of_blenderbot_begins_with_a_space_where_no_setting_says_so(tmp_path):
    files = FAMILIES["blenderbot"](tmp_path)
    without_tokenizer_json(files)
    edit(tmp_path / "tokenizer_config.json", add_prefix_space=None)
    assert imported(files).source.encode_batch(TEXTS) == RECORDED["blenderbot"]["ids"]


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
    edit(tmp_path / "tokenizer_config.json", legacy_behaviour=True)
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
    @pytest.mark.parametrize("family", ["t5", "marian"])
    def test_a_tokenizer_of_another_model_is_refused(self, family, tmp_path):
        files = FAMILIES[family](tmp_path)
        with pytest.raises(ValueError, match="vocabulary of 300"):
            read_tokenizers(tmp_path, family, {"vocab_size": 300}, files.generation)

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
        edit(tmp_path / "tokenizer_config.json", tokenizer_class="BertTokenizerFast")
        with pytest.raises(ValueError, match=r"BertTokenizer.* t5 .*T5Tokenizer"):
            imported(files)

    @pytest.mark.parametrize(("family", "other"), [("m2m100", nllb), ("nllb", m2m100), ("mbart", nllb)])
    def test_a_tokenizer_without_the_languages_of_its_family_is_refused(self, family, other, tmp_path):
        files = other(tmp_path)
        edit(tmp_path / "tokenizer_config.json", tokenizer_class=None)
        with pytest.raises(ValueError, match="language"):
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
        with pytest.raises(ValueError, match="decoder_start_token_id"):
            read_tokenizers(tmp_path, "t5", files.config, {})


def test_a_file_is_taken_as_it_is_where_transformers_rebuilds_it(tmp_path):
    """Its class for mBART drops the normaliser of the file, and these texts would be unknown."""
    files = mbart(tmp_path)
    edit(tmp_path / "tokenizer.json", normalizer={"type": "NFKC"})
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = [expected.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert imported(files).source.encode_batch(TEXTS) == theirs


def prompted(files: Files, **generation) -> ImportedTokenizers:
    """With other settings of generate; None removes one."""
    settings = files.generation | generation
    settings = {name: value for name, value in settings.items() if value is not None}
    return read_tokenizers(files.folder, files.family, files.config, settings)


class TestWhisper:
    @pytest.fixture
    def files(self, tmp_path) -> Files:
        return whisper(tmp_path)

    @pytest.mark.parametrize("has_times", [True, False])
    def test_files_without_a_tokenizer_json_are_the_same(self, files, has_times):
        without_tokenizer_json(files, has_times=has_times)
        tokenizer, ids = imported(files).target, RECORDED["whisper"]["ids"]
        assert tokenizer.encode_batch(TEXTS) == ids
        assert [tokenizer.decode(row) for row in ids] == RECORDED["whisper"]["texts"]
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
