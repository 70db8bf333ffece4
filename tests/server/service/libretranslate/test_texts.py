"""How documents are read, and what their memory counts as."""

import asyncio
from contextlib import ExitStack

import pytest

from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.libretranslate.fields import Fields
from seq2seq_serve.server.service.libretranslate.texts import read_file
from seq2seq_serve.server.service.shares import Shares
from seq2seq_serve.server.telemetry.record import Caller
from tests.documents.attacks import word_file


def held_for(num_bytes: int) -> int:
    """Reads a Word document with a long text; returns what is counted for it."""
    content = word_file(f"<w:p><w:r><w:t>{'a ' * (num_bytes // 2)}</w:t></w:r></w:p>")
    assert len(content) < 100_000
    fields = Fields([], False, "ko", "en", False, 0, GenerateOptions(), True, "", content, "a.docx")
    shares = Shares(2**40, "{} bytes")

    class Counted(Call):
        async def room(self, num_bytes):
            return shares.take("a", num_bytes)

    with ExitStack() as held:
        asyncio.run(read_file(fields, Counted(request_id="1", caller=Caller("a")), held))
        return shares.held.total()


def test_the_memory_of_a_word_document_is_that_of_its_unpacked_texts():
    """It was that of the file: 60 to 240 MiB counted as 30."""
    assert held_for(2**22) > 2**24 + held_for(2**10)
    with pytest.raises(InvalidRequest, match="at most 8388608 are read"):
        held_for(2**23)
