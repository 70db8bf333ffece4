"""The names of graphs, tensors, axes and roles. Each is spelled here and nowhere else.

Shape letters, one legend for the repository:

    B batch rows   S source length   T target length   D d_model   H heads   K d_head
    F d_ff   V vocabulary   L layers   N slots   C cache capacity
"""

from __future__ import annotations

import enum

FORMAT_VERSION = 16
OLDER_VERSIONS = (13, 14, 15)  # whose manifests and graphs lack only what a server can do without
MANIFEST_FILE = "manifest.json"
CHECKSUM_FILE = "manifest.sha256"  # the manifest's checksum; the manifest has those of all other files
TOKENIZER_FILE = "tokenizer.json"


class Verb(enum.StrEnum):
    """The graphs of a model; a model with state has no `decode`, and its targets go through `step`."""

    ENCODE = "encode"  # source to memory, for a batch of new requests
    STEP = "step"  # one target position for all running rows, in place
    DECODE = "decode"  # T target positions at once: scoring, filling a cache, alignment


class Role(enum.StrEnum):
    """The role of a tensor in the engine, which knows roles and no model kinds."""

    SOURCE = "source"  # one request's named inputs and their lengths
    MEMORY = "memory"  # written by encode at admission, read by every step, in place
    CACHE = "cache"  # grows one target position per step, in place
    STATE = "state"  # fixed size, replaced by each step: two buffers, input and output, that are swapped
    TOKEN = "token"  # one step's ids and lengths
    CAPACITY = "capacity"  # a scalar on the host: the number of positions of a buffer
    ADAPTER = "adapter"  # the weights of all loaded adapters, and their ranks
    LOGITS = "logits"  # one step's output, float32 in every precision
    CANDIDATES = "candidates"  # a step's number of candidates, and places; the candidates; on the CPU only
    SCORE = "score"  # decode: log-probabilities of the given target
    ATTENTION = "attention"  # from decode, or from step without decode: target over source positions


class Form(enum.StrEnum):
    """What a caller sends for a source, and what a corpus names for it."""

    TEXT = "text"  # a text, or its token ids
    SENTENCES = "sentences"  # a text of several sentences
    PICTURE = "picture"  # a file, or its pixels
    CLIP = "clip"  # an animated file, or its frames
    FEATURES = "features"  # annotations that the caller computed
    SOUND = "sound"  # a file, or its log-mel spectrogram


class Axis(enum.StrEnum):
    """The axes with sizes that the model does not fix."""

    BATCH = "batch"
    SOURCE_LENGTH = "source_length"
    CLIP_LENGTH = "clip_length"
    FEATURE_LENGTH = "feature_length"
    SOUND_LENGTH = "sound_length"  # one for all rows of an encode call
    TARGET_LENGTH = "target_length"
    LABEL_LENGTH = "label_length"
    CACHE_CAPACITY = "cache_capacity"
    MEMORY_CAPACITY = "memory_capacity"
    CANDIDATES = "candidates"
    PLACES = "places"
    NUM_ADAPTERS = "num_adapters"
    ADAPTER_SIZE = "adapter_size"  # the largest rank times the units of all maps


class Precision(enum.StrEnum):
    """The number formats of weights and caches."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


# Options of ONNX Runtime's CUDA provider. They choose the kernels, so export and server must use the same
# ones. On Hopper and newer GPUs, ONNX Runtime prefers cuDNN's attention, which builds a plan for every new
# shape, in some hundred milliseconds (onnxruntime#28849). Flash (1), memory-efficient (2) and unfused (16)
# attention need none.
CUDA_PROVIDER_OPTIONS = {"sdpa_kernel": "19"}
# Default environment variables of export and server. Without XQA, the attention of a step is one kernel
# (flash decoding) instead of four.
CUDA_ENVIRONMENT = {"ORT_ENABLE_XQA": "0"}

# What a request may choose by a name: the fields of its options, and the places in a bundle's frames
SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK = "source_language", "target_language", "task"
CHOICES = (SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK)

SOURCE_IDS = "source_ids"  # (B, S) int64
STORY = "story"  # (B, sentences, words) int64; 0 pads a sentence
QUESTION = "question"  # (B, words) int64; 0 pads it
PICTURE = "picture"  # (B, size, size, 3) uint8: red, green, blue
CLIP = "clip"  # (B, frames, size, size, 3) uint8
FEATURES = "features"  # (B, annotations, width) float32
SOUND = "sound"  # (B, bands, frames) float32: `bundle.audio.log_mel`
SOURCE_LENGTHS = "source_lengths"  # (B,) int32; for decode, positions of memory
TOKEN_IDS = "token_ids"  # (B,) int64: the last target token of each row
LAST_SOURCE_POSITIONS = "last_source_positions"  # (B,) int32: positions of memory minus one
CACHE_LENGTHS = "cache_lengths"  # (B,) int32: positions of each row already in the cache
PREVIOUS_LENGTHS = "previous_lengths"  # (B,) int32: the same minus one; the step adds one to it, in place
OWNERS = "owners"  # (B,) int64: for each row the row of its request that holds the memory
CACHE_ROWS = "cache_rows"  # (B,) int64: the row of the cache; a step that has it takes several of one row
CACHE_CAPACITY = "cache_capacity"  # () int32
MEMORY_CAPACITY = "memory_capacity"  # () int32
ADAPTER_IDS = "adapter_ids"  # (B,) int64: each row's adapter; -1 for none
ADAPTERS = "adapters"  # (K, R * units) float16: `bundle.adapters.Places`
ADAPTER_RANKS = "adapter_ranks"  # (K, parts) int32
LOGITS = "logits"  # (B, V) float32
TARGET_IDS = "target_ids"  # (B, T) int64: the tokens that the decoder reads, start token first
FIRST_POSITION = "first_position"  # () int32 on the host: positions already in the cache, in every row
LABEL_IDS = "label_ids"  # (B, P) int64: the tokens to score at the first P of the T positions; P may be 0
LOG_PROBABILITIES = "log_probabilities"  # (B, P) float32; from a step (B, candidates), if there are several
CANDIDATE_IDS = "candidate_ids"  # (B, candidates) int64: the most probable tokens, best first
ATTENTION = "attention"  # (B, T, memory capacity) float32; (B, T, heads, memory capacity) of alignment heads


# The graphs that select tokens, each over m rows of a step
ROWS = "rows"  # (m,) int64: the rows
ADJUSTED_IDS = "adjusted_ids"  # (m, A) int64: the tokens whose logits are adjusted
FACTORS = "factors"  # (m, A) float32: a positive logit is divided by it, a negative one multiplied
BIASES = "biases"  # (m, A) float32: added after that; minus infinity forbids a token
SUPPRESSED_IDS = "suppressed_ids"  # (m, A) int64: the tokens that a model never selects
PENALTIES = "penalties"  # (N, V) float32: subtracted from logits; infinity forbids a token
PENALTY_ROWS = "penalty_rows"  # (m,) int64: each row's row of `penalties`
NUM_CANDIDATES = "num_candidates"  # (1,) int64; 0 makes a step return logits instead
TOP_KS = "top_ks"  # (m, 1) int64: the number of a row's own candidates
TEMPERATURES = "temperatures"  # (m, 1) float32
TOP_PS = "top_ps"  # (m, 1) float32
MIN_PS = "min_ps"  # (m, 1) float32
UNIFORMS = "uniforms"  # (m, 1) float64, at least 0 and below 1
DETECTED_IDS = "detected_ids"  # (A,) int64: the tokens one of which is selected
FIRST_TIMES = "first_times"  # (m, 1) int64: the first token that is a time; V for a row without times
LAST_TIMES = "last_times"  # (m, 1) int64: the last token that is a time
LEAST_TEXTS = "least_texts"  # (m, 1) int64: tokens below it that are not times are forbidden
MOST_TEXTS = "most_texts"  # (m, 1) int64: tokens above it that are not times are forbidden
LEAST_TIMES = "least_times"  # (m, 1) int64: times below it are forbidden
MOST_TIMES = "most_times"  # (m, 1) int64: times above it are forbidden
TIME_COLUMNS = FIRST_TIMES, LAST_TIMES, LEAST_TEXTS, MOST_TEXTS, LEAST_TIMES, MOST_TIMES
PLACES = "places"  # (p, 2) int64: rows and token ids
FOUND = "found_log_probabilities"  # (p,) float32: those of the places; none if a step returns logits
IS_COVERED = "is_covered"  # (m, 1) bool: whether all tokens that might be drawn were candidates


# The graph that moves rows
BUFFER = "buffer"  # (rows, row size)
FROM_ROWS = "from_rows"  # (moves,) int64
TO_ROWS = "to_rows"  # (moves, 1) int64


# The graph that writes rows
VALUES = "values"  # (rows, V) float32


def lengths_of(axis: str) -> str:
    """The input `(B,)` int32 of `encode` with each row's own length along a padded axis of the sources."""
    return f"{axis}s"


def out(name: str) -> str:
    """The output that shares its buffer with the input `name`."""
    return f"{name}_out"


def buffer_of(name: str) -> str:
    """The input that shares its buffer with the output `name`; `name` itself if there is none."""
    return name.removesuffix("_out")


def cache_key(layer: int) -> str:
    """Self-attention keys of a decoder layer, `(B, H, C, K)`."""
    return f"cache_key_{layer}"


def cache_value(layer: int) -> str:
    """Self-attention values of a decoder layer, `(B, H, C, K)`."""
    return f"cache_value_{layer}"


def memory(name: str) -> str:
    """A tensor of a memory that is not divided into layers, `(B, S, …)` or `(B, …)`."""
    return f"memory_{name}"


def memory_key(layer: int) -> str:
    """Cross-attention keys of a decoder layer, `(B, H, S, K)`."""
    return f"memory_key_{layer}"


def memory_value(layer: int) -> str:
    """Cross-attention values of a decoder layer, `(B, H, S, K)`."""
    return f"memory_value_{layer}"


def state(name: str) -> str:
    """A tensor of the decoder's state, `(B, …)`."""
    return f"state_{name}"


def last_key(layer: int) -> str:
    """The last source position's cross-attention key of a decoder layer, `(B, 1, D)`."""
    return f"last_key_{layer}"


def last_value(layer: int) -> str:
    """The last source position's cross-attention value of a decoder layer, `(B, 1, D)`."""
    return f"last_value_{layer}"
