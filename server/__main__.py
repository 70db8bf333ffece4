"""Serve bundles: `python -m server bundles/demo --port 50051 --metrics-port 9464`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# gRPC's own log repeats in its words what our messages say; read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# ONNX Runtime reports every session to its maker unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Texts are cut into tokens on threads of our own; the library's would compete with those of the engines.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bundle.names import Precision
from server import VERSION
from server.app import serve
from server.backlog import QueueLimits
from server.check import check
from server.config import LOG_FORMATS, LOG_LEVELS, ModelConfig, ServerConfig, TlsFiles, parse_bytes
from server.device import ProviderPolicy
from server.loading import load_model
from server.logs import configure_logging
from server.settings import parse_settings
from server.sizing import RunnerConfig

_AUTO = "auto"
# What a model may have otherwise than the others: `[models.NAME]` in the file that --config names.
_MODEL_SETTINGS = (
    "provider",
    "precision",
    "memory_budget",
    "max_slots",
    "max_source_length",
    "max_target_length",
    "max_waiting_requests",
    "max_waiting_tokens",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = _parser()
    options = parse_settings(parser, arguments, os.environ, _MODEL_SETTINGS)
    if not options.bundles and options.repository is None:
        parser.error("there is nothing to serve: name a BUNDLE, or a --repository")
    try:
        config = _config(options)
    except ValueError as error:
        parser.error(str(error))
    configure_logging(config.log_level, config.log_format)
    try:
        if options.check:
            for line in check(options.bundles, config):
                sys.stdout.write(line + "\n")
        else:
            asyncio.run(serve(options.bundles, config, load_model))
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


def _config(options: argparse.Namespace) -> ServerConfig:
    general = _model_config(options)
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ValueError("--tls-certificate and --tls-key go together")
    if options.tls_client_ca is not None and options.tls_key is None:
        raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key")
    tls = None
    if options.tls_key is not None:
        tls = TlsFiles(options.tls_certificate, options.tls_key, options.tls_client_ca)
    return ServerConfig(
        tls=tls,
        is_insecure=options.insecure,
        access_file=options.access_file,
        is_repository_open=options.open_repository,
        has_reflection=options.reflection,
        host=options.host,
        port=options.port,
        metrics_port=options.metrics_port,
        repository=options.repository,
        memory_limit_bytes=options.memory_limit,
        notice_seconds=options.notice_seconds,
        drain_seconds=options.drain_seconds,
        log_level=options.log_level,
        log_format=options.log_format,
        queue=general.queue,
        runner=general.runner,
        models={name: _model_config(own) for name, own in options.models.items()},
    )


def _model_config(options: argparse.Namespace) -> ModelConfig:
    runner = RunnerConfig(
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
    return ModelConfig(QueueLimits(options.max_waiting_requests, options.max_waiting_tokens), runner)


def _parser() -> argparse.ArgumentParser:
    server = ServerConfig()
    runner, queue = server.runner, server.queue
    parser = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve exported models over gRPC, with metrics and probes over HTTP.",
        epilog="example: python -m server bundles/demo --port 50051 --memory-budget 512MiB. Every flag is "
        "also a variable of the environment, such as SEQ2SEQ_MEMORY_BUDGET=512MiB.",
        allow_abbrev=False,
    )
    parser.set_defaults(models={})  # with settings of their own, which only the file can give
    add = parser.add_argument
    add("--version", action="version", version=f"seq2seq-serve {VERSION}")
    add(
        "bundles",
        nargs="*",
        type=Path,
        metavar="BUNDLE",
        help="a folder written by `python -m export`, or one with such a folder for each version",
    )
    add(
        "--repository",
        type=Path,
        metavar="DIR",
        help="a folder with such a folder for each model: the newest version of each is served, and others "
        "can be loaded while the server runs",
    )
    add(
        "--check",
        action="store_true",
        help="check settings, files and bundles, say what would be served, and exit",
    )
    add(
        "--host",
        default=server.host,
        help="address that both ports listen on; any other than this machine's own needs TLS or --insecure "
        "(default %(default)s)",
    )
    add("--insecure", action="store_true", help="allow a gRPC port that is open to the network without TLS")
    add(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="PEM, with what leads to its root; read again when it changes",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM, the certificate's private key")
    add(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="PEM, who signs the certificates that clients must have (default: clients need none)",
    )
    add(
        "--access-file",
        type=Path,
        metavar="FILE",
        help="TOML, the tokens that callers must send, with their roles (default: everybody may call)",
    )
    add(
        "--open-repository",
        action="store_true",
        help="without --access-file, let everybody load and unload models",
    )
    add(
        "--no-reflection",
        dest="reflection",
        action="store_false",
        help="do not tell callers which services there are",
    )
    add("--port", type=int, default=server.port, help="gRPC; 0 takes any free one (default %(default)s)")
    add(
        "--metrics-port",
        type=int,
        default=server.metrics_port,
        help="HTTP with /metrics, /healthz, /readyz; 0 takes any free one (default %(default)s)",
    )
    add(
        "--provider",
        choices=[policy.value for policy in ProviderPolicy],
        default=runner.provider.value,
        help="what may run the graphs: require is CUDA or no start; prefer is CUDA where it works and the "
        "bundle has graphs for it, else the CPU; the log says why "
        "(default %(default)s)",
    )
    add(
        "--precision",
        choices=(_AUTO, *(precision.value for precision in Precision)),
        default=runner.precision or _AUTO,
        help="of the graphs; auto takes the fastest that fits the provider (default %(default)s)",
    )
    add(
        "--threads",
        type=_at_least_one,
        default=runner.num_threads,
        metavar="N",
        help="CPU threads of a model's steps (default: the CPUs that the process may use)",
    )
    add(
        "--instances",
        type=_at_least_one,
        default=runner.num_instances,
        metavar="N",
        help="engines of a model, which share its threads, memory and slots: two or more side by side decode "
        "a small model faster on the CPU than all threads together decode one batch (default %(default)s)",
    )
    add(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        default=runner.cuda_graphs,
        help="on CUDA launch each kernel of a step by itself, instead of replaying captured steps",
    )
    add(
        "--cuda-libraries",
        type=Path,
        default=runner.cuda_libraries,
        metavar="FOLDER",
        help="with the libraries of CUDA and cuDNN, in it or in any folder below it (default: the packages "
        "nvidia-* of this Python, then where the system looks)",
    )
    add(
        "--memory-budget",
        type=_size,
        default=runner.memory_budget_bytes,
        metavar="SIZE",
        help="cache and memory of all slots of a model, in bytes or with KiB, MiB, GiB "
        f"(default {runner.memory_budget_bytes // 2**20}MiB)",
    )
    add(
        "--memory-limit",
        type=_size,
        default=server.memory_limit_bytes,
        metavar="SIZE",
        help="weights and slots of all loaded models and versions: what would go beyond it is not loaded "
        "(default: nine tenths of what the process may use; a GPU's memory is not counted)",
    )
    add(
        "--max-slots",
        type=_at_least_one,
        default=runner.max_slots,
        metavar="N",
        help="the most sequences decoded at once, however large the budget (default %(default)s)",
    )
    add(
        "--max-source-length",
        type=_at_least_one,
        default=runner.max_source_length,
        metavar="TOKENS",
        help="room for a source (default: the model's limit)",
    )
    add(
        "--max-target-length",
        type=_at_least_one,
        default=runner.max_target_length,
        metavar="TOKENS",
        help="room for a target (default: the model's limit)",
    )
    add(
        "--max-waiting-requests",
        type=_at_least_one,
        default=queue.max_waiting_requests,
        metavar="N",
        help="requests that may wait for a slot of each instance of a model (default %(default)s)",
    )
    add(
        "--max-waiting-tokens",
        type=_at_least_one,
        default=queue.max_waiting_tokens,
        metavar="TOKENS",
        help="source tokens that may wait for a slot of each instance of a model (default %(default)s)",
    )
    add(
        "--notice-seconds",
        type=float,
        default=server.notice_seconds,
        metavar="SECONDS",
        help="how long after SIGTERM health says NOT_SERVING before newcomers are refused, so that balancers "
        "send them elsewhere; Ctrl-C does not wait (default %(default)g)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=server.drain_seconds,
        metavar="SECONDS",
        help="how long accepted requests may go on after that (default %(default)g)",
    )
    add("--log-level", choices=LOG_LEVELS, default=server.log_level, help="default %(default)s")
    add("--log-format", choices=LOG_FORMATS, default=server.log_format, help="default %(default)s")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _at_least_one(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}, and must be at least 1")
    return int(text)


if __name__ == "__main__":
    main()
