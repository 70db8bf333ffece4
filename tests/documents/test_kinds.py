"""Files whose names say another kind than they are."""

from pathlib import Path

import pytest

from seq2seq_serve.documents.kinds import ARCHIVES, FILES, read_file
from seq2seq_serve.documents.segments import WrongFile
from tests.documents.test_office import FILES_OF_OFFICES

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
