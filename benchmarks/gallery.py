"""Draws where a small model of every family looked: `python -m benchmarks.gallery`, as in `make gallery`.

Trains each on built-in data, exports it, serves all from one server, asks each through the gRPC client, and
writes `gallery.md` with pictures of where the models looked. A stopped training goes on where it stopped, and
finished steps are not repeated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.console import Console

from benchmarks.hardware import describe_hardware
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import MANIFEST_FILE, QUESTION, STORY
from seq2seq_serve.client import Client, ClientError, GenerateOptions
from seq2seq_serve.client.attention import save_alignment, save_hops, save_looks
from seq2seq_serve.protos.seq2seq_v1_pb2 import Hypothesis
from seq2seq_serve.protos.sources import Sources
from seq2seq_serve.training.run import RunFolder

_MOST_PIXELS, _COLORS = 900, 128  # of a drawing
_SENTENCE = "오늘은 금요일 입니다"
_STORIES = (
    (
        "Sam walks into the kitchen. Sam picks up an apple. Sam walks into the bedroom. Sam drops the apple.",
        "Where is the apple?",
    ),
    ("Brian is a lion. Julius is a lion. Julius is white. Bernhard is green.", "What color is Brian?"),
)
_PICTURE, _CLIP = 3, 5  # the numbers of the shown files of the test sets


@dataclass(frozen=True)
class Exhibit:
    """A model of the gallery.

    Attributes:
        name: The name of its run, bundle and served model.
        title: What the page calls it.
        preset: The preset of its training.
        max_steps: The number of training steps.
        settings: Fields that replace those of the preset.
        parent: The name of the exhibit whose weights it starts with.
    """

    name: str
    title: str
    preset: str
    max_steps: int
    settings: Mapping[str, object]
    parent: str = ""


_QUICK = {"eval_interval_steps": 250, "warmup_steps": 100, "cooldown_share": 0.5}
_SMALL = {"d_model": 128, "d_hidden": 192, "vocab_size": 2000, "dropout": 0.0, **_QUICK}
_LOOKING = {"eval_interval_steps": 500, "cooldown_share": 0.5}
_HARD = {"attention": "hard", "learning_rate_scale": 0.2, "warmup_steps": 200, **_LOOKING}
# The longest first; a child is late enough to find its parent finished, because it would keep a core waiting.
EXHIBITS = (
    Exhibit("captioner-soft", "Soft attention", "captioner", 2500, _LOOKING),
    Exhibit("clip-captioner", "Attention over time", "clip-captioner", 1300, _LOOKING),
    Exhibit("recurrent", "No attention", "recurrent", 500, _SMALL),
    Exhibit("recurrent-dot", "Dot attention", "recurrent-dot", 750, _SMALL),
    Exhibit("recurrent-additive", "Additive attention", "recurrent-additive", 500, _SMALL),
    Exhibit("transformer", "The Transformer", "demo", 500, _QUICK),
    Exhibit("memory-network", "Three hops over the sentences", "memory-network", 6000, {}),
    Exhibit("captioner-hard", "Hard attention", "captioner", 500, _HARD, "captioner-soft"),
)
_BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}
_TRANSLATORS = "recurrent", "recurrent-dot", "recurrent-additive", "transformer"
_CAPTIONERS = "captioner-soft", "captioner-hard", "clip-captioner"
_HEAD = """# A gallery of attention

A small model of every family, trained on generated data, served by one process and called through gRPC.
`make gallery` writes this page. Hardware: {hardware}."""


def main() -> int:
    """Train, export, serve, ask and draw; returns 0 if done, 1 if it failed, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gallery",
        allow_abbrev=False,
        description="Train and serve a small model of every family, and draw the attention of each.",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/gallery"),
        help="folder of runs and bundles (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder that gets gallery.md and its pictures (default: that of --runs)"
    )
    options = parser.parse_args()
    console = Console(stderr=True)
    start = time.monotonic()
    try:
        make_bundles(options.runs, console)
        page = write_page(options.runs, options.out or options.runs)
    except (ClientError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130
    console.print(f"{time.monotonic() - start:.0f} seconds")
    print(page)
    return 0


def make_bundles(folder: Path, console: Console) -> None:
    """Train and export every exhibit that is not finished yet, as many at once as there are cores.

    Raises:
        RuntimeError: A training or an export failed.
    """
    made: dict[str, Future[None]] = {}

    def make(exhibit: Exhibit) -> None:
        if exhibit.parent:  # submitted before
            made[exhibit.parent].result()
        run, bundle = folder / "runs" / exhibit.name, folder / "bundles" / exhibit.name
        if not RunFolder(run).is_finished:
            console.print(f"training {exhibit.name}, {exhibit.max_steps:,} steps")
            run_command(training_command(run, exhibit), log_of(run))
        if RunFolder(run).is_finished and not (bundle / MANIFEST_FILE).is_file():
            run_command(["export", str(run), str(bundle), "--precision", "fp32"], log_of(run))
        if not (bundle / MANIFEST_FILE).is_file():
            raise RuntimeError(f"{exhibit.name} failed; its log is {log_of(run)}")
        console.print(f"{exhibit.name} is ready")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        try:
            for exhibit in EXHIBITS:
                made[exhibit.name] = threads.submit(make, exhibit)
            for one in made.values():
                one.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def training_command(run: Path, exhibit: Exhibit) -> list[str]:
    """Returns the command that starts or continues a run."""
    command = ["training", "train", exhibit.preset, "--out", str(run), "--resume"]
    if RunFolder(run).is_run:
        return command
    if exhibit.parent:
        command += ["--from", str(run.with_name(exhibit.parent))]
    settings = [f"{name}={value}" for name, value in exhibit.settings.items()]
    return [*command, "--max-steps", str(exhibit.max_steps), *(["--set", *settings] if settings else [])]


def run_command(arguments: list[str], log: Path) -> None:
    """Run a command of this project on one core; its output is added to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        command = [sys.executable, "-m", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=stream, stderr=stream, env=environment, check=False)


def log_of(run: Path) -> Path:
    """Returns the log of a run, which lies beside it."""
    return run.with_name(f"{run.name}.log")


def write_page(folder: Path, out: Path) -> Path:
    """Serve all bundles from one server, ask each model, and write the page; returns its path."""
    pictures = out / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    bundles = [folder / "bundles" / exhibit.name for exhibit in EXHIBITS]
    with serving(bundles) as server, Client(server.address) as client:
        visit = Visit(client, folder, pictures)
        sections = [*visit.translations(), *visit.captions(), *visit.stories()]
    path = out / "gallery.md"
    path.write_text("\n\n".join([_HEAD.format(hardware=describe_hardware()["cpu"]), *sections]) + "\n")
    return path


@dataclass(frozen=True)
class Visit:
    """Asks the models of a server, and draws their answers.

    Attributes:
        folder: The folder of the runs, for the files of the test sets.
        pictures: The folder for the drawings.
    """

    client: Client
    folder: Path
    pictures: Path

    def translations(self) -> Iterator[str]:
        """Yields the section of the translators, with one sentence for all."""
        yield f"## One sentence, four models\n\n> {_SENTENCE}"
        for exhibit in map(_BY_NAME.__getitem__, _TRANSLATORS):
            best = self._ask(exhibit, _SENTENCE)
            text = f"### {exhibit.title}\n\n> {best.text}"
            if best.HasField("attention"):
                save_alignment(best, self.pictures / f"{exhibit.name}.png")
                text += f"\n\n{_image(exhibit)}"
            yield text

    def captions(self) -> Iterator[str]:
        """Yields the sections of the captioners: one picture for two of them, and a clip."""
        yield "## Pictures and a clip"
        for exhibit in map(_BY_NAME.__getitem__, _CAPTIONERS):
            number = _CLIP if exhibit.preset == "clip-captioner" else _PICTURE
            file = RunFolder(self.folder / "runs" / exhibit.name).pictures / "test" / f"{number:05d}.png"
            content = file.read_bytes()
            best = self._ask(exhibit, content)
            form = next(iter(self.client.model(exhibit.name).sources.values()))
            save_looks(best, content, form, self.pictures / f"{exhibit.name}.png")
            make_small(self.pictures / f"{exhibit.name}.png")
            yield f"### {exhibit.title}\n\n> {best.text}\n\n{_image(exhibit)}"

    def stories(self) -> Iterator[str]:
        """Yields the section of the memory network: two stories, each with a question."""
        yield "## Questions about stories"
        exhibit = _BY_NAME["memory-network"]
        for number, (story, question) in enumerate(_STORIES, start=1):
            best = self._ask(exhibit, {STORY: story, QUESTION: question})
            path = self.pictures / f"story-{number}.png"
            save_hops(best, question, path)
            yield f"> {story}\n>\n> {question} **{best.text}**\n\n![{question}](gallery/{path.name})"

    def _ask(self, exhibit: Exhibit, source: Sources) -> Hypothesis:
        has_attention = self.client.model(exhibit.name).has_attention
        options = GenerateOptions(attention=has_attention)
        return self.client.generate(source, model=exhibit.name, options=options).hypotheses[0]


def make_small(path: Path) -> None:
    """Writes a drawing of noisy pictures anew, as large as the page shows it and with fewer colours."""
    with Image.open(path) as drawing:
        small = drawing.convert("RGB")
    small.thumbnail((_MOST_PIXELS, small.height), Image.Resampling.LANCZOS)
    small.quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def _image(exhibit: Exhibit) -> str:
    return f"![{exhibit.title}](gallery/{exhibit.name}.png)"


if __name__ == "__main__":
    sys.exit(main())
