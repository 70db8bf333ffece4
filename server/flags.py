"""The flags of a model's runners, for every command that runs a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, parse_bytes

_AUTO = "auto"


def add_runner_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `runner_config` reads."""
    runner, add = RunnerConfig(), parser.add_argument

    def count(flag: str, default: int | None, text: str, unit: str = "N") -> None:
        add(flag, type=at_least_one, default=default, metavar=unit, help=text)

    add(
        "--provider",
        choices=[policy.value for policy in ProviderPolicy],
        default=runner.provider.value,
        help="what runs the graphs: require takes CUDA or does not start; prefer takes CUDA if it works and "
        "the bundle has graphs for it, otherwise the CPU, and logs why (default %(default)s)",
    )
    add(
        "--precision",
        choices=(_AUTO, *(precision.value for precision in Precision)),
        default=runner.precision or _AUTO,
        help="precision of the graphs; auto takes the fastest for the provider (default %(default)s)",
    )
    count(
        "--threads", runner.num_threads, "CPU threads per model (default: the CPUs that the process may use)"
    )
    count(
        "--instances",
        runner.num_instances,
        "engines per model, which share its threads, memory and slots: on the CPU several engines with few "
        "threads decode a small model faster than one engine with all threads (default %(default)s)",
    )
    add(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        default=runner.cuda_graphs,
        help="on CUDA launch each kernel of a step separately, instead of replaying captured steps",
    )
    add(
        "--cuda-libraries",
        type=Path,
        default=runner.cuda_libraries,
        metavar="FOLDER",
        help="folder with the libraries of CUDA and cuDNN, also in its subfolders (default: the nvidia-* "
        "packages of this Python, then the system's library path)",
    )
    add(
        "--memory-budget",
        type=parse_size,
        default=runner.memory_budget_bytes,
        metavar="SIZE",
        help="size of the cache and memory of all slots of a model, in bytes or with KiB, MiB, GiB "
        f"(default {runner.memory_budget_bytes // 2**20}MiB)",
    )
    limit = "(default: the model's limit)"
    count(
        "--max-slots", runner.max_slots, "largest number of sequences decoded at once (default %(default)s)"
    )
    count("--max-source-length", runner.max_source_length, f"room for a source {limit}", "TOKENS")
    count("--max-target-length", runner.max_target_length, f"room for a target {limit}", "TOKENS")


def runner_config(options: argparse.Namespace) -> RunnerConfig:
    """Returns the settings that the flags gave."""
    return RunnerConfig(
        shares_threads=True,
        provider=ProviderPolicy(options.provider),
        precision=None if options.precision == _AUTO else Precision(options.precision),
        num_threads=options.threads,
        num_instances=options.instances,
        cuda_graphs=options.cuda_graphs,
        cuda_libraries=options.cuda_libraries,
        memory_budget_bytes=options.memory_budget,
        max_slots=options.max_slots,
        max_source_length=options.max_source_length,
        max_target_length=options.max_target_length,
    )


def parse_size(text: str) -> int:
    """Returns the bytes of a flag such as `512MiB`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least_one(text: str) -> int:
    """Returns the number of a flag that cannot be 0."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}, and must be at least 1")
    return int(text)
