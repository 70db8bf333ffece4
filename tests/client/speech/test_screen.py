"""What a terminal shows, by a small terminal."""

import io
import os
import re
import unicodedata

import pytest

from seq2seq_serve.client.speech.screen import Screen, _rows, width_of

COLUMNS, LINES = 20, 6
_TOKEN = re.compile(r"\x1b\[(\d*)([AJm])|(.)", re.DOTALL)


class Terminal(io.StringIO):
    """Shows what is written; dim characters are in braces. The last row scrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[int, str]] = [{}]
        self.row = self.column = 0
        self._is_dim = False

    def write(self, text: str) -> int:
        for number, command, character in _TOKEN.findall(text):
            if command == "A":
                self.row -= int(number)
                assert self.row >= max(0, len(self.rows) - LINES)
            elif command == "J":
                del self.rows[self.row + 1 :]
                self.rows[self.row] = {c: s for c, s in self.rows[self.row].items() if c < self.column}
            elif command == "m":
                self._is_dim = number == "2"
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0  # a terminal returns the carriage, too
                if self.row == len(self.rows):
                    self.rows.append({})
            elif unicodedata.combining(character):
                self.rows[self.row][self.column - 1] += character
            else:
                width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
                if self.column + width > COLUMNS:
                    self.write("\r\n")
                self.rows[self.row][self.column] = f"{{{character}}}" if self._is_dim else character
                self.column += width
        return len(text)

    @property
    def shown(self) -> list[str]:
        lines = ["".join(s for _, s in sorted(row.items())).replace("}{", "").rstrip() for row in self.rows]
        return lines if lines[-1] else lines[:-1]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def screen(terminal) -> Screen:
    return Screen(terminal, lambda: os.terminal_size((COLUMNS, LINES)))


def test_unstable_text_is_dim_and_replaced_and_lines_stay(screen, terminal):
    screen.draw([], "", " And so")
    assert terminal.shown == ["{And so}"]
    screen.draw([], " And so", " my fell")
    assert terminal.shown == ["And so{ my fell}"]
    screen.draw([], " And so my fellow Americans", " ask")
    assert terminal.shown == ["And so my fellow", "Americans{ ask}"]
    screen.write("And so my fellow Americans.\n")
    assert terminal.shown == ["And so my fellow Ame", "ricans."]
    screen.draw([], "", "")
    screen.draw([], "", " Ask")
    assert terminal.shown == ["And so my fellow Ame", "ricans.", "{Ask}"]
    screen.write("")
    assert terminal.shown == ["And so my fellow Ame", "ricans."]


def test_lines_that_wait_are_above_the_present_one(screen, terminal):
    screen.draw(["It is Friday.", "At last."], " And", " so")
    assert terminal.shown == ["It is Friday.", "At last.", "And{ so}"]
    screen.write("It is Friday.\n  Es ist Freitag.\n")
    screen.draw(["At last."], " And so", "")
    assert terminal.shown == ["It is Friday.", "  Es ist Freitag.", "At last.", "And so"]


def test_what_is_longer_than_the_terminal_shows_its_end(screen, terminal):
    for number in range(30):
        screen.draw([], " word" * number, " tail")
        assert len(terminal.shown) <= LINES - 1
        assert terminal.shown[-1].endswith("tail}")
    screen.write("all words\n")
    assert terminal.shown == ["all words"]


@pytest.mark.parametrize(
    "text", ["오늘은 금요일 입니다 " * 4, "今天是星期五" * 9, "e\u0301a " * 30, "x" * 70]
)
def test_rows_are_as_wide_as_the_terminal_shows_them(screen, terminal, text):
    rows = [*_rows(text, COLUMNS)]
    assert "".join(rows) == text
    assert all(sum(map(width_of, row)) < COLUMNS for row in rows)
    for end in range(0, len(text), 3):
        screen.draw([], text[:end], text[end : end + 5])
    screen.write("end\n")
    assert terminal.shown == ["end"]


def test_control_characters_of_a_text_do_not_reach_the_terminal(screen, terminal):
    screen.draw(["a\x1b[2Jb"], "c\rd", "\x07e")
    screen.write("f\x1bg\n")
    assert terminal.shown == ["f g"]
