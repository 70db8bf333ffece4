"""Files of one form with several names, and those whose names say another kind than they are."""

import io
import zipfile
from pathlib import Path

import docx
import pytest

from seq2seq_serve.documents.kinds import ARCHIVES, FILES, read_file
from seq2seq_serve.documents.segments import WrongFile
from tests.documents.answers import capitals, translated
from tests.documents.test_office import FILES_OF_OFFICES, parts, saved, slides, tables

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


@pytest.mark.parametrize("suffix", sorted(FILES.keys() - ARCHIVES.keys()))
def test_an_archive_with_the_name_of_a_text_is_refused(suffix):
    archive = next(iter(FILES_OF_OFFICES.values()))()
    with pytest.raises(WrongFile, match=r"is an archive \(ZIP\)"):
        read_file(suffix, archive, Path(f"a{suffix}"))


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_of_an_old_office_program_is_refused(suffix):
    with pytest.raises(WrongFile, match=r"old office program \(OLE\).* save it as \.docx"):
        read_file(suffix, OLE, Path(f"a{suffix}"))


def letter() -> bytes:
    document = docx.Document()
    document.add_paragraph("a letter")
    return saved(document.save)


_MACROS = {"vbaProject.bin": OLE, "vbaData.xml": b"<a>\r\n<b  c='d'/></a>"}


@pytest.mark.parametrize(
    ("suffix", "make", "folder", "type_", "text"),
    [
        (".docm", letter, "word", "vnd.ms-word.document.macroEnabled.main", "a letter"),
        (".dotx", letter, "word", "{}wordprocessingml.template.main", "a letter"),
        (".dotm", letter, "word", "vnd.ms-word.template.macroEnabledTemplate.main", "a letter"),
        (".xlsm", tables, "xl", "vnd.ms-excel.sheet.macroEnabled.main", "a cell"),
        (".xltx", tables, "xl", "{}spreadsheetml.template.main", "a cell"),
        (".xltm", tables, "xl", "vnd.ms-excel.template.macroEnabled.main", "a cell"),
        (".pptm", slides, "ppt", "vnd.ms-powerpoint.presentation.macroEnabled.main", "in a cell"),
        (".potx", slides, "ppt", "{}presentationml.template.main", "in a cell"),
        (".potm", slides, "ppt", "vnd.ms-powerpoint.template.macroEnabled.main", "in a cell"),
        (".ppsx", slides, "ppt", "{}presentationml.slideshow.main", "in a cell"),
        (".ppsm", slides, "ppt", "vnd.ms-powerpoint.slideshow.macroEnabled.main", "in a cell"),
    ],
)
def test_templates_and_files_with_macros_keep_their_types_and_macros(suffix, make, folder, type_, text):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, part in parts(make()).items():
            main = b"application/" + type_.format("vnd.openxmlformats-officedocument.").encode() + b"+xml"
            for before in ("wordprocessingml.document", "spreadsheetml.sheet", "presentationml.presentation"):
                old = f"application/vnd.openxmlformats-officedocument.{before}.main+xml".encode()
                part = part.replace(old, main) if name == "[Content_Types].xml" else part
            archive.writestr(name, part)
        for name, part in _MACROS.items():
            archive.writestr(f"{folder}/{name}", part)
    texts, written = translated(f"a{suffix}", content.getvalue(), capitals)
    before, after = parts(content.getvalue()), parts(written)
    assert text in texts
    assert before["[Content_Types].xml"] == after["[Content_Types].xml"]
    assert main in after["[Content_Types].xml"]
    assert {name: after[f"{folder}/{name}"] for name in _MACROS} == _MACROS
    changed = {name for name in before if before[name] != after[name]}
    assert any(text.upper().encode() in after[name] for name in changed)
    assert before.keys() == after.keys()


def test_xhtml_is_read_as_xml():
    """As HTML, a script that ends itself would have hidden the rest."""
    page = (
        '<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml"><head><script src="x"/>'
        '<title>a title</title></head><body><p>Go <a id="y"/><b>now</b><br/></p></body></html>'
    )
    texts, written = translated("a.xhtml", page, capitals)
    assert texts == ["a title", "Go now"]
    assert written == page.replace("a title", "A TITLE").replace("Go", "GO").replace("now", "NOW")


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_a_file_that_is_not_of_its_kind_is_named_by_its_own_suffix(suffix):
    """A template was reported not to be a .docx."""
    for name in (f"a{suffix}", f"A{suffix.upper()}", f"a{suffix}.gz"):
        with pytest.raises(WrongFile, match=rf"the file is not .* \({suffix}\)"):
            read_file(suffix, b"", Path(name))
