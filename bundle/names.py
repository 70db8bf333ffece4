"""The names of graphs, tensors, axes and roles. Each is spelled here and nowhere else.

Shape letters, one legend for the repository:

    B batch rows   S source length   T target length   D d_model   H heads   K d_head
    F d_ff   V vocabulary   L layers   N slots   C cache capacity
"""

from __future__ import annotations

import enum

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
CHECKSUM_FILE = "manifest.sha256"  # of the manifest, which has those of all other files
TOKENIZER_FILE = "tokenizer.json"


class Verb(enum.StrEnum):
    """The three graphs of a model."""

    ENCODE = "encode"  # source to memory, a batch of newcomers
    STEP = "step"  # one target position for all running rows, in place
    DECODE = "decode"  # T target positions at once: scoring, filling a cache, alignment


class Role(enum.StrEnum):
    """What a tensor is to the engine, which knows roles and never model kinds."""

    SOURCE = "source"  # one request: its named inputs and their lengths
    MEMORY = "memory"  # written by encode at admission, read by every step, in place
    CACHE = "cache"  # grows one target position per step, in place
    STATE = "state"  # fixed size, replaced by each step
    TOKEN = "token"  # one step: ids and lengths
    CAPACITY = "capacity"  # a scalar on the host: the positions that a buffer has room for
    LOGITS = "logits"  # one step's answer, float32 in every precision
    SCORE = "score"  # decode: log-probabilities of the given target
    ATTENTION = "attention"  # decode: alignment of target over source positions


class Axis(enum.StrEnum):
    """The axes whose size is not fixed by the model."""

    BATCH = "batch"
    SOURCE_LENGTH = "source_length"
    TARGET_LENGTH = "target_length"
    LABEL_LENGTH = "label_length"
    CACHE_CAPACITY = "cache_capacity"
    MEMORY_CAPACITY = "memory_capacity"


class Precision(enum.StrEnum):
    """The number formats that weights and caches are stored in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


# Options of ONNX Runtime's CUDA provider. Export and server use the same ones, since they choose the kernels.
# On GPUs since Hopper, ONNX Runtime prefers cuDNN's attention, which builds a plan at every new shape, some
# hundred milliseconds each (onnxruntime#28849). Flash (1), memory-efficient (2) and unfused (16) need none.
CUDA_PROVIDER_OPTIONS = {"sdpa_kernel": "19"}
# Default environment variables of both. Without XQA, the attention of a step is one kernel (flash decoding)
# instead of four.
CUDA_ENVIRONMENT = {"ORT_ENABLE_XQA": "0"}

SOURCE_IDS = "source_ids"  # (B, S) int64
SOURCE_LENGTHS = "source_lengths"  # (B,) int32
TOKEN_IDS = "token_ids"  # (B,) int64: the last target token of each row
LAST_SOURCE_POSITIONS = "last_source_positions"  # (B,) int32: source length less one
CACHE_LENGTHS = "cache_lengths"  # (B,) int32: positions of each row already in the cache
PREVIOUS_LENGTHS = "previous_lengths"  # (B,) int32: the same less one; the step adds one to it, in place
CACHE_CAPACITY = "cache_capacity"  # () int32
MEMORY_CAPACITY = "memory_capacity"  # () int32
LOGITS = "logits"  # (B, V) float32
TARGET_IDS = "target_ids"  # (B, T) int64: what the decoder is fed, start token first
FIRST_POSITION = "first_position"  # () int32 on the host: positions before them, in the cache of every row
LABEL_IDS = "label_ids"  # (B, P) int64: what is scored at the first P of the T positions; P may be 0
LOG_PROBABILITIES = "log_probabilities"  # (B, P) float32
ATTENTION = "attention"  # (B, T, memory capacity) float32


# The graphs that select tokens, each over m of the rows of a step
ROWS = "rows"  # (m,) int64: which rows
ADJUSTED_IDS = "adjusted_ids"  # (m, A) int64: the tokens whose logits are adjusted
FACTORS = "factors"  # (m, A) float32: a positive logit is divided by it, a negative one multiplied
BIASES = "biases"  # (m, A) float32: added after that; minus infinity forbids a token
PENALTIES = "penalties"  # (N, V) float32: subtracted from logits; infinity forbids a token
PENALTY_ROWS = "penalty_rows"  # (m,) int64: which of them
NUM_CANDIDATES = "num_candidates"  # (1,) int64
TOP_KS = "top_ks"  # (m, 1) int64: how many of the candidates are a row's own
TEMPERATURES = "temperatures"  # (m, 1) float32
TOP_PS = "top_ps"  # (m, 1) float32
MIN_PS = "min_ps"  # (m, 1) float32
UNIFORMS = "uniforms"  # (m, 1) float64, at least 0 and below 1
IS_COVERED = "is_covered"  # (m, 1) bool: whether all that might have been drawn were candidates


# The graph that moves rows
BUFFER = "buffer"  # (rows, row size)
FROM_ROWS = "from_rows"  # (moves,) int64
TO_ROWS = "to_rows"  # (moves, 1) int64


# The graph that writes rows
VALUES = "values"  # (rows, V) float32


def out(name: str) -> str:
    """The output that is bound to the same buffer as the input `name`."""
    return f"{name}_out"


def buffer_of(name: str) -> str:
    """The input that shares its buffer with the output `name`; `name` itself where there is none."""
    return name.removesuffix("_out")


def cache_key(layer: int) -> str:
    """Self-attention keys of a decoder layer, `(B, H, C, K)`."""
    return f"cache_key_{layer}"


def cache_value(layer: int) -> str:
    """Self-attention values of a decoder layer, `(B, H, C, K)`."""
    return f"cache_value_{layer}"


def memory_key(layer: int) -> str:
    """Cross-attention keys of a decoder layer, `(B, H, S, K)`."""
    return f"memory_key_{layer}"


def memory_value(layer: int) -> str:
    """Cross-attention values of a decoder layer, `(B, H, S, K)`."""
    return f"memory_value_{layer}"


def last_key(layer: int) -> str:
    """The last source position's cross-attention key of a decoder layer, `(B, 1, D)`."""
    return f"last_key_{layer}"


def last_value(layer: int) -> str:
    """The last source position's cross-attention value of a decoder layer, `(B, 1, D)`."""
    return f"last_value_{layer}"
