import pytest

from docs.page import main, rendered

PAGE = """# Sums

```python
x = 2
print("x is", x)
```

```text
x is 2
```

In between.

```python
x += 1
```

```python
print(x)
```

```text
3
```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_an_output_that_the_code_does_not_print_is_found_and_put_right(page, capsys):
    assert main([str(page), "--check"]) == 0
    page.write_text(PAGE.replace("\n3\n", "\n4\n"), encoding="utf-8")
    assert main([str(page), "--check"]) == 1
    assert f"{page}:23: " in capsys.readouterr().err
    assert main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == PAGE


def test_a_missing_output_is_written_and_one_of_nothing_taken_away():
    assert rendered(PAGE.replace("\n```text\nx is 2\n```\n", "")) == PAGE
    assert rendered(PAGE.replace("x += 1\n```\n", "x += 1\n```\n\n```text\n9\n```\n")) == PAGE


def test_code_that_fails_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        rendered("```python\n1 / 0\n```\n")
