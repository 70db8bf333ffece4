"""Languages by their codes (ISO 639 and BCP 47), as Whisper, M2M100, mBART and NLLB spell the codes."""

from __future__ import annotations

import re

MAX_TAG_LENGTH = 100  # characters of a tag that is looked up; NLLB's have eight

# The shortest code of a language, its other codes, and its English name. NLLB's individual language stands
# for the one that has the short code: arb for ar, npi for ne.
_TABLE = """
    ace Acehnese, acm Mesopotamian Arabic, acq Ta'izzi-Adeni Arabic, aeb Tunisian Arabic,
    af/afr Afrikaans, ajp South Levantine Arabic, ak/aka Akan, am/amh Amharic, apc North Levantine Arabic,
    ar/arb/ara Arabic, ars Najdi Arabic, ary Moroccan Arabic, arz Egyptian Arabic, as/asm Assamese,
    ast Asturian, awa Awadhi, ay/ayr/aym Aymara, az/azj/aze Azerbaijani, azb South Azerbaijani,
    ba/bak Bashkir, ban Balinese, be/bel Belarusian, bem Bemba, bg/bul Bulgarian, bho Bhojpuri,
    bjn Banjar, bm/bam Bambara, bn/ben Bengali, bo/bod Tibetan, br/bre Breton, bs/bos Bosnian,
    bug Buginese, ca/cat Catalan, ceb Cebuano, cjk Chokwe, ckb Central Kurdish, crh Crimean Tatar,
    cs/ces Czech, cy/cym Welsh, da/dan Danish, de/deu German, dik Southwestern Dinka, dyu Dyula,
    dz/dzo Dzongkha, ee/ewe Ewe, el/ell Greek, en/eng English, eo/epo Esperanto, es/spa Spanish,
    et/est/ekk Estonian, eu/eus Basque, fa/pes/fas Persian, ff/fuv/ful Fulah, fi/fin Finnish,
    fj/fij Fijian, fo/fao Faroese, fon Fon, fr/fra French, fur Friulian, fy/fry Western Frisian,
    ga/gle Irish, gd/gla Scottish Gaelic, gl/glg Galician, gn/grn/gug Guarani, gu/guj Gujarati,
    ha/hau Hausa, haw Hawaiian, he/heb/iw Hebrew, hi/hin Hindi, hne Chhattisgarhi, hr/hrv Croatian,
    ht/hat Haitian Creole, hu/hun Hungarian, hy/hye Armenian, id/ind Indonesian, ig/ibo Igbo, ilo Iloko,
    is/isl Icelandic, it/ita Italian, ja/jpn Japanese, jv/jw/jav Javanese, ka/kat Georgian, kab Kabyle,
    kac Jingpho, kam Kamba, kbp Kabiye, kea Kabuverdianu, kg/kon Kongo, ki/kik Kikuyu, kk/kaz Kazakh,
    km/khm Khmer, kmb Kimbundu, kn/kan Kannada, ko/kor Korean, kr/knc/kau Kanuri, ks/kas Kashmiri,
    ku/kmr/kur Kurdish, ky/kir Kyrgyz, la/lat Latin, lb/ltz Luxembourgish, lg/lug Ganda,
    li/lim Limburgish, lij Ligurian, lmo Lombard, ln/lin Lingala, lo/lao Lao, lt/lit Lithuanian,
    ltg Latgalian, lua Luba-Kasai, luo Luo, lus Mizo, lv/lvs/lav Latvian, mag Magahi, mai Maithili,
    mg/plt/mlg Malagasy, mi/mri Maori, min Minangkabau, mk/mkd Macedonian, ml/mal Malayalam,
    mn/khk/mon Mongolian, mni Meitei, mos Mossi, mr/mar Marathi, ms/zsm/msa Malay, mt/mlt Maltese,
    my/mya Burmese, ne/npi/nep Nepali, nl/nld Dutch, nn/nno Nynorsk, no/nb/nob/nor Norwegian,
    nso/ns Northern Sotho, nus Nuer, ny/nya Nyanja, oc/oci Occitan, om/gaz/orm Oromo, or/ory/ori Odia,
    pa/pan Punjabi, pag Pangasinan, pap Papiamento, pl/pol Polish, prs Dari, ps/pbt/pus Pashto,
    pt/por Portuguese, qu/quy/que Quechua, rn/run Rundi, ro/ron Romanian, ru/rus Russian,
    rw/kin Kinyarwanda, sa/san Sanskrit, sat Santali, sc/srd Sardinian, scn Sicilian, sd/snd Sindhi,
    sg/sag Sango, shn Shan, si/sin Sinhala, sk/slk Slovak, sl/slv Slovenian, sm/smo Samoan, sn/sna Shona,
    so/som Somali, sq/als/sqi Albanian, sr/srp Serbian, ss/ssw Swati, st/sot Southern Sotho,
    su/sun Sundanese, sv/swe Swedish, sw/swh/swa Swahili, szl Silesian, ta/tam Tamil, taq Tamasheq,
    te/tel Telugu, tg/tgk Tajik, th/tha Thai, ti/tir Tigrinya, tk/tuk Turkmen, tl/tgl/fil Tagalog,
    tn/tsn Tswana, tpi Tok Pisin, tr/tur Turkish, ts/tso Tsonga, tt/tat Tatar, tum Tumbuka, tw/twi Twi,
    tzm Central Atlas Tamazight, ug/uig Uyghur, uk/ukr Ukrainian, umb Umbundu, ur/urd Urdu,
    uz/uzn/uzb Uzbek, vec Venetian, vi/vie Vietnamese, war Waray, wo/wol Wolof, xh/xho Xhosa,
    yi/ydd/yid Yiddish, yo/yor Yoruba, yue Cantonese, zh/zho/cmn Chinese, zu/zul Zulu
"""
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_ENTRIES = [
    (codes.split("/"), name) for codes, _, name in (one.strip().partition(" ") for one in _TABLE.split(","))
]
_NAMES = {codes[0]: name for codes, name in _ENTRIES}
_TAGS = {name.casefold(): code for code, name in _NAMES.items()} | {
    "chinese (simplified)": "zh-Hans",
    "chinese (traditional)": "zh-Hant",
    "portuguese (brazil)": "pt-BR",
    "pb": "pt-BR",  # as programs of Argos Translate write them
    "zt": "zh-Hant",
}
_SHORTEST = {code: codes[0] for codes, _ in _ENTRIES for code in codes}

# The script of a language that models write in several, by a tag without one (CLDR's likely subtags)
LIKELY_SCRIPTS = {
    "ace": "latn",
    "ar": "arab",
    "bjn": "latn",
    "kr": "latn",
    "ks": "arab",
    "taq": "latn",
    "zh": "hans",
    "zh-cn": "hans",
    "zh-hk": "hant",
    "zh-mo": "hant",
    "zh-sg": "hans",
    "zh-tw": "hant",
}


def subtags(tag: str) -> list[str]:
    """Returns the parts of a tag in lower case, the language as its shortest code: ko, hang of kor_Hang."""
    language, *others = tag.replace("_", "-").casefold().split("-")
    return [_SHORTEST.get(language, language), *others]


def standard_tag(name: str) -> str:
    """Returns the tag (BCP 47) of a language by a model's name, as ko by kor_Hang; empty for other names."""
    language, *others = subtags(tag_of(name))
    if not _LANGUAGE.fullmatch(language):
        return ""
    script = next((part.title() for part in others if len(part) == 4 and language in LIKELY_SCRIPTS), None)
    region = next((part.upper() for part in others if len(part) == 2 and part != "xx"), None)
    return "-".join(part for part in (language, script, region) if part)


def tag_of(name: str) -> str:
    """Returns the tag of a language that is given by its English name; a tag as it is."""
    return _TAGS.get(name.casefold(), name)


def is_same_language(one: str, other: str) -> bool:
    """Whether two tags are of one language, and in one script if both have one; regions do not count."""
    (language, *_), (other_language, *_) = tags = subtags(one), subtags(other)
    scripts = {_script(tag) for tag in tags} - {None}
    return language == other_language and len(scripts) < 2


def is_other_language(tag: str, language: str) -> bool:
    """Whether a tag of a text is not of a language; False if one of the two is empty, so not known."""
    return bool(tag.strip() and language) and not is_same_language(tag, language)


def _script(tag: list[str]) -> str | None:
    return next((part for part in tag[1:] if len(part) == 4), LIKELY_SCRIPTS.get("-".join(tag)))


def is_known(tag: str) -> bool:
    """Whether a tag is that of a language, and not of several, such as mul."""
    return subtags(tag)[0] in _SHORTEST


def name_of(tag: str) -> str:
    """Returns the English name of a language, whatever its script and region; an unknown tag as it is."""
    return _NAMES.get(subtags(tag)[0], tag)
