"""The English names of languages by their codes (ISO 639), as Whisper and M2M100 spell the codes."""

from __future__ import annotations

_TABLE = """
    af Afrikaans, am Amharic, ar Arabic, as Assamese, ast Asturian, az Azerbaijani, ba Bashkir,
    be Belarusian, bg Bulgarian, bn Bengali, bo Tibetan, br Breton, bs Bosnian, ca Catalan, ceb Cebuano,
    cs Czech, cy Welsh, da Danish, de German, el Greek, en English, eo Esperanto, es Spanish, et Estonian,
    eu Basque, fa Persian, ff Fulah, fi Finnish, fo Faroese, fr French, fy Western Frisian, ga Irish,
    gd Scottish Gaelic, gl Galician, gu Gujarati, ha Hausa, haw Hawaiian, he Hebrew, hi Hindi,
    hr Croatian, ht Haitian Creole, hu Hungarian, hy Armenian, id Indonesian, ig Igbo, ilo Iloko,
    is Icelandic, it Italian, ja Japanese, jw Javanese, jv Javanese, ka Georgian, kk Kazakh, km Khmer,
    kn Kannada, ko Korean, la Latin, lb Luxembourgish, lg Ganda, ln Lingala, lo Lao, lt Lithuanian,
    lv Latvian, mg Malagasy, mi Maori, mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay,
    mt Maltese, my Burmese, ne Nepali, nl Dutch, nn Nynorsk, no Norwegian, ns Northern Sotho, oc Occitan,
    or Odia, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, ro Romanian, ru Russian, sa Sanskrit,
    sd Sindhi, si Sinhala, sk Slovak, sl Slovenian, sn Shona, so Somali, sq Albanian, sr Serbian,
    ss Swati, su Sundanese, sv Swedish, sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, tk Turkmen,
    tl Tagalog, tn Tswana, tr Turkish, tt Tatar, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, wo Wolof,
    xh Xhosa, yi Yiddish, yo Yoruba, yue Cantonese, zh Chinese, zu Zulu
"""
_NAMES = {code: name for code, _, name in (pair.strip().partition(" ") for pair in _TABLE.split(","))}


def name_of(code: str) -> str:
    """Returns the English name of a language, also of a code with a region; an unknown code as it is."""
    return _NAMES.get(code.replace("_", "-").split("-")[0].casefold(), code)
