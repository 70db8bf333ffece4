import io

from seq2seq_serve.client.progress import Progress


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def shown(**arguments) -> tuple[Progress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Progress(stream, clock=clock, **arguments), stream, clock


def test_the_line_is_rewritten_a_few_times_a_second():
    progress, stream, clock = shown(is_shown=True, num_lines=7500, num_skipped=100)
    for number in range(1, 65):
        clock.now += 1 / 16
        progress.show(100 + number, 2)
    lines = stream.getvalue().split("\r\x1b[K")
    assert len(lines) == 1 + 16
    assert lines[1] == "104 of 7500 lines, 16 a second, 2 failed, 0:07:42 left"
    progress.close(164, 0)
    assert stream.getvalue().endswith("\r\x1b[K164 of 7500 lines, 16 a second, 0:07:38 left\n")


def test_messages_stand_above_the_line():
    progress, stream, clock = shown(is_shown=True, num_lines=None)
    progress.write("first\n")
    clock.now += 1
    progress.show(5, 0)
    progress.write("second\n")
    assert stream.getvalue() == "first\n\r\x1b[K5 lines, 5 a second\r\x1b[Ksecond\n5 lines, 5 a second"


def test_only_messages_are_written_where_there_is_no_terminal():
    progress, stream, clock = shown(is_shown=False, num_lines=5)
    clock.now += 1
    progress.show(3, 0)
    progress.write("a message\n")
    progress.close(5, 0)
    assert stream.getvalue() == "a message\n"
