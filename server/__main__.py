"""Serve bundles: `python -m server bundles/demo --port 50051 --metrics-port 9464`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# gRPC's own log would repeat our messages. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# ONNX Runtime reports every session to Microsoft unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The server has its own threads for tokenizing; the library's threads would compete with the engines'.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from seq2seq_serve.commands import add_version, needs_extra, program

with needs_extra("server,cpu", __name__):
    from seq2seq_serve.server.app import serve
    from seq2seq_serve.server.check import check
    from seq2seq_serve.server.config import (
        LOG_FORMATS,
        LOG_LEVELS,
        ModelConfig,
        QueueLimits,
        ServerConfig,
        TlsFiles,
    )
    from seq2seq_serve.server.flags import add_runner_flags, at_least_one, parse_size, runner_config
    from seq2seq_serve.server.logs import configure_logging
    from seq2seq_serve.server.models.loading import load_model
    from seq2seq_serve.server.settings import parse_settings

# The settings that one model may override, in the table `[models.NAME]` of the file given by --config.
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
    if not (options.bundles or options.model_name or options.repository):
        parser.error("there is nothing to serve: name a BUNDLE or a --repository")
    try:
        config = _config(options)
    except ValueError as error:
        parser.error(str(error))
    if config.is_traced:
        with needs_extra("tracing", __name__):
            import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
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
        raise ValueError("--tls-certificate and --tls-key need each other: give both, or none")
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
        named_bundles=tuple(options.model_name),
        max_connection_age_seconds=options.max_connection_age_seconds,
        max_log_lines=options.max_log_lines,
        slow_seconds=options.slow_seconds,
        is_traced=options.tracing,
    )


def _model_config(options: argparse.Namespace) -> ModelConfig:
    queue = QueueLimits(options.max_waiting_requests, options.max_waiting_tokens)
    return ModelConfig(queue, runner_config(options))


def _parser() -> argparse.ArgumentParser:
    server = ServerConfig()
    queue = server.queue
    parser = argparse.ArgumentParser(
        prog=program("server"),
        description="Serve exported models over gRPC, with metrics and probes over HTTP.",
        epilog="example: %(prog)s bundles/demo --port 50051 --memory-budget 512MiB. Every flag is "
        "also a variable of the environment, such as SEQ2SEQ_MEMORY_BUDGET=512MiB.",
        allow_abbrev=False,
    )
    parser.set_defaults(models={})  # settings of single models, which only the file can give
    add = parser.add_argument

    def seconds(flag: str, default: float, text: str) -> None:
        add(flag, type=float, default=default, metavar="SECONDS", help=f"{text} (default %(default)g)")

    add_version(parser)
    add(
        "bundles",
        nargs="*",
        type=Path,
        metavar="BUNDLE",
        help="a folder written by `python -m export`, or a folder with one of these for each version",
    )
    add(
        "--model-name",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=BUNDLE",
        help="serve a BUNDLE under another name than its folder's; may be given several times",
    )
    add(
        "--repository",
        type=Path,
        metavar="DIR",
        help="a folder with such a folder for each model: the newest version of each model is served, and "
        "other versions can be loaded while the server runs",
    )
    add(
        "--check",
        action="store_true",
        help="check all settings, files and bundles, list the models, and exit",
    )
    add(
        "--host",
        default=server.host,
        help="address that both ports listen on; an address that other machines can reach needs TLS or "
        "--insecure (default %(default)s)",
    )
    add("--insecure", action="store_true", help="allow a gRPC port that is open to the network without TLS")
    for flag, text in (
        ("--tls-certificate", "PEM file with the server's certificate chain; read again when it changes"),
        ("--tls-key", "PEM file with the certificate's private key"),
        (
            "--tls-client-ca",
            "PEM file; its CA must have signed each client's certificate (default: not needed)",
        ),
        ("--access-file", "TOML file with the callers' tokens and roles (default: everyone may call)"),
    ):
        add(flag, type=Path, metavar="FILE", help=text)
    add(
        "--open-repository",
        action="store_true",
        help="without --access-file, let everyone load and unload models",
    )
    add(
        "--no-reflection",
        dest="reflection",
        action="store_false",
        help="do not list the services for callers",
    )
    add(
        "--port", type=int, default=server.port, help="gRPC port; 0 takes any free port (default %(default)s)"
    )
    add(
        "--metrics-port",
        type=int,
        default=server.metrics_port,
        help="HTTP port with /metrics, /healthz, /readyz; 0 takes any free port (default %(default)s)",
    )
    add_runner_flags(parser)
    add(
        "--memory-limit",
        type=parse_size,
        default=server.memory_limit_bytes,
        metavar="SIZE",
        help="largest size of all loaded models' weights and slots; a model that would exceed it is not "
        "loaded (default: nine tenths of the memory of this process; a GPU's memory is not counted)",
    )
    for flag, unit, default in (
        ("--max-waiting-requests", "requests", queue.max_waiting_requests),
        ("--max-waiting-tokens", "source tokens", queue.max_waiting_tokens),
    ):
        text = f"{unit} that may wait for each instance of a model (default %(default)s)"
        add(flag, type=at_least_one, default=default, metavar="N", help=text)
    seconds(
        "--notice-seconds",
        server.notice_seconds,
        "time after SIGTERM in which health reports NOT_SERVING and new requests are still accepted, so that "
        "load balancers can switch to other servers; Ctrl-C does not wait",
    )
    seconds("--drain-seconds", server.drain_seconds, "time for accepted requests to finish after that")
    seconds(
        "--max-connection-age-seconds",
        server.max_connection_age_seconds,
        "time after which a caller has to connect again, so that callers behind a balancer of connections "
        "find new servers",
    )
    add("--log-level", choices=LOG_LEVELS, default=server.log_level, help="default %(default)s")
    add("--log-format", choices=LOG_FORMATS, default=server.log_format, help="default %(default)s")
    add(
        "--max-log-lines",
        type=int,
        default=server.max_log_lines,
        metavar="N",
        help="log at most N calls in a second, and those that are slow or fail by the server's fault; 0 logs "
        "only these (default %(default)s)",
    )
    seconds("--slow-seconds", server.slow_seconds, "a call that takes longer is slow")
    add(
        "--tracing",
        action="store_true",
        help="send spans of every call to a collector of OpenTelemetry, by default to http://localhost:4317; "
        "OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, apply",
    )
    return parser


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=BUNDLE")
    return name, Path(path)


if __name__ == "__main__":
    main()
