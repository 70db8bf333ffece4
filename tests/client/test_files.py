import io
from pathlib import Path

import pytest

from seq2seq_serve.client.files import WrongOutput, count_lines, skip_answered
from seq2seq_serve.client.output import to_json

TEXTS = ["오늘은", "", "금요일", "  ", "입니다", "a", "b"]


def answer(text: str, lines_each: int, *, as_json: bool) -> bytes:
    """As the command writes it."""
    if as_json:
        return (to_json({"source": text, "hypotheses": [{"text": text * 2}]}) + "\n").encode()
    return b"".join(f"{text.strip()} {i}\n".encode() if text.strip() else b"\n" for i in range(lines_each))


@pytest.mark.parametrize(("lines_each", "as_json"), [(1, False), (3, False), (1, True)])
def test_an_output_cut_at_any_byte_becomes_what_an_undisturbed_run_writes(lines_each, as_json):
    whole = b"".join(answer(text, lines_each, as_json=as_json) for text in TEXTS)
    for num_bytes in range(len(whole) + 1):
        texts, output = iter(TEXTS), io.BytesIO(whole[:num_bytes])
        num_answered = skip_answered(texts, output, lines_each, as_json=as_json)
        rest = list(texts)
        assert rest == TEXTS[num_answered:]
        output.write(b"".join(answer(text, lines_each, as_json=as_json) for text in rest))
        assert output.getvalue() == whole


@pytest.mark.parametrize(
    ("content", "as_json", "message"),
    [
        (b"x\n" * 2, False, "it does not answer line 2 of the input"),
        (answer("a", 1, as_json=True), True, "it does not answer line 1 of the input"),
        (b"[1]\n", True, "it does not answer line 1 of the input"),
        (b"no JSON\n", True, "it does not answer line 1 of the input"),
        (b"x\n\nx\n\nx\nx\nx\nx\n", False, "it has more answers than the input has lines"),
    ],
)
def test_an_output_of_something_else_is_left_as_it_is(content, as_json, message):
    output = io.BytesIO(content)
    with pytest.raises(WrongOutput, match=message):
        skip_answered(iter(TEXTS), output, 1, as_json=as_json)
    assert output.getvalue() == content


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\n\nb", b"\n" * 3 * 2**20])
def test_lines_are_counted_as_they_are_read(tmp_path, content):
    path = tmp_path / "in.txt"
    path.write_bytes(content)
    assert count_lines(path) == len(content.splitlines())
    assert count_lines(tmp_path / "none") is None
    assert count_lines(path.rename(tmp_path / "in.txt.GZ")) is None  # its bytes were counted
    assert count_lines(Path("-")) is None
