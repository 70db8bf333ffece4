"""Serve bundles: `python -m server bundles/demo --port 50051 --metrics-port 9464`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

# Libraries read these when they are imported. gRPC's own log would repeat our messages.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# The threads of numpy's products wait for work without sleeping; the engines need the processor.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from seq2seq_serve.commands import Parser, add_version, needs_extra, program

with needs_extra("server,cpu", __name__):
    from seq2seq_serve.server.app import serve
    from seq2seq_serve.server.check import check
    from seq2seq_serve.server.config import CommandConfig
    from seq2seq_serve.server.models.loading import load_model
    from seq2seq_serve.server.settings import parse_settings
    from seq2seq_serve.server.system.logs import configure_logging


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    command = parse_command(arguments, os.environ)
    config = command.server
    if config.is_traced:
        with needs_extra("tracing", __name__):
            import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
    configure_logging(config.log_level, config.log_format)
    try:
        if command.is_check:
            for line in check(command.bundles, config):
                sys.stdout.write(line + "\n")
        else:
            asyncio.run(serve(command.bundles, config, load_model))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def parse_command(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> CommandConfig:
    """Returns the settings of a command line, the environment and a file; exits with 2 if they are wrong."""
    parser = Parser(
        prog=program("server"),
        description="Serve exported models over gRPC, with metrics and probes over HTTP.",
        epilog="example: %(prog)s bundles/demo --port 50051 --max-slots-size 512MiB. Every flag is "
        "also an environment variable, such as SEQ2SEQ_MAX_SLOTS_SIZE=512MiB.",
        allow_abbrev=False,
    )
    add_version(parser)
    command, models = parse_settings(parser, CommandConfig(), arguments, environment)
    if not (command.bundles or command.server.named_bundles or command.server.repository):
        parser.error("there is nothing to serve: name a BUNDLE or a --repository")
    server = replace(command.server, models={name: model.server for name, model in models.items()})
    return replace(command, server=server)


if __name__ == "__main__":
    main()
