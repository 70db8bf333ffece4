"""The settings of a server, and the only place that defines their defaults."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.machine import usable_memory

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BYTES = re.compile(r"(\d+) ?(KiB|MiB|GiB|)", re.ASCII)
_MAX_PORT = 65_535
_LONGEST_AGE_SECONDS = 10**6  # gRPC counts milliseconds in 32 bits


class ProviderPolicy(enum.StrEnum):
    """Which providers may run the graphs."""

    REQUIRE = "require"  # CUDA only
    PREFER = "prefer"  # CUDA if it works and the bundle has graphs for it; otherwise the CPU, and a log line
    CPU = "cpu"


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of the queue of one engine.

    Attributes:
        max_waiting_requests: Beyond it a new request is refused, or displaces another request.
        max_waiting_tokens: The same bound for `Request.queue_tokens` of all waiting requests; 1 KiB each.
        aging_seconds: Waiting time that outweighs any difference in priority.
    """

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 262_144
    aging_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in ("max_waiting_requests", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.aging_seconds <= 0:
            raise ValueError(f"aging_seconds is {self.aging_seconds}, and must be above 0")

    def excess(self, num_requests: int, num_tokens: int) -> str:
        """Returns the exceeded limit as a phrase of an error message; empty if none is exceeded."""
        if num_requests > self.max_waiting_requests:
            return f"{num_requests} requests, and at most {self.max_waiting_requests} may wait"
        if num_tokens > self.max_waiting_tokens:
            return f"{num_tokens} source tokens, and at most {self.max_waiting_tokens} may wait"
        return ""


@dataclass(frozen=True)
class RunnerConfig:
    """Settings of a model's runners.

    Attributes:
        provider: The allowed providers.
        precision: None takes the fastest that the bundle has for the provider.
        num_threads: CPU threads; None takes all CPUs that this process may use.
        shares_threads: Whether all graphs of a process use one pool of threads, as in a server.
        num_instances: Number of equal runners, which share threads, budget and slots.
        cuda_graphs: Whether steps on CUDA are captured and replayed.
        cuda_libraries: Folder with the libraries of CUDA and cuDNN; None searches this Python's packages.
        memory_budget_bytes: Bytes for the cache and memory of all slots.
        max_slots: The largest number of slots, even if the budget has room for more.
        max_source_length: Tokens, or positions of another source that memory depends on; None is the
            manifest's limit, a lower one saves memory.
        max_target_length: Tokens; None is the manifest's limit, a lower one saves memory.
    """

    provider: ProviderPolicy = ProviderPolicy.PREFER
    precision: Precision | None = None
    num_threads: int | None = None
    shares_threads: bool = False
    num_instances: int = 1
    cuda_graphs: bool = True
    cuda_libraries: Path | None = None
    memory_budget_bytes: int = 1 << 30
    max_slots: int = 256
    max_source_length: int | None = None
    max_target_length: int | None = None

    def __post_init__(self) -> None:
        if self.provider not in tuple(ProviderPolicy):
            raise ValueError(f"provider is {self.provider!r}, and must be one of {', '.join(ProviderPolicy)}")
        for name in ("num_threads", "num_instances", "max_slots", "max_source_length", "max_target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1")
        if self.num_instances > self.max_slots:
            raise ValueError(
                f"num_instances is {self.num_instances}, and must be at most max_slots, {self.max_slots}"
            )


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS.

    Attributes:
        certificate: The server's certificate chain.
        key: The certificate's private key.
        client_ca: The CA that must have signed each client's certificate (mTLS); None does not require one.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def paths(self) -> list[Path]:
        """Returns the paths of all given files."""
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]


@dataclass(frozen=True)
class ModelConfig:
    """Settings of one model.

    Attributes:
        queue: Limits of the requests that wait for a slot of each instance.
        runner: Settings of its runners.
    """

    queue: QueueLimits
    runner: RunnerConfig


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server process.

    Attributes:
        host: Address that both ports listen on.
        port: gRPC port; 0 lets the system choose.
        metrics_port: HTTP port with /metrics, /healthz, /readyz; 0 lets the system choose.
        tls: Encrypts the gRPC port; None leaves it unencrypted.
        is_insecure: Whether an unencrypted gRPC port may be reachable from other machines.
        access_file: Tokens and their roles (`server.service.access`); None admits every caller.
        is_repository_open: Whether every caller may load and unload models if there is no access file.
        has_reflection: Whether callers can list the services.
        repository: A folder of models, each a bundle or a folder with a bundle for each version.
        memory_limit_bytes: Limit of the weights, caches and memories of all loaded versions.
        notice_seconds: Time after SIGTERM in which health reports the end and new requests are accepted.
        drain_seconds: Time for accepted requests to finish after that.
        queue: Limits of the requests that wait for a slot of each instance of a model.
        runner: Settings of a model's runners.
        models: By name, models with other `queue` and `runner` settings.
        named_bundles: Names of models that are not those of their folders, with their bundles.
        max_connection_age_seconds: Time after which a connection of a caller is renewed.
        max_log_lines: The most lines in one second about calls that are neither slow nor failed.
        slow_seconds: Calls that take longer are slow.
        is_traced: Whether spans of calls are sent to a collector of OpenTelemetry.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9464
    tls: TlsFiles | None = None
    is_insecure: bool = False
    access_file: Path | None = None
    is_repository_open: bool = False
    has_reflection: bool = True
    repository: Path | None = None
    memory_limit_bytes: int = field(default_factory=usable_memory)
    notice_seconds: float = 1.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    queue: QueueLimits = field(default_factory=QueueLimits)
    runner: RunnerConfig = field(default_factory=lambda: RunnerConfig(shares_threads=True))
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    named_bundles: tuple[tuple[str, Path], ...] = ()
    max_connection_age_seconds: float = 600.0
    max_log_lines: int = 100
    slow_seconds: float = 10.0
    is_traced: bool = False

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= _MAX_PORT:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be from 0 to {_MAX_PORT}")
        if self.tls is None and not self.is_insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host is {self.host}, and without TLS others on the network could read all messages: give "
                "--tls-certificate and --tls-key, or allow it with --insecure"
            )
        if self.port == self.metrics_port != 0:
            raise ValueError(f"port and metrics_port are both {self.port}, and must differ")
        for name in ("notice_seconds", "drain_seconds", "slow_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 0 and finite")
        if not 1 <= self.max_connection_age_seconds <= _LONGEST_AGE_SECONDS:
            raise ValueError(
                f"max_connection_age_seconds is {self.max_connection_age_seconds}, and must be from 1 to "
                f"{_LONGEST_AGE_SECONDS}"
            )
        if self.max_log_lines < 0:
            raise ValueError(f"max_log_lines is {self.max_log_lines}, and must be at least 0")
        for name, choices in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, and must be one of {', '.join(choices)}"
                )

    @property
    def has_rest(self) -> bool:
        """Whether the HTTP port answers callers, because nobody can read there what TLS would encrypt."""
        return self.tls is None or self.is_insecure or _is_loopback(self.host)

    def of_model(self, name: str) -> Self:
        """Returns the settings for one model."""
        own = self.models.get(name)
        return self if own is None else replace(self, queue=own.queue, runner=own.runner)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_bytes(text: str) -> int:
    """Returns the number of bytes in a text such as `1048576`, `512MiB` or `2 GiB`; raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a whole number with KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2]]
