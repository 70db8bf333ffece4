"""What the pages in docs/ list is what there is."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.server.service.open_inference.requests import PARAMETERS
from seq2seq_serve.training.config import ModelConfig, TrainingConfig, TransformerConfig
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig

_LAYERS = {"num_encoder_layers", "num_decoder_layers"}  # in the table of every model


def test_the_page_on_settings_lists_every_setting_with_its_default() -> None:
    text = Path("docs/training-settings.md").read_text(encoding="utf-8")
    common = {field.name for field in dataclasses.fields(ModelConfig)}
    tables: dict[str, type[Any]] = {
        "every model": ModelConfig,
        "captioner": CaptionerConfig,
        "memory network": MemoryNetworkConfig,
        "Transformer": TransformerConfig,
        "recurrent": RecurrentConfig,
        "recipe": TrainingConfig,
    }
    for title, config in tables.items():
        _, _, table = text.partition(f"| {title} | default | |\n")
        rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines()[1:]]
        listed = {name: default for names, defaults in rows for name, default in _defaults(names, defaults)}
        fields = {field.name: field.default for field in dataclasses.fields(config)}
        if config is ModelConfig:
            assert listed.keys() >= _LAYERS
        else:
            fields = {name: default for name, default in fields.items() if name not in common}
        if issubclass(config, TransformerConfig | RecurrentConfig):
            fields = {name: default for name, default in fields.items() if name not in _LAYERS}
        assert {name: listed.get(name) for name in fields} == {
            name: "preset's" if default is dataclasses.MISSING else _written(default)
            for name, default in fields.items()
        }


def test_the_page_on_protocols_lists_every_parameter() -> None:
    text = Path("docs/protocols.md").read_text(encoding="utf-8")
    for name in PARAMETERS:
        option = OPTIONS[name]
        assert f"\n| `{name}` | {option.form.expected} | {option.help} |\n" in text


def test_every_link_between_pages_leads_to_a_file_and_its_heading() -> None:
    links = [
        (page, *link.partition("#")[::2])
        for page in [*Path().glob("*.md"), *Path("docs").glob("*.md"), *Path("benchmarks").glob("*.md")]
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert len(links) > 100
    broken = []
    for page, name, heading in links:
        file = page.parent / name if name else page
        if not file.exists() or (heading and heading not in _headings(file)):
            broken.append(f"{page}: {name}#{heading}")
    assert not broken


def _headings(page: Path) -> set[str]:
    """The names that a page's headings have in links, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


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
