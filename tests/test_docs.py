"""What the pages in docs/ list is what there is."""

import dataclasses
import re
from itertools import chain
from pathlib import Path

from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.server.service.open_inference.requests import PARAMETERS
from seq2seq_serve.training.config import TrainingConfig, TransformerConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig


def test_the_page_on_training_lists_every_setting_with_its_default() -> None:
    text = Path("docs/training.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    listed = {name: default for names, defaults in rows for name, default in _defaults(names, defaults)}
    for field in chain.from_iterable(
        map(dataclasses.fields, (TransformerConfig, RecurrentConfig, TrainingConfig))
    ):
        assert field.name in listed, field.name
        if field.default is dataclasses.MISSING:
            assert listed[field.name] == "preset's"
        else:
            assert listed[field.name] == _written(field.default), field.name


def test_the_page_on_protocols_lists_every_parameter() -> None:
    text = Path("docs/protocols.md").read_text(encoding="utf-8")
    for name in PARAMETERS:
        option = OPTIONS[name]
        assert f"\n| `{name}` | {option.form.expected} | {option.help} |\n" in text


def _defaults(names: str, defaults: str) -> list[tuple[str, str]]:
    """Each name of a row with its default; one default is that of all."""
    found = re.findall(r"`(\w+)`", names)
    values = defaults.strip().split(", ")
    return list(zip(found, values * len(found) if len(values) == 1 else values, strict=True))


def _written(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default >= 10_000:
        return f"{default:,}"
    return f"{default:g}" if isinstance(default, float) else str(default)
