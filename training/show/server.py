"""The web server of the page of runs. It reads their folders at each request.

The page fetches nothing from elsewhere. Requests of other sites' pages are refused, as by the client's page.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from seq2seq_serve.origins import is_address, named_host, own_names
from seq2seq_serve.page import STYLE
from seq2seq_serve.training.run import RunFolder

PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {"/": PAGE / "index.html", "/show.js": PAGE / "show.js", "/style.css": PAGE / "style.css"}
_FILES |= {"/page.css": STYLE}
_MOST_POINTS = 400  # of a curve: more cannot be told apart on a screen
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CURVES = {
    "train": ("loss", "learning_rate", "tokens_per_second"),
    "dev": ("loss", "bleu", "chrf", "accuracy", "wer", "cer"),
}


def describe_run(path: Path) -> dict[str, Any]:
    """What the page shows of a run: its facts, curves and samples.

    Raises:
        ValueError: The folder does not hold a run, or a file of it is damaged.
    """
    folder = RunFolder(path)
    if not folder.is_run:
        raise ValueError(f"{path} is not a training run: there is no {folder.config_file.name} in it")
    config = folder.read_config()
    lines = folder.read_metrics() if folder.metrics_file.is_file() else []
    summary = folder.read_summary() if folder.is_finished else None
    steps = [line["step"] for line in lines]
    return {
        "name": path.resolve().name,
        "preset": config.preset,
        "corpus": config.corpus,
        "parent": config.parent,
        "step": max(steps, default=0),
        "max_steps": config.training.max_steps,
        "seconds": next((line["seconds"] for line in reversed(lines) if "seconds" in line), 0),
        "result": summary.scores if summary else "",
        "curves": {
            f"{kind} {name}": _curve([line for line in lines if line["kind"] == kind], name)
            for kind, names in _CURVES.items()
            for name in names
        },
        "samples": folder.read_samples(),
    }


def serve(paths: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """Returns a server of the page, which listens already.

    Raises:
        OSError: The address cannot be used.
        ValueError: A folder does not hold a run.
    """
    for path in paths:
        describe_run(path)
    return _Server((host, port), partial(_Handler, paths, own_names(host)))


class _Server(ThreadingHTTPServer):
    """Listens on addresses of both versions of IP."""

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _curve(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Steps and values, of a long curve the means of equal stretches."""
    points = [(line["step"], line[name]) for line in lines if name in line and math.isfinite(line[name])]
    size = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str], *arguments: Any) -> None:
        self._paths = paths
        self._names = names
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answers with a file of the page, or with the runs."""
        name = named_host({key.lower(): value for key, value in self.headers.items()})
        if name is None or not (name in self._names or is_address(name)):
            self._answer(403, "text/plain", b"only the page itself may ask here\n")
        elif self.path == "/api/runs":
            try:
                content = json.dumps({"runs": list(map(describe_run, self._paths))}, ensure_ascii=False)
                self._answer(200, "application/json", content.encode())
            except (OSError, ValueError) as error:
                self._answer(500, "application/json", json.dumps({"error": str(error)}).encode())
        elif self.path in _FILES:
            file = _FILES[self.path]
            self._answer(200, f"{_TYPES[file.suffix]}; charset=utf-8", file.read_bytes())
        else:
            self._answer(404, "text/plain", b"there is no such page\n")

    def log_message(self, *_arguments: Any) -> None:
        """Requests are not logged."""

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", _POLICY),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
