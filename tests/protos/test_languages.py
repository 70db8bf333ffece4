import pytest

from seq2seq_serve.protos.languages import is_other_language, is_same_language, standard_tag, tag_of


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ("Korean", "ko"),
        ("chinese", "zh"),
        ("Chinese (traditional)", "zh-Hant"),
        ("zt", "zh-Hant"),
        ("pb", "pt-BR"),
        ("kor_Hang", "kor_Hang"),
        ("", ""),
        ("x" * 200, "x" * 200),
    ],
)
def test_names_of_languages_are_tags(given, tag):
    assert tag_of(given) == tag


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("kor_Hang", "ko"),
        ("zho_Hant", "zh-Hant"),
        ("zh", "zh"),
        ("en_XX", "en"),
        ("pt_BR", "pt-BR"),
        ("German", "de"),
        ("en", "en"),
        ("target", ""),
        ("", ""),
    ],
)
def test_names_of_models_are_standard_tags(name, tag):
    assert standard_tag(name) == tag


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("ko", "kor_Hang", True),
        ("en", "en-GB", True),
        ("zh", "zh-Hans", True),
        ("zh", "zh-Hant", False),
        ("zh-TW", "zho_Hant", True),
        ("sr-Latn", "sr-Cyrl", False),
        ("sr", "sr-Cyrl", True),
        ("ko", "en", False),
    ],
)
def test_tags_of_the_same_language(one, other, is_same):
    assert is_same_language(one, other) is is_same
    assert is_same_language(other, one) is is_same


@pytest.mark.parametrize(
    ("tag", "language", "is_other"),
    [("fr", "en", True), ("en-GB", "en", False), ("", "en", False), (" ", "en", False), ("fr", "", False)],
)
def test_only_known_languages_are_others(tag, language, is_other):
    assert is_other_language(tag, language) is is_other
