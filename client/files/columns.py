"""The names of columns in tables of terms: words for both sides, and languages, in common languages."""

from __future__ import annotations

import unicodedata

from seq2seq_serve.protos.languages import is_known, tag_of

_SOURCE_WORDS = """
    source, source language, source term, source text, src, term, original,
    quelle, quellsprache, quellbegriff, quellterm, quelltext, ausgangssprache, ausgangstext, begriff,
    fachbegriff,
    origen, fuente, idioma de origen, lengua de origen, texto de origen, término, término de origen,
    langue source, terme, terme source, texte source,
    origine, lingua di origine, lingua di partenza, termine, termine di origine, testo di origine, originale,
    origem, fonte, idioma de origem, termo, termo de origem, texto de origem,
    bron, brontaal, bronterm, brontekst,
    źródło, język źródłowy, termin, termin źródłowy, tekst źródłowy, oryginał,
    источник, исходный язык, исходный термин, исходный текст, термин, оригинал,
    原文, 原語, 用語, ソース, ソース言語, 術語, 源語言, 來源, 术语, 源语言, 源文本, 源术语, 来源,
    원문, 원본, 원어, 용어, 출발어, 소스, 원문 언어, 원본 언어
"""
_TARGET_WORDS = """
    target, target language, target term, target text, tgt, translation,
    ziel, zielsprache, zielbegriff, zielterm, zieltext, übersetzung,
    destino, idioma de destino, lengua de destino, texto de destino, término de destino, traducción,
    cible, langue cible, terme cible, texte cible, traduction,
    destinazione, lingua di destinazione, lingua di arrivo, termine di destinazione, traduzione,
    alvo, termo de destino, tradução,
    doel, doeltaal, doelterm, doeltekst, vertaling,
    cel, język docelowy, termin docelowy, tekst docelowy, tłumaczenie,
    цель, целевой язык, целевой термин, язык перевода, перевод,
    訳文, 訳語, 翻訳, ターゲット, ターゲット言語, 譯文, 翻譯, 目標語言,
    译文, 翻译, 目标语言, 目标文本, 目标术语,
    번역, 번역문, 번역어, 역어, 도착어, 대상, 대상어, 대상 언어, 번역 언어, 타겟
"""
# Names of languages in themselves and in others, beside those in English, which `protos.languages` has
_NAMES = {
    "ar": "العربية",
    "bg": "български",
    "ca": "català",
    "cs": "čeština",
    "da": "dansk",
    "de": """
        Deutsch, alemán, allemand, tedesco, ドイツ語, 독일어, Duits, niemiecki, alemão, немецкий, 德语, 德語
    """,
    "el": "Ελληνικά",
    "en": """
        Englisch, inglés, anglais, inglese, 英語, 영어, Engels, angielski, inglês, английский, 英语, 英文,
        الإنجليزية, английски, anglès, angličtina, engelsk, Αγγλικά, inglise, انگلیسی, englanti, אנגלית,
        अंग्रेज़ी, engleski, angol, Bahasa Inggris, Inggris, anglų, angļu, engleză, angleščina, енглески,
        engelska, อังกฤษ, ภาษาอังกฤษ, İngilizce, англійська, Tiếng Anh
    """,
    "es": """
        español, castellano, Spanisch, espagnol, spagnolo, スペイン語, 스페인어, Spaans, hiszpański,
        espanhol, испанский, 西班牙语, 西班牙語
    """,
    "et": "eesti",
    "fa": "فارسی",
    "fi": "suomi",
    "fr": """
        français, Französisch, francés, francese, フランス語, 프랑스어, 불어, Frans, francuski, francês,
        французский, 法语, 法語, 法文
    """,
    "he": "עברית",
    "hi": "हिन्दी",
    "hr": "hrvatski",
    "hu": "magyar",
    "id": "Bahasa Indonesia",
    "it": """
        italiano, Italienisch, italien, イタリア語, 이탈리아어, Italiaans, włoski, итальянский, 意大利语,
        義大利語
    """,
    "ja": """
        日本語, Japanisch, japonés, japonais, giapponese, 일본어, 일어, Japans, japoński, japonês, японский,
        日语, 日語, 日文
    """,
    "ko": """
        한국어, 조선말, Koreanisch, coreano, coréen, 韓国語, Koreaans, koreański, корейский, 韩语, 韓語,
        韩文, 韓文
    """,
    "lt": "lietuvių",
    "lv": "latviešu",
    "nl": """
        Nederlands, Niederländisch, neerlandés, néerlandais, olandese, オランダ語, 네덜란드어, niderlandzki,
        holandês, нидерландский, 荷兰语, 荷蘭語
    """,
    "no": "norsk",
    "pl": """
        polski, Polnisch, polaco, polonais, polacco, ポーランド語, 폴란드어, Pools, polonês, польский,
        波兰语, 波蘭語
    """,
    "pt": """
        português, Portugiesisch, portugués, portugais, portoghese, ポルトガル語, 포르투갈어, Portugees,
        portugalski, португальский, 葡萄牙语, 葡萄牙語
    """,
    "ro": "română",
    "ru": "русский, Russisch, ruso, russe, russo, ロシア語, 러시아어, rosyjski, 俄语, 俄語",
    "sk": "slovenčina",
    "sl": "slovenščina",
    "sr": "српски",
    "sv": "svenska",
    "th": "ไทย, ภาษาไทย",
    "tr": "Türkçe",
    "uk": "українська",
    "vi": "Tiếng Việt",
    "zh": """
        中文, 汉语, 漢語, Chinesisch, chino, chinois, cinese, 中国語, 중국어, Chinees, chiński, chinês,
        китайский
    """,
    "zh-Hans": "简体中文",
    "zh-Hant": "繁體中文, 正體中文",
}


def _form(name: str) -> str:
    """Returns the same for two spellings of a name; what is in brackets after it does not count."""
    plain = unicodedata.normalize("NFC", name).partition("(")[0].replace("_", " ").replace("-", " ")
    return " ".join(plain.casefold().split()).rstrip(" :")


_SOURCES = frozenset(map(_form, _SOURCE_WORDS.split(",")))
_TARGETS = frozenset(map(_form, _TARGET_WORDS.split(",")))
_TAGS = {_form(name): tag for tag, names in _NAMES.items() for name in names.split(",")}


def is_source(cell: str) -> bool:
    """Whether a cell is a word for the terms of a table."""
    return _form(cell) in _SOURCES


def is_target(cell: str) -> bool:
    """Whether a cell is a word for their translations."""
    return _form(cell) in _TARGETS


def tag_in(cell: str) -> str:
    """Returns the tag of the language that a cell names, such as `English (US)`; any other cell as it is."""
    if is_known(tag := tag_of(cell)):
        return tag
    name = cell.partition("(")[0].strip()
    return _TAGS.get(_form(name)) or (tag if (tag := tag_of(name)) != name else cell)
