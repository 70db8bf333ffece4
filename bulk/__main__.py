"""Translate files without a server: `python -m bulk bundles/demo --input corpus.txt --output translated`."""

from __future__ import annotations

import argparse
import asyncio
import glob
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

# No reports to Microsoft; the engines have the processor, not the threads of tokenizers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads wait without sleeping

from seq2seq_serve.commands import Parser, add_version, needs_extra, program, write_any_text

with needs_extra("server,cpu", __name__):
    from seq2seq_serve.bulk.engine import Job, start_worker
    from seq2seq_serve.bundle.manifest import Bundle, BundleError, load_bundle
    from seq2seq_serve.client.files.documents import document_suffix, is_software
    from seq2seq_serve.client.files.formats import FORMATS, Writer, check_formats
    from seq2seq_serve.client.files.glossary import problem_of_terms, with_glossary
    from seq2seq_serve.client.files.memory import TranslationMemory, memory_count, read_memory
    from seq2seq_serve.client.files.pairs import languages_of, standard_languages
    from seq2seq_serve.client.files.plan import (
        ERRORS_FOLDER,
        JSONL,
        PARQUET,
        PLAN_FILE,
        JobError,
        Plan,
        settings_of,
    )
    from seq2seq_serve.client.files.run import AnyWorker, RunProgress, plan_run
    from seq2seq_serve.client.files.worker import RunFiles, WorkerLost
    from seq2seq_serve.client.flags import (
        TARGET_OPTIONS,
        add_generation_flags,
        add_record_flags,
        add_terms_flags,
        given_options,
    )
    from seq2seq_serve.client.progress import Progress
    from seq2seq_serve.documents.kinds import DOCUMENTS
    from seq2seq_serve.documents.segments import WrongFile
    from seq2seq_serve.server.config import RunnerConfig
    from seq2seq_serve.server.runner.sizing import size_up
    from seq2seq_serve.server.settings import Count, add_flags, override, read

_RUNNER = RunnerConfig(shares_threads=True)  # the defaults of its flags

_log = logging.getLogger("seq2seq_serve.bulk")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    write_any_text()
    options.generation = given_options(options)
    if problem := problem_of_terms(options.generation):
        parser.error(f"--terms: {problem}")
    try:
        options.runner = override(_RUNNER, vars(options))
    except ValueError as error:
        parser.error(str(error))
    if options.workers and options.ray is None:
        parser.error("--workers needs --ray: on one machine there is one worker, with all --threads")
    if options.generation.temperature and not options.generation.HasField("seed"):
        parser.error("--temperature needs --seed, so that a shard that runs twice has the same targets")
    try:
        plan, files = _plan(options)
        return asyncio.run(_translate(options, plan, files))
    except (JobError, BundleError) as error:
        _report(f"error: {error}")
        return 2
    except WorkerLost as error:
        return _report(f"error: {error}")
    except OSError as error:
        _report(f"error: {error.filename or 'output'}: {error.strerror or error}")
        return 2 if isinstance(error, WrongFile) else 1
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        _report("interrupted: run the same command again to continue")
        return 130 if isinstance(error, KeyboardInterrupt) else 143


def _memory(options: argparse.Namespace, bundle: Bundle) -> TranslationMemory | None:
    """Returns the translations of files between the languages of the options and of the bundle."""
    if not options.memory:
        return None
    return read_memory(*options.memory, **languages_of(options.generation, bundle.manifest))


def _plan(options: argparse.Namespace) -> tuple[Plan, RunFiles]:
    """Returns the plan of the output folder, made now if there is none, and what all workers share."""
    folder = options.output.absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise JobError(f"--output {folder} is not a folder, and must be one: give another name")
    inputs = _inputs(options.input, folder)
    output_format = check_formats(inputs, options.format, is_text=options.kind is not None)
    num_hypotheses = max(1, options.generation.num_hypotheses)
    if num_hypotheses > 1 and output_format not in (JSONL, PARQUET):
        raise JobError("--num-hypotheses needs --format jsonl: a line of text has only the best one")
    bundle = load_bundle(options.bundle, checks_content=False)
    memory = _memory(options, bundle)
    options.generation = with_glossary(options.generation, options.glossary, bundle.manifest)
    if not (folder / PLAN_FILE).exists():
        if options.ray is None:  # the machines of a cluster may be others
            _check_fits(bundle, options.runner)
        sys.stderr.write("reading all inputs, to find the shards\n")
    settings = {
        "bundle_version": bundle.version,
        "precision": options.runner.precision or "auto",
        "max_source_length": options.runner.max_source_length,
        "max_target_length": options.runner.max_target_length,
        "options": settings_of(options.generation),
        "text_field": options.field,
        "target_field": options.target_field,
        "format": output_format,
        "keeps_placeholders": options.keeps_placeholders if any(map(is_software, inputs)) else None,
        "memory": None if memory is None else memory.digest(),
    }
    advice = f"give another --output, or remove {folder / PLAN_FILE} and the shards beside it"
    languages = standard_languages(options.generation, bundle.manifest)
    plan = plan_run(folder, inputs, settings, options.shard_lines, advice, languages)
    writer = Writer(folder, output_format, options.target_field, num_hypotheses, languages)
    return plan, RunFiles(options.field, writer, plan.inputs, memory)


def _check_fits(bundle: Bundle, runner: RunnerConfig) -> None:
    """Raises JobError if the engine's settings or a draft model do not fit the bundle or this machine."""
    try:
        size_up(bundle, runner)
    except ValueError as error:
        raise JobError(f"{bundle.path}: {error}") from error


def _inputs(patterns: Sequence[str], output: Path) -> list[Path]:
    """Returns the files that the patterns name, by pattern and name, without those of the output."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = sorted(glob.glob(pattern, recursive=True)) or [pattern]  # noqa: PTH207  # they may be absolute
        # Not `resolve`: the name of a link says what its file is.
        found |= dict.fromkeys(Path(os.path.abspath(path)) for path in paths)  # noqa: PTH100
    inputs = [path for path in found if not path.is_relative_to(output) and not path.is_dir()]
    for path in inputs:
        if not path.is_file():
            raise JobError(f"there is no file {path}")
    if not inputs:
        raise JobError(f"--input {' '.join(patterns)} names no file outside of the output")
    return inputs


async def _translate(options: argparse.Namespace, plan: Plan, files: RunFiles) -> int:
    number, num_parts = options.part
    writer = files.writer
    shards = plan.shards[number::num_parts]
    waiting = [shard for shard in shards if not writer.is_done(shard)]
    num_lines = sum(shard.num_lines for shard in shards)
    num_skipped = num_lines - sum(shard.num_lines for shard in waiting)
    progress = Progress(
        sys.stderr, is_shown=sys.stderr.isatty(), num_lines=num_lines, num_skipped=num_skipped
    )
    logging.basicConfig(stream=progress, format="%(message)s", force=True)
    for name in ("seq2seq_serve.bulk", "seq2seq_serve.client.files"):
        logging.getLogger(name).setLevel(logging.INFO)
    _log.info("%d of %d shards are done already", len(shards) - len(waiting), len(shards))
    with_texts = {shard.input for shard in plan.shards if shard.num_lines}
    for name in plan.inputs.keys() - with_texts:
        _log.warning("warning: %s: 0 texts", name)
    job = Job(
        options.bundle.absolute(), options.runner, options.generation, files, options.keeps_placeholders
    )
    start, num_workers = _workers(options, job)
    if not waiting:
        sys.stdout.write(f"nothing is left to do: {options.output} has all {len(shards)} shards\n")
        return 0
    run, started = RunProgress(), time.monotonic()
    try:
        await run.translate(waiting, start, num_workers, progress)
    except JobError:
        # For the corrected command. Other parts may be at work by the plan.
        if num_parts == 1 and not any(writer.is_done(shard) for shard in plan.shards):
            (writer.folder / PLAN_FILE).unlink()
        raise
    finally:
        progress.close(num_skipped + run.num_lines, run.num_failed_lines)
    seconds = time.monotonic() - started
    sys.stdout.write(
        f"{run.num_lines} lines in {seconds:.1f} seconds ({run.num_lines / seconds:.0f} a second), "
        f"{run.num_failed_lines} of them without a target; shards left out: {len(run.failed)}\n"
    )
    for name, number, num_more, problem in run.flaws.warnings(options.generation):
        kind = "text" if document_suffix(Path(name)) else "line"
        more = f" and {num_more} more" if num_more else ""
        _log.warning("warning: %s: %s %d%s: %s", name, kind, number, more, problem)
    if files.memory is not None:
        _log.info(memory_count(run.num_from_memory))
    if run.num_failed_lines:
        _log.warning("%s has the reasons, by line", options.output / ERRORS_FOLDER)
    return 1 if run.failed else 0


def _workers(options: argparse.Namespace, job: Job) -> tuple[Callable[[], Awaitable[AnyWorker]], int]:
    """Returns a function that starts a worker, and the number of workers."""
    if options.ray is None:
        return partial(start_worker, job), 1
    with needs_extra("ray", __name__):
        from seq2seq_serve.bulk.cluster import connect
    return connect(options.ray, job, options.workers)


def _report(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("bulk"),
        description="Translate the lines of files with a bundle, without a server. The inputs are cut into "
        "shards, and each shard becomes a file in the folder --output, which appears when it is complete. "
        "After an interruption or a kill, run the same command again: every line is in the output once. "
        "A line that cannot be translated has an empty target, and the folder _errors of the output has the "
        "reason. The exit code is 0 if all shards are complete, 2 if the command must be corrected, and "
        "otherwise 1.",
        epilog="examples: %(prog)s bundles/demo --input 'corpus/*.jsonl.gz' --field ko --output translated; "
        "cat translated/corpus-*.txt > corpus.en",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_version(parser)
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by `python -m export`")
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of text, JSON lines (.jsonl), Parquet (.parquet) or documents "
        f"({', '.join(DOCUMENTS)}), or patterns such as 'corpus/**/*.txt'; .gz is decompressed",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder for the shards and the plan")
    add(
        "--format",
        choices=FORMATS,
        help="format of the output (default: that of the inputs); text has one target on each line, the "
        "others have the whole records with the new fields; a document stays a document",
    )
    add_record_flags(parser)
    add(
        "--shard-lines",
        type=partial(read, Count),
        default=20_000,
        metavar="N",
        help="maximum number of lines of a shard (default %(default)s)",
    )
    add(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="only every N-th shard, from the I-th on, counted from 0: for N machines with one output "
        "folder, such as the pods of an indexed Kubernetes Job; all other flags must be the same on each",
    )
    add(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster, such as auto or 10.0.0.7:6379; every node needs the bundle, the inputs "
        "and the output under the same paths",
    )
    add(
        "--workers",
        type=partial(read, Count),
        metavar="N",
        help="with --ray: workers, each with --threads CPUs (1) and, with --provider require, a GPU "
        "(default: as many as fit on the nodes)",
    )
    add_flags(parser, _RUNNER)
    add_terms_flags(parser)
    add_generation_flags(parser, TARGET_OPTIONS)
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, num_parts = text.partition("/")
    if not (number.isdecimal() and num_parts.isdecimal() and int(number) < int(num_parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 0/4, the first of four")
    return int(number), int(num_parts)


if __name__ == "__main__":
    sys.exit(main())
