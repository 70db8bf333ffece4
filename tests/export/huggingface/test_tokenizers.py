"""The ids, texts and frames of imported tokenizers against the libraries that checkpoints are used with.

The oracle is the tokenizer of `transformers` before it is saved. Where a folder has SentencePiece models
only, sentencepiece itself is the oracle: `transformers` would read them by the `tokenizers` library, which
leaves decomposed Hangul as it is and drops accents.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers

from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.service.read.options import Decoding, with_mark
from seq2seq_serve.training.huggingface.tokenizers import RECIPES, ImportedTokenizers, TokenizerFiles
from tests.export.huggingface.checkpoints import edit
from tests.export.huggingface.tokenizer_files import (
    CONTROL_TEXTS,
    FAMILIES,
    HARD_TEXTS,
    Files,
    imported,
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

# NUL ends a text for some versions of sentencepiece.
TEXTS = [text for text in (*sentences(300, 99), *HARD_TEXTS) if "\0" not in text]
BY_PIECES = ("t5", "pegasus", "mbart", "mbart50", "nllb", "trocr-small")


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in ("mt5", "t5gemma2")])
def files(request, tmp_path_factory) -> Files:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(files) -> ImportedTokenizers:
    return imported(files)


def assert_same(tokenizer, expected, ties=0.005) -> None:
    """The ids are equal; at most `ties` of the texts may have the same ids in another order.

    Two orders of the same pieces have the same probability. sentencepiece adds in 32 bits from the text's
    beginning, so that its choice among them depends on all that is before.
    """
    found = zip(TEXTS, tokenizer.encode_batch(TEXTS), map(list, map(expected, TEXTS)), strict=True)
    differ = [case for case in found if case[1] != case[2]]
    assert [case for case in differ if sorted(case[1]) != sorted(case[2])] == []
    assert len(differ) <= ties * len(TEXTS), differ


def test_ids_and_texts_are_those_of_transformers(files, ours):
    ties = 0.005 if files.family == "marian" else 0
    assert_same(ours.source, lambda text: files.theirs(text, add_special_tokens=False).input_ids, ties)
    unk_ids = {token_id for token_id, name in ours.target.special_tokens.items() if name == "<unk>"}
    for text in TEXTS:
        ids = ours.target.encode(text)
        theirs = files.theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        decoded = ours.target.decode(ids)
        # Marian's and M2M100's classes strip the text; the other ones keep a space at its end.
        assert (decoded.strip() if files.family in ("marian", "m2m100") else decoded) == theirs
        stream = ours.target.stream()
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.finish()]) == decoded
        known = ours.target.decode([token_id for token_id in ids if token_id not in unk_ids])
        assert "".join(ours.target.pieces(ids)).replace("<unk>", "") == known
    assert ours.target.decode([files.config["vocab_size"] + 100]) == ""


@pytest.mark.parametrize("family", BY_PIECES)
def test_ids_of_pieces_alone_are_those_of_sentencepiece(family, tmp_path):
    files = only_pieces(tmp_path, family)
    (model,) = tmp_path.glob("*.model")
    theirs, vocab = sentencepiece.SentencePieceProcessor(model_file=str(model)), files.theirs.get_vocab()
    assert_same(
        imported(files).source,
        lambda text: [vocab.get(piece, vocab["<unk>"]) for piece in theirs.encode(text, out_type=str)],
    )


@pytest.mark.parametrize("family", ["bart", "blenderbot"])  # texts of the second begin with a space
def test_ids_of_byte_pairs_alone_are_those_of_transformers(family, tmp_path):
    files = FAMILIES[family](tmp_path)
    without_tokenizer_json(files, has_times=False)
    edit(tmp_path / "tokenizer_config.json", add_prefix_space=None)  # as published
    theirs = lambda text: files.theirs(text, add_special_tokens=False).input_ids  # noqa: E731
    assert_same(imported(files).source, theirs, ties=0)


ADDED = ["<sep>", "김치찌개", "①<SEP>"]  # SentencePiece would change the last one


def with_added(folder, family: str, form: str) -> tuple[Files, ImportedTokenizers]:
    """Files without tokenizer.json to which somebody added tokens, the last one special, and those before."""
    files = only_pieces(folder, family) if family in BY_PIECES else FAMILIES[family](folder)
    if family == "bart":
        without_tokenizer_json(files, has_times=False)
    before, settings = imported(files), json.loads((folder / "tokenizer_config.json").read_text())
    ids = {name: before.num_tokens + place for place, name in enumerate([*ADDED, "<task>"])}
    if form == "added_tokens.json":
        (folder / form).write_text(json.dumps(ids))
        edited = {"extra_special_tokens": ["<task>"], "added_tokens_decoder": None}
    else:
        tokens = {str(ids[name]): {"content": name, "special": name == "<task>"} for name in ids}
        edited = {"added_tokens_decoder": settings.get("added_tokens_decoder", {}) | tokens}
    edit(folder / "tokenizer_config.json", **edited)
    size = before.num_tokens + len(ids)
    return replace(files, config=files.config | {"vocab_size": size, "decoder_vocab_size": size}), before


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "added_tokens.json") for family in ("marian", "t5")),
        *((family, "added_tokens_decoder") for family in ("t5", "bart", "m2m100", "byt5", "nllb", "mbart50")),
    ],
)
def test_tokens_that_somebody_added_are_read_without_a_tokenizer_json(family, form, tmp_path):
    """The texts between them are cut as they were, each alone, as classes of transformers 4 do it."""
    files, before = with_added(tmp_path, family, form)
    ours, first = imported(files), before.num_tokens
    assert ours.num_tokens == files.config["vocab_size"]
    given = ["a <sep> 김치찌개 b", "<sep>a<sep>b", " <sep>", "김치찌개<sep>①<SEP>", "x ①<SEP>y", "<SEP> 김치"]
    for text in [*given, *TEXTS[:30]]:
        expected: list[int] = []
        for part in filter(None, re.split(f"({'|'.join(ADDED)})", text)):
            expected += [first + ADDED.index(part)] if part in ADDED else before.source.encode(part)
        assert ours.source.encode(text) == expected, text
    assert ours.target.encode("<sep>김치찌개①<SEP>") == [first, first + 1, first + 2]
    assert ours.target.decode(range(first, first + 4)) == "<sep>김치찌개①<SEP>"
    assert ours.target.pieces([first + 3]) == ["<task>"]
    assert first + 3 not in ours.source.encode("a <task> b")
    loaded = Tokenizer.from_bytes(ours.source.to_json().encode(), "")
    assert loaded.encode_batch(given) == ours.source.encode_batch(given)


def test_added_tokens_with_the_ids_of_others_are_refused(tmp_path):
    files, _ = with_added(tmp_path, "t5", "added_tokens.json")
    for wrong, match in (
        ({"<sep>": 5}, r"the added token '.*' has the id \d+, and the vocabulary has"),
        ({"</s>": 1900}, r"the added token '.*' has the id \d+, and the vocabulary has"),
        ({"<sep>": 10**9}, r"1 tokens beyond the model's vocabulary of \d+, such as '<sep>'"),
    ):
        (tmp_path / "added_tokens.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=match):
            imported(files)


@pytest.mark.parametrize("separate", [False, True])
def test_a_marian_target_has_its_own_pieces(separate, tmp_path):
    files = marian(tmp_path, separate=separate)
    target = imported(files).target
    assert_same(target, lambda text: files.theirs(text_target=text, add_special_tokens=False).input_ids)


def test_marian_knows_pieces_that_only_the_target_can_cut(tmp_path):
    files = marian(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    # A run of characters that the source's model does not know is one piece, and vocab.json may have it.
    surface = next(
        piece for piece in vocab if len(piece) == 1 and source.piece_to_id(piece) == source.unk_id()
    )
    assert vocab[surface] in imported(files).source.encode(f"a {surface} b")


def test_a_file_that_is_saved_and_loaded_is_the_same(files, ours, tmp_path):
    given = [*sentences(100, 5), *HARD_TEXTS, *CONTROL_TEXTS]
    for tokenizer in (ours.source, ours.target):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = Tokenizer.load(tmp_path / "tokenizer.json")
        assert loaded.encode_batch(given) == tokenizer.encode_batch(given)
        assert loaded.token_bytes == tokenizer.token_bytes
        assert loaded.special_tokens == tokenizer.special_tokens
        assert loaded.encode_source("a b") == tokenizer.encode("a b"), "the frame is in the manifest"


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
    eos = ours.source.token_id(files.theirs.eos_token)
    assert eos == files.theirs.eos_token_id
    assert ours.source.piece(eos) == files.theirs.eos_token
    assert ours.source.decode([eos, *ours.source.encode("ab"), eos]).strip() == "ab"


@pytest.mark.parametrize("stop", ["b", " b", "b ", "\n", "ﬁ", "</s>"])
def test_a_stop_sequence_is_normalised_as_the_text_is(stop, ours):
    inside = ours.target.normalize_inside(stop)
    assert not {"\ue000", "\u2581"} & {*inside}
    if stop.strip() == "b":
        assert inside == stop


LANGUAGES = {"mbart": "ko_KR", "mbart50": "sv_SE", "m2m100": "ko", "nllb": "kor_Hang"}


def test_targets_begin_with_their_language(files, ours):
    start, forced, language = ours.template.start, ours.template.forced, LANGUAGES.get(files.family)
    if files.family == "mbart":
        assert (start, forced) == (("target_language",), ())
    elif language:
        assert (start, forced) == ((2,), ("target_language",))
    else:
        assert (start, forced) == ((files.generation["decoder_start_token_id"],), ())
    if language:
        token = f"__{language}__" if files.family == "m2m100" else language
        assert ours.choices["target_language"].ids[language] == ours.source.token_id(token)
        assert ours.choices["target_language"].default == ""


def test_a_source_of_blenderbot_ends_with_eos_which_its_class_forgets(tmp_path):
    """The frames of all other families are compared with transformers by `compare_tokenizers`."""
    assert imported(FAMILIES["blenderbot"](tmp_path)).template.source_suffix == (2,)


@pytest.mark.parametrize(
    ("make", "setting", "language"),
    [(nllb, "forced_bos_token_id", "fra_Latn"), (mbart, "decoder_start_token_id", "ro_RO")],
)
def test_a_language_that_the_checkpoint_fixes_is_the_default(make, setting, language, tmp_path):
    files = make(tmp_path)
    ours = prompted(files, **{setting: files.theirs.convert_tokens_to_ids(language)})
    assert "target_language" in (*ours.template.start, *ours.template.forced)
    assert ours.choices["target_language"].default == language


def test_nllb_of_before_2023_has_its_language_behind(tmp_path):
    files = nllb(tmp_path)
    edit(tmp_path / "tokenizer_config.json", legacy_behaviour=True)
    template = imported(files).template
    assert (template.source_prefix, template.source_suffix) == ((), (2, "source_language"))


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_eos_token": False}])
def test_t5gemma_has_the_frame_of_its_file_unless_its_settings_have_another(settings, tmp_path):
    files = t5gemma(tmp_path)
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
    choice = ours.choices["target_language"]
    assert not set(choice.ids.values()) & set(ours.source.encode(">>ron<< a b"))
    frame = ((choice.ids["fra"],), (files.theirs.eos_token_id,))
    model = SimpleNamespace(manifest=SimpleNamespace(template=ours.template))
    decoding = Decoding(model, None, GenerateOptions(), frame)
    for text in (">>ron<< a b", ">>cmn_Hans<<a  b", ">>fra<<"):
        rest, marked = with_mark(text, decoding, choice, "")
        assert ours.source.encode_truncated(rest, 99, *marked.frame)[0] == files.theirs(text).input_ids


def test_marian_with_one_language_has_no_choice(tmp_path):
    ours = imported(marian(tmp_path, languages=("deu",)))
    assert (ours.template.source_prefix, ours.choices) == ((), {})


@pytest.mark.parametrize("family", [nllb, mbart, t5])
def test_a_long_text_has_the_same_tokens_in_pieces(family, tmp_path):
    """A piece that ended in white space had a token for it."""
    source = imported(family(tmp_path)).source
    for text in ("a" + " " * 6000 + "b a", "a  b " * 2000, "a b" * 4000):
        token_ids = source.encode(text)
        assert source.encode_truncated(text, 16) == (token_ids[:16], max(len(token_ids) - 16, 0))


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "name", "content", "match"),
        [
            *((marian, name, None, f"no {name}") for name in ("source.spm", "target.spm", "vocab.json")),
            (t5, "tokenizer.json", None, r"no spiece\.model"),
            *(
                (marian, "source.spm", damaged, "not a SentencePiece")
                for damaged in ("", "\x0a\xff\x01", "{}")
            ),
            *((t5, "tokenizer.json", damaged, "tokenizer.json") for damaged in ("", "{", "[]", "{}")),
            (t5, "tokenizer.json", '{"model": {"vocab": [1]}, "added_tokens": []}', r"tokenizer\.json"),
            (t5, "tokenizer_config.json", '{"tokenizer_class": "BertTokenizerFast"}', "BertTokenizer; .*T5T"),
            (marian, "vocab.json", '{"</s>": 0, "<unk>": 1, "<pad>": 2, "z": 5}', "their ids have gaps"),
        ],
    )
    def test_missing_and_damaged_files_are_refused_by_name(self, make, name, content, match, tmp_path):
        files = make(tmp_path)
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=match):
            imported(files)

    @pytest.mark.parametrize("make", [t5, marian])
    def test_a_tokenizer_of_another_model_is_refused(self, make, tmp_path):
        with pytest.raises(ValueError, match="beyond the model's vocabulary of 1000"):
            imported(replace(make(tmp_path), config={"vocab_size": 1000}))

    def test_languages_beyond_the_vocabulary_cannot_be_chosen(self, tmp_path):
        files = m2m100(tmp_path)
        ours = imported(replace(files, config={"vocab_size": files.config["vocab_size"] - 105}))
        assert list(ours.choices["source_language"].ids) == ["af", "am", "ar"]

    @pytest.mark.parametrize(("family", "other"), [("m2m100", nllb), ("nllb", m2m100), ("mbart", nllb)])
    def test_a_tokenizer_without_the_languages_of_its_family_is_refused(self, family, other, tmp_path):
        files = other(tmp_path)
        edit(tmp_path / "tokenizer_config.json", tokenizer_class=None)
        with pytest.raises(ValueError, match=r"no token of the tokenizer is a language|no languages"):
            imported(replace(files, family=family))

    def test_a_model_without_a_start_token_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="neither decoder_start_token_id nor bos_token_id"):
            imported(replace(t5(tmp_path), generation={}))


def test_a_file_is_taken_as_it_is_where_transformers_rebuilds_it(tmp_path):
    """Its class for mBART drops the normaliser of the file, and these texts would be unknown."""
    files = mbart(tmp_path)
    edit(tmp_path / "tokenizer.json", normalizer={"type": "NFKC"})
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = [expected.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert imported(files).source.encode_batch(TEXTS) == theirs


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
    kept = {name: value for name, value in settings.items() if value is not None}
    return imported(replace(files, generation=kept))


class TestWhisper:
    @pytest.fixture
    def files(self, tmp_path) -> Files:
        return whisper(tmp_path)

    @pytest.mark.parametrize("form", ["tokenizer.json", "pieces", "pieces without times"])
    def test_ids_and_texts_are_those_of_transformers(self, files, form):
        if form != "tokenizer.json":
            without_tokenizer_json(files, has_times=form == "pieces")
        tokenizer = imported(files).target
        for text in TEXTS:
            ids = files.theirs(text, add_special_tokens=False).input_ids
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == files.theirs.decode(ids, skip_special_tokens=True)
        special = range(files.generation["eos_token_id"], files.config["vocab_size"])
        assert tokenizer.decode([*special, *tokenizer.encode("ab"), *special]) == "ab"  # times have no text
        for text in ("<|endoftext|>", "<|en|>", "<|0.00|>", "<|notimestamps|>"):  # a user typed it
            assert max(tokenizer.encode(text)) < files.generation["eos_token_id"]
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_prompt_has_the_language_the_task_and_no_timestamps(self, files):
        ours = imported(files)
        language, task = ours.choices["source_language"], ours.choices["task"]
        begin, off = map(files.theirs.convert_tokens_to_ids, ("<|startoftranscript|>", "<|notimestamps|>"))
        assert ours.template.start == (begin, "source_language", "task", off)
        assert ours.template.forced == ours.template.source_prefix == ours.template.source_suffix == ()
        assert (list(language.ids), language.default) == (["en", "de", "ko"], "")
        assert (sorted(task.ids), task.default) == (["transcribe", "translate"], "transcribe")
        for name, token_id in (language.ids | task.ids).items():
            assert token_id == files.theirs.convert_tokens_to_ids(f"<|{name}|>")
        first = files.theirs.convert_tokens_to_ids("<|0.00|>")
        assert ours.timestamps == Timestamps(first, len(files.theirs) - 1, 0.02, off, 10)

    def test_words_that_were_added_after_the_times_are_no_times(self, files):
        """A model that was tuned with a new word ended its text there."""
        times = imported(files).timestamps
        config = files.config | {"max_source_positions": 10, "vocab_size": times.last_id + 6}
        tuned = imported(replace(files, config=config)).timestamps
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
        found, expected = prompted(files, **dict.fromkeys(names)), imported(files)
        assert replace(found, source=None, target=None, pad_id=0) == replace(
            expected, source=None, target=None, pad_id=0
        )

    def test_defaults_are_those_of_the_settings(self, files):
        """Forced ids of old settings count where there are no newer ones; others are ignored."""
        ids = {name: one for choice in imported(files).choices.values() for name, one in choice.ids.items()}
        old = [[1, ids["de"]], [2, ids["translate"]], [3, files.generation["no_timestamps_token_id"]]]
        without_language = [[1, None], old[1]]
        in_config = replace(files, config=files.config | {"forced_decoder_ids": old})
        for ours, expected in (
            *((prompted(files, language=name), ("ko", "transcribe")) for name in ("ko", "<|ko|>", "Korean")),
            (prompted(files, task="translate"), ("", "translate")),
            (prompted(files, language="fr", task="sing"), ("", "transcribe")),
            (prompted(files, forced_decoder_ids=[[1, 10**6], [2], 3, None]), ("", "transcribe")),
            (prompted(files, forced_decoder_ids=5), ("", "transcribe")),
            (prompted(files, forced_decoder_ids=old), ("de", "translate")),
            (prompted(files, forced_decoder_ids=without_language), ("", "translate")),
            (prompted(files, forced_decoder_ids=old, language="ko"), ("ko", "transcribe")),
            (prompted(files, forced_decoder_ids=old, task="transcribe"), ("", "transcribe")),
            (prompted(in_config), ("de", "translate")),
            (prompted(in_config, forced_decoder_ids=without_language), ("", "translate")),
        ):
            assert tuple(choice.default for choice in ours.choices.values()) == expected

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
