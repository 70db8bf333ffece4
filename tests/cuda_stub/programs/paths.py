"""Walks every path of the runner on the stub, a section of the log each: `BUNDLE PRECISION [definitions]`.

With `definitions`, graphs run without the project's own operators. Prints whether the runner captures steps.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.engine.plan import Move
from seq2seq_serve.server.engine.request import Beam, Constraints, Sampling
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner
from tests.cuda_stub.programs.common import NUM_SLOTS, SOURCES, make_runner, mark, requests_for, rows_for

_PREFIX = (5,) * 70
_PLAIN: dict[str, Any] = {}


class Paths:
    """A warm runner whose first rows are encoded.

    Attributes:
        adapter: The place of the rows' adapter, if the bundle takes any.
    """

    def __init__(self, runner: OnnxRunner, adapter: int) -> None:
        self.runner, self.adapter = runner, adapter
        self.requests = requests_for(SOURCES)
        self.steady_rows: tuple[Sequence, ...] = ()

    def encode(self) -> None:
        self.runner.encode(0, self.requests)

    def encode_longer(self) -> None:
        self.runner.encode(0, requests_for([[5] * length + [2] for length in range(20, 20 + NUM_SLOTS)]))

    def encode_uncaptured(self) -> None:
        """As for sources beyond the shapes that are captured."""
        self.runner._encode(0, self.requests, 0)

    def step(self) -> None:
        self._step(_PLAIN, _PLAIN, _PLAIN)

    def step_of_one(self) -> None:
        self._step(_PLAIN)

    def prefill(self) -> None:
        self._prefill(prefix_ids=_PREFIX)

    def score(self) -> None:
        self._prefill(prefix_ids=_PREFIX, is_score=True)

    def align(self) -> None:
        self.runner.align(0, 0, _PREFIX, 2)

    def align_later(self) -> None:
        self.runner.align(1, 64, _PREFIX[:10], 3)

    def align_one(self) -> None:
        self.runner.align(1, 64, _PREFIX[:1], 3)

    def beam(self) -> None:
        self._step({"beam": Beam(4)}, _PLAIN, _PLAIN)

    def log_probabilities(self) -> None:
        self._step({"log_probabilities": True, "num_alternatives": 3}, _PLAIN)

    def suppress(self) -> None:
        self._step(_constrained(suppressed_token_ids=frozenset({7, 8})), _PLAIN, _PLAIN)

    def bias(self) -> None:
        suppressed = _constrained(suppressed_token_ids=frozenset(range(4, 200)))
        self._step(_constrained(logit_bias={5: 1.0}), suppressed, _PLAIN)

    def repetition(self) -> None:
        constraints = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
        self._step(_constrained(**constraints), _PLAIN, _PLAIN)

    def sample(self) -> None:
        self._step(_sampled(), _sampled(temperature=0.5), _sampled(min_p=0.1))

    def sample_top_k(self) -> None:
        self._step(_sampled(top_k=3), _sampled(top_k=50), _PLAIN)

    def sample_top_p(self) -> None:
        self._step(_sampled(top_p=0.9), _PLAIN, _sampled(top_p=0.5))

    def sample_everything(self) -> None:
        suppressed = _constrained(suppressed_token_ids=frozenset({7}))
        self._step(
            suppressed | _sampled(top_k=5, top_p=0.9) | {"num_alternatives": 3}, _PLAIN, {"beam": Beam(2)}
        )

    def move(self) -> None:
        self.runner.move([Move(0, 1, 5, 3), Move(2, 3, 5, 3)])

    def write_adapter(self) -> None:
        if self.adapter >= 0:
            self.runner.write_adapter(self.adapter, {})
            self.requests = [replace(request, adapter=self.adapter) for request in self.requests]
            self.runner.encode(0, self.requests)

    def first_step(self) -> None:
        self.steady_rows = rows_for(self.runner, self.requests)
        self.runner.step(self.steady_rows)

    def steady_step(self) -> None:
        """As the engine takes it: the rows are those of the step before."""
        self.runner.step(self.steady_rows)

    def _step(self, *options: dict[str, Any]) -> None:
        requests = [replace(request, **one) for request, one in zip(self.requests, options, strict=False)]
        selected = self.runner.step(rows_for(self.runner, requests))
        assert not selected.failures, selected.failures

    def _prefill(self, **options: Any) -> None:
        requests = [replace(request, **options) for request in self.requests]
        rows = rows_for(self.runner, requests)
        for row in rows:
            row.token_ids.extend(_PREFIX)
        self.runner.prefill(0, rows)


PATHS: list[Callable[[Paths], None]] = [
    path for name, path in vars(Paths).items() if not name.startswith("_")
]


def _constrained(**options: Any) -> dict[str, Any]:
    return {"constraints": Constraints(**options)}


def _sampled(**options: Any) -> dict[str, Any]:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1} | options
    return {"sampling": Sampling(**settings)}


def main(bundle: Path, precision: Precision) -> None:
    runner = make_runner(bundle, precision)
    mark("warm_up")
    runner.warm_up()
    paths = Paths(runner, 0 if load_bundle(bundle).manifest.adapted_maps else -1)
    for path in PATHS:
        mark(path.__name__)
        path(paths)
    mark("end")
    print("captured" if runner.captures_steps else "not captured")


if __name__ == "__main__":
    if sys.argv[3:] == ["definitions"]:
        kernels.library = lambda *_: None
    main(Path(sys.argv[1]), Precision(sys.argv[2]))
