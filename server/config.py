"""All settings of a server. Flags, variables, keys of the file and `--help` are made from these classes."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from seq2seq_serve.bundle.adapters import MAX_RANK
from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.settings import Bytes, Count, Seconds, Setting
from seq2seq_serve.server.system.machine import usable_memory


def _named(given: object) -> object:
    if not isinstance(given, str):
        return given
    name, _, path = given.partition("=")
    if not name or not path:
        raise PydanticCustomError("named", "Input should be NAME=FOLDER")
    return name, path


def _origins(text: str) -> str:
    origins = [origin.strip().lower() for origin in text.split(",")]
    for origin in origins:
        scheme, place, *rest = urlsplit(origin)
        if not (scheme and place) or any(rest) or "@" in place or any(map(str.isspace, origin)):
            raise PydanticCustomError(
                "origins", "Input should be origins such as https://notes.example, with commas between them"
            )
    return ",".join(origins)


MAX_ADAPTERS = 4096  # places of a model

_Port = Annotated[int, Field(ge=0, le=65_535)]
_Age = Annotated[float, Field(ge=1, le=10**6)]  # gRPC counts milliseconds in 32 bits
_NamedFolder = Annotated[tuple[str, Path], BeforeValidator(_named)]


class ProviderPolicy(enum.StrEnum):
    """Which providers may run the graphs."""

    REQUIRE = "require"  # CUDA only
    PREFER = "prefer"  # CUDA if it works and the bundle has graphs for it; otherwise the CPU, and a log line
    CPU = "cpu"


class Speculation(enum.StrEnum):
    """What drafts tokens, which a step checks together."""

    NGRAM = "ngram"  # n-grams of the source and of the target
    OFF = "off"


class OpenAINames(enum.StrEnum):
    """With which names of models OpenAI's pages for sounds are answered."""

    SERVED = "served"  # those of the served models, and whisper-1
    ANY = "any"  # with any other name by the only model that reads sounds


_AnyPrecision = Annotated[Precision | None, BeforeValidator(lambda given: None if given == "auto" else given)]


@checked()
class QueueLimits:
    """Bounds of the queue of one model. Beyond them a new request is refused.

    Attributes:
        max_waiting_requests: Requests that may wait for the slots of a model.
        max_waiting_tokens: Source tokens that may wait for the slots of a model; 1 KiB of another source, or
            of terms and placeholders, counts as one.
    """

    max_waiting_requests: Annotated[Count, Setting(is_per_model=True)] = 1024
    max_waiting_tokens: Annotated[Count, Setting(is_per_model=True)] = 262_144


@checked()
class RunnerConfig:
    """Settings of a model's runners.

    Attributes:
        provider: Where the graphs run: require uses CUDA or does not start; prefer uses CUDA if it works and
            the bundle has graphs for it, otherwise the CPU, and logs why.
        precision: Precision of the graphs; auto selects the first that the bundle has: int8, fp32 and int4 on
            the CPU, fp16 and bf16 on CUDA (default auto).
        num_threads: CPU threads per model (default: the CPUs that the process may use; a server keeps one of
            them for its callers beside a small model).
        shares_threads: Whether all graphs of a process use one pool of threads, as in a server.
        has_callers: Whether the process answers callers, as a server does. The engine of a small model, which
            would make them wait, then has a process of its own.
        num_instances: Engines per model, which share its threads, memory and slots: on the CPU several
            engines with few threads decode a small model faster than one engine with all threads.
        speculative: Drafts of the next tokens of a target, which a step checks together if that is faster:
            from n-grams of its source and of itself, or none, also of a draft model. Targets do not change.
            On the CPU only.
        draft: Bundle of a smaller model, which drafts tokens beside n-grams, on the CPU only; it must read
            the same sources, and have the same tokens of targets (default: none).
        cuda_graphs: CUDA graphs, which replay captured steps instead of launching each kernel separately.
        cuda_libraries: Folder with the libraries of CUDA and cuDNN, also in its subfolders (default: the
            nvidia-* packages of this Python, then the system's library path).
        max_slots_size_bytes: Largest size of the caches and memories of all slots of a model, in bytes or
            with KiB, MiB or GiB.
        max_slots: Largest number of sequences decoded at once, even if that size has room for more.
        max_source_length: Longest source, in tokens (positions for sources other than texts); a lower limit
            saves memory (default: the model's limit).
        max_target_length: Longest target, in tokens; a lower limit saves memory (default: the model's limit).
        max_adapters: Adapters of a model that are loaded at once; of more, the least recently used one
            leaves.
        max_rank: Largest rank of an adapter.
        has_adapters: Whether there may be adapters at all.
    """

    provider: Annotated[ProviderPolicy, Setting(is_per_model=True)] = ProviderPolicy.PREFER
    precision: Annotated[_AnyPrecision, Setting(f"{{auto,{','.join(Precision)}}}", is_per_model=True)] = None
    num_threads: Annotated[Count | None, Setting(flag="--threads")] = None
    shares_threads: bool = False
    has_callers: bool = False
    num_instances: Annotated[Count, Setting(flag="--instances")] = 1
    speculative: Annotated[Speculation, Setting(is_per_model=True)] = Speculation.NGRAM
    draft: Annotated[Path | None, Setting("BUNDLE", is_per_model=True)] = None
    cuda_graphs: Annotated[bool, Setting(flag="--no-cuda-graphs")] = True
    cuda_libraries: Annotated[Path | None, Setting("FOLDER")] = None
    max_slots_size_bytes: Annotated[
        Bytes, Setting("SIZE", flag="--max-slots-size", former="--memory-budget", is_per_model=True)
    ] = 1 << 30
    max_slots: Annotated[Count, Setting(is_per_model=True)] = 256
    max_source_length: Annotated[Count | None, Setting("TOKENS", is_per_model=True)] = None
    max_target_length: Annotated[Count | None, Setting("TOKENS", is_per_model=True)] = None
    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS), Setting(is_per_model=True)] = 16
    max_rank: Annotated[int, Field(ge=1, le=MAX_RANK), Setting(is_per_model=True)] = 64
    has_adapters: bool = False

    def __post_init__(self) -> None:
        if self.num_instances > self.max_slots:
            raise ValueError(
                f"num_instances is {self.num_instances}, and must be at most max_slots, {self.max_slots}"
            )


@checked()
class ServerConfig:
    """Settings of one server process.

    Attributes:
        named_bundles: Serves a bundle under another name than its folder's; may be given several times.
        repository: A folder with a bundle, or a folder of versions, for each model: the newest version of
            each model is served, and other versions can be loaded while the server runs.
        named_adapters: Serves an adapter as NAME of each model that it fits, or of one (MODEL/NAME): callers
            ask for the model MODEL/NAME; may be given several times.
        adapters: A folder with further adapters, each in a folder of its name; one is loaded when a caller
            first asks for it, and the least recently used one leaves for another.
        host: Address that both ports listen on; an address that other machines can reach needs TLS or
            --insecure.
        is_insecure: Allows a gRPC port that is open to the network without TLS.
        tls_certificate: PEM file with the server's certificate chain; read again when it changes.
        tls_key: PEM file with the certificate's private key.
        tls_client_ca: PEM file; its CA must have signed each client's certificate (default: not needed).
        access_file: TOML file with the callers' tokens and roles (default: everyone may call).
        is_repository_open: Without --access-file, lets everyone load and unload models.
        has_reflection: Reflection, by which callers list the services.
        port: gRPC port; 0 takes any free port.
        metrics_port: HTTP port with /metrics, /healthz, /readyz; 0 takes any free port.
        allowed_origins: Origins whose pages in a browser may use the HTTP port (CORS), such as
            https://notes.example, with commas between them (default: only its own).
        openai_names: Names of models that OpenAI's pages for sounds take: served, those of the served models
            and whisper-1; or any, with which the only model that reads sounds answers for others, too, such
            as gpt-4o-transcribe.
        runner: Settings of a model's runners.
        max_models_size_bytes: Largest size of all loaded models' weights and slots; a model that would exceed
            it is not loaded (default: nine tenths of this process's memory; a GPU's memory is not counted).
        max_live_streams: Live streams of speech at once, shared by the callers; the server takes fewer if
            text would come too late.
        live_interval_seconds: New sound of a live stream after which it is decoded again; streams may ask
            for another one.
        queue: Limits of the requests that wait for the slots of a model.
        notice_seconds: Time after SIGTERM in which health reports NOT_SERVING and new requests are still
            accepted, so that load balancers can switch to other servers; Ctrl-C does not wait.
        drain_seconds: Time for accepted requests to finish after that.
        max_connection_age_seconds: Age at which a connection is closed, so that callers behind a
            connection-level balancer find new servers.
        log_level: Lowest level of the log.
        log_format: Format of log lines.
        max_log_lines: Maximum number of logged calls per second, besides slow calls and those that fail by
            the server's fault; 0 logs only these.
        slow_seconds: Calls that take longer are slow.
        is_traced: Sends spans of every call to an OpenTelemetry collector, by default at
            http://localhost:4317; OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, apply.
        models: By name, the settings of models that have some of their own.
    """

    named_bundles: Annotated[tuple[_NamedFolder, ...], Setting("NAME=BUNDLE", flag="--model-name")] = ()
    repository: Annotated[Path | None, Setting("FOLDER")] = None
    named_adapters: Annotated[tuple[_NamedFolder, ...], Setting("NAME=ADAPTER", flag="--adapter")] = ()
    adapters: Annotated[Path | None, Setting("FOLDER")] = None
    host: Annotated[str, Setting("HOST")] = "127.0.0.1"
    is_insecure: Annotated[bool, Setting(flag="--insecure")] = False
    tls_certificate: Annotated[Path | None, Setting("FILE")] = None
    tls_key: Annotated[Path | None, Setting("FILE")] = None
    tls_client_ca: Annotated[Path | None, Setting("FILE")] = None
    access_file: Annotated[Path | None, Setting("FILE")] = None
    is_repository_open: Annotated[bool, Setting(flag="--open-repository")] = False
    has_reflection: Annotated[bool, Setting(flag="--no-reflection")] = True
    port: Annotated[_Port, Setting("PORT")] = 50051
    metrics_port: Annotated[_Port, Setting("PORT")] = 9464
    allowed_origins: Annotated[
        Annotated[str, AfterValidator(_origins)] | None, Setting("ORIGIN,…", flag="--allow-origins")
    ] = None
    openai_names: Annotated[OpenAINames, Setting()] = OpenAINames.SERVED
    runner: RunnerConfig = field(default_factory=lambda: RunnerConfig(shares_threads=True, has_callers=True))
    max_models_size_bytes: Annotated[
        Bytes, Setting("SIZE", flag="--max-models-size", former="--memory-limit")
    ] = field(default_factory=usable_memory)
    max_live_streams: Annotated[Count, Setting()] = 64
    live_interval_seconds: Annotated[float, Field(ge=0.1, le=10), Setting("SECONDS")] = 0.7
    queue: QueueLimits = field(default_factory=QueueLimits)
    notice_seconds: Annotated[Seconds, Setting("SECONDS")] = 1.0
    drain_seconds: Annotated[Seconds, Setting("SECONDS")] = 30.0
    max_connection_age_seconds: Annotated[_Age, Setting("SECONDS")] = 600.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Setting()] = "info"
    log_format: Annotated[Literal["text", "json"], Setting()] = "text"
    max_log_lines: Annotated[int, Field(ge=0), Setting()] = 100
    slow_seconds: Annotated[Seconds, Setting("SECONDS")] = 10.0
    is_traced: Annotated[bool, Setting(flag="--tracing")] = False
    models: Mapping[str, ServerConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key need each other: give both, or none")
        if self.tls_client_ca is not None and self.tls_key is None:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key")
        if not (self.tls_key or self.is_insecure or _is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host}, and without TLS others on the network could read all messages: give "
                "--tls-certificate and --tls-key, or allow it with --insecure"
            )
        if self.port == self.metrics_port != 0:
            raise ValueError(f"port and metrics_port are both {self.port}, and must differ")

    @property
    def model_runner(self) -> RunnerConfig:
        """The settings of a model's runners, which have places for adapters only if there may be some."""
        has_adapters = self.runner.has_adapters or bool(self.named_adapters or self.adapters)
        return replace(self.runner, has_adapters=has_adapters)

    @property
    def has_rest(self) -> bool:
        """Whether the HTTP port answers callers, because nobody can read there what TLS would encrypt."""
        return self.tls_key is None or self.is_insecure or _is_loopback(self.host)

    def of_model(self, name: str) -> ServerConfig:
        """Returns the settings for one model."""
        return self.models.get(name, self)


@checked()
class CommandConfig:
    """Settings of the command.

    Attributes:
        bundles: Folders written by `python -m export`, or folders with one of these for each version.
        is_check: Checks all settings, files and bundles, lists the models, and exits, with 1 if one of them
            is wrong, although the server may start without it.
        server: Settings of the server process.
    """

    bundles: Annotated[tuple[Path, ...], Setting("BUNDLE", flag="bundles")] = ()
    is_check: Annotated[bool, Setting(flag="--check")] = False
    server: ServerConfig = field(default_factory=ServerConfig)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
