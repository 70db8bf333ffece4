from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LengthPenaltyFormula(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LENGTH_PENALTY_FORMULA_UNSPECIFIED: _ClassVar[LengthPenaltyFormula]
    LENGTH_PENALTY_FORMULA_WU: _ClassVar[LengthPenaltyFormula]
    LENGTH_PENALTY_FORMULA_POWER: _ClassVar[LengthPenaltyFormula]

class LongSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LONG_SOURCE_UNSPECIFIED: _ClassVar[LongSource]
    LONG_SOURCE_REFUSE: _ClassVar[LongSource]
    LONG_SOURCE_TRUNCATE: _ClassVar[LongSource]
    LONG_SOURCE_SPLIT: _ClassVar[LongSource]
    LONG_SOURCE_SPLIT_ALWAYS: _ClassVar[LongSource]
    LONG_SOURCE_SEQUENTIAL: _ClassVar[LongSource]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]

class SoundEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOUND_ENCODING_UNSPECIFIED: _ClassVar[SoundEncoding]
    SOUND_ENCODING_PCM_S16: _ClassVar[SoundEncoding]
    SOUND_ENCODING_PCM_F32: _ClassVar[SoundEncoding]
    SOUND_ENCODING_MULAW: _ClassVar[SoundEncoding]
    SOUND_ENCODING_ALAW: _ClassVar[SoundEncoding]

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_UNAVAILABLE: _ClassVar[VersionState]
    VERSION_STATE_LOADING: _ClassVar[VersionState]
    VERSION_STATE_READY: _ClassVar[VersionState]
    VERSION_STATE_UNLOADING: _ClassVar[VersionState]
LENGTH_PENALTY_FORMULA_UNSPECIFIED: LengthPenaltyFormula
LENGTH_PENALTY_FORMULA_WU: LengthPenaltyFormula
LENGTH_PENALTY_FORMULA_POWER: LengthPenaltyFormula
LONG_SOURCE_UNSPECIFIED: LongSource
LONG_SOURCE_REFUSE: LongSource
LONG_SOURCE_TRUNCATE: LongSource
LONG_SOURCE_SPLIT: LongSource
LONG_SOURCE_SPLIT_ALWAYS: LongSource
LONG_SOURCE_SEQUENTIAL: LongSource
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
SOUND_ENCODING_UNSPECIFIED: SoundEncoding
SOUND_ENCODING_PCM_S16: SoundEncoding
SOUND_ENCODING_PCM_F32: SoundEncoding
SOUND_ENCODING_MULAW: SoundEncoding
SOUND_ENCODING_ALAW: SoundEncoding
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_UNAVAILABLE: VersionState
VERSION_STATE_LOADING: VersionState
VERSION_STATE_READY: VersionState
VERSION_STATE_UNLOADING: VersionState

class Source(_message.Message):
    __slots__ = ("name", "text", "token_ids", "file", "tensor", "file_type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    FILE_TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: TokenIds
    file: bytes
    tensor: Tensor
    file_type: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., file: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., file_type: _Optional[str] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("datatype", "shape", "data")
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    datatype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, datatype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "sources", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    options: GenerateOptions
    def __init__(self, model: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., options: _Optional[_Union[GenerateOptions, _Mapping]] = ...) -> None: ...

class GenerateOptions(_message.Message):
    __slots__ = ("max_new_tokens", "attention", "priority", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "suppressed_token_ids", "logit_bias", "temperature", "top_k", "top_p", "min_p", "seed", "log_probabilities", "num_alternatives", "target_prefix", "stop_sequences", "beam_size", "length_penalty", "early_stopping", "num_hypotheses", "word_alignment", "long_source", "max_length_ratio", "source_language", "target_language", "task", "length_penalty_formula", "encoder_no_repeat_ngram_size", "exhaustive_search", "timestamps", "prompt", "condition_on_previous", "compression_ratio_threshold", "log_probability_threshold", "no_speech_threshold", "word_timestamps", "voice_activity", "terms", "keep_placeholders")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    NUM_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFIX_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BEAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    NUM_HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    WORD_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    LONG_SOURCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_RATIO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FORMULA_FIELD_NUMBER: _ClassVar[int]
    ENCODER_NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTIVE_SEARCH_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONDITION_ON_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_RATIO_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    NO_SPEECH_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    WORD_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    VOICE_ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    KEEP_PLACEHOLDERS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    attention: bool
    priority: int
    min_new_tokens: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    log_probabilities: bool
    num_alternatives: int
    target_prefix: Target
    stop_sequences: _containers.RepeatedScalarFieldContainer[str]
    beam_size: int
    length_penalty: float
    early_stopping: bool
    num_hypotheses: int
    word_alignment: bool
    long_source: LongSource
    max_length_ratio: float
    source_language: str
    target_language: str
    task: str
    length_penalty_formula: LengthPenaltyFormula
    encoder_no_repeat_ngram_size: int
    exhaustive_search: bool
    timestamps: bool
    prompt: str
    condition_on_previous: bool
    compression_ratio_threshold: float
    log_probability_threshold: float
    no_speech_threshold: float
    word_timestamps: bool
    voice_activity: bool
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    keep_placeholders: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., attention: _Optional[bool] = ..., priority: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., log_probabilities: _Optional[bool] = ..., num_alternatives: _Optional[int] = ..., target_prefix: _Optional[_Union[Target, _Mapping]] = ..., stop_sequences: _Optional[_Iterable[str]] = ..., beam_size: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ..., num_hypotheses: _Optional[int] = ..., word_alignment: _Optional[bool] = ..., long_source: _Optional[_Union[LongSource, str]] = ..., max_length_ratio: _Optional[float] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., task: _Optional[str] = ..., length_penalty_formula: _Optional[_Union[LengthPenaltyFormula, str]] = ..., encoder_no_repeat_ngram_size: _Optional[int] = ..., exhaustive_search: _Optional[bool] = ..., timestamps: _Optional[bool] = ..., prompt: _Optional[str] = ..., condition_on_previous: _Optional[bool] = ..., compression_ratio_threshold: _Optional[float] = ..., log_probability_threshold: _Optional[float] = ..., no_speech_threshold: _Optional[float] = ..., word_timestamps: _Optional[bool] = ..., voice_activity: _Optional[bool] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ..., keep_placeholders: _Optional[bool] = ...) -> None: ...

class Term(_message.Message):
    __slots__ = ("source", "target", "case_sensitive")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CASE_SENSITIVE_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    case_sensitive: bool
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., case_sensitive: _Optional[bool] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Attention(_message.Message):
    __slots__ = ("source_tokens", "target_tokens", "weights", "hops")
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    source_tokens: _containers.RepeatedScalarFieldContainer[str]
    target_tokens: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, source_tokens: _Optional[_Iterable[str]] = ..., target_tokens: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, weights: _Optional[_Iterable[float]] = ...) -> None: ...

class WordAlignment(_message.Message):
    __slots__ = ("source_words", "target_words", "links")
    SOURCE_WORDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    source_words: _containers.RepeatedScalarFieldContainer[str]
    target_words: _containers.RepeatedScalarFieldContainer[str]
    links: _containers.RepeatedCompositeFieldContainer[WordLink]
    def __init__(self, source_words: _Optional[_Iterable[str]] = ..., target_words: _Optional[_Iterable[str]] = ..., links: _Optional[_Iterable[_Union[WordLink, _Mapping]]] = ...) -> None: ...

class WordLink(_message.Message):
    __slots__ = ("source_word", "target_word", "weight")
    SOURCE_WORD_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    source_word: int
    target_word: int
    weight: float
    def __init__(self, source_word: _Optional[int] = ..., target_word: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "attention", "score", "log_probabilities", "alternatives", "word_alignment", "segments", "missing_terms")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    WORD_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TERMS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    attention: Attention
    score: float
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternatives]
    word_alignment: WordAlignment
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    missing_terms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., attention: _Optional[_Union[Attention, _Mapping]] = ..., score: _Optional[float] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., alternatives: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ..., word_alignment: _Optional[_Union[WordAlignment, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., missing_terms: _Optional[_Iterable[str]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("begin_seconds", "end_seconds", "text", "token_ids", "window", "words")
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    begin_seconds: float
    end_seconds: float
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    window: Window
    words: _containers.RepeatedCompositeFieldContainer[Word]
    def __init__(self, begin_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., words: _Optional[_Iterable[_Union[Word, _Mapping]]] = ...) -> None: ...

class Word(_message.Message):
    __slots__ = ("begin_seconds", "end_seconds", "text")
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    begin_seconds: float
    end_seconds: float
    text: str
    def __init__(self, begin_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("begin_seconds", "temperature", "mean_log_probability", "compression_ratio", "no_speech_probability")
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_RATIO_FIELD_NUMBER: _ClassVar[int]
    NO_SPEECH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    begin_seconds: float
    temperature: float
    mean_log_probability: float
    compression_ratio: float
    no_speech_probability: float
    def __init__(self, begin_seconds: _Optional[float] = ..., temperature: _Optional[float] = ..., mean_log_probability: _Optional[float] = ..., compression_ratio: _Optional[float] = ..., no_speech_probability: _Optional[float] = ...) -> None: ...

class Alternatives(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "text", "log_probability")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    log_probability: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., log_probability: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("source_tokens", "target_tokens", "truncated_source_tokens", "source_seconds")
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    source_tokens: int
    target_tokens: int
    truncated_source_tokens: int
    source_seconds: float
    def __init__(self, source_tokens: _Optional[int] = ..., target_tokens: _Optional[int] = ..., truncated_source_tokens: _Optional[int] = ..., source_seconds: _Optional[float] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "encode_seconds", "first_token_seconds", "total_seconds", "draft_tokens", "accepted_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    encode_seconds: float
    first_token_seconds: float
    total_seconds: float
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "model", "hypotheses", "usage", "timings", "sentences", "detected_language", "unknown_words")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    DETECTED_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_WORDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    usage: Usage
    timings: Timings
    sentences: _containers.RepeatedCompositeFieldContainer[Sentence]
    detected_language: str
    unknown_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., sentences: _Optional[_Iterable[_Union[Sentence, _Mapping]]] = ..., detected_language: _Optional[str] = ..., unknown_words: _Optional[_Iterable[str]] = ...) -> None: ...

class Sentence(_message.Message):
    __slots__ = ("source_text", "hypotheses", "usage")
    SOURCE_TEXT_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    source_text: str
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    usage: Usage
    def __init__(self, source_text: _Optional[str] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("piece", "result")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    piece: Piece
    result: GenerateResponse
    def __init__(self, piece: _Optional[_Union[Piece, _Mapping]] = ..., result: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("text", "token_ids", "hypothesis")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESIS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hypothesis: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., hypothesis: _Optional[int] = ...) -> None: ...

class TranscribeRequest(_message.Message):
    __slots__ = ("start", "sound", "finish_segment")
    START_FIELD_NUMBER: _ClassVar[int]
    SOUND_FIELD_NUMBER: _ClassVar[int]
    FINISH_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    start: TranscribeStart
    sound: bytes
    finish_segment: FinishSegment
    def __init__(self, start: _Optional[_Union[TranscribeStart, _Mapping]] = ..., sound: _Optional[bytes] = ..., finish_segment: _Optional[_Union[FinishSegment, _Mapping]] = ...) -> None: ...

class TranscribeStart(_message.Message):
    __slots__ = ("model", "options", "encoding", "sample_rate", "num_channels", "turn_detection", "interval_seconds", "segments_only", "begin_seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    TURN_DETECTION_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    options: GenerateOptions
    encoding: SoundEncoding
    sample_rate: int
    num_channels: int
    turn_detection: TurnDetection
    interval_seconds: float
    segments_only: bool
    begin_seconds: float
    def __init__(self, model: _Optional[str] = ..., options: _Optional[_Union[GenerateOptions, _Mapping]] = ..., encoding: _Optional[_Union[SoundEncoding, str]] = ..., sample_rate: _Optional[int] = ..., num_channels: _Optional[int] = ..., turn_detection: _Optional[_Union[TurnDetection, _Mapping]] = ..., interval_seconds: _Optional[float] = ..., segments_only: _Optional[bool] = ..., begin_seconds: _Optional[float] = ...) -> None: ...

class TurnDetection(_message.Message):
    __slots__ = ("off", "threshold", "prefix_padding_seconds", "silence_seconds")
    OFF_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PADDING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    off: bool
    threshold: float
    prefix_padding_seconds: float
    silence_seconds: float
    def __init__(self, off: _Optional[bool] = ..., threshold: _Optional[float] = ..., prefix_padding_seconds: _Optional[float] = ..., silence_seconds: _Optional[float] = ...) -> None: ...

class FinishSegment(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TranscribeResponse(_message.Message):
    __slots__ = ("speech_began", "text", "speech_ended", "segment", "result", "received_seconds")
    SPEECH_BEGAN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SPEECH_ENDED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    speech_began: SpeechBegan
    text: LiveText
    speech_ended: SpeechEnded
    segment: Segment
    result: GenerateResponse
    received_seconds: float
    def __init__(self, speech_began: _Optional[_Union[SpeechBegan, _Mapping]] = ..., text: _Optional[_Union[LiveText, _Mapping]] = ..., speech_ended: _Optional[_Union[SpeechEnded, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., result: _Optional[_Union[GenerateResponse, _Mapping]] = ..., received_seconds: _Optional[float] = ...) -> None: ...

class SpeechBegan(_message.Message):
    __slots__ = ("begin_seconds",)
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    begin_seconds: float
    def __init__(self, begin_seconds: _Optional[float] = ...) -> None: ...

class SpeechEnded(_message.Message):
    __slots__ = ("end_seconds",)
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    end_seconds: float
    def __init__(self, end_seconds: _Optional[float] = ...) -> None: ...

class LiveText(_message.Message):
    __slots__ = ("stable", "unstable", "lag_seconds")
    STABLE_FIELD_NUMBER: _ClassVar[int]
    UNSTABLE_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stable: _containers.RepeatedCompositeFieldContainer[Word]
    unstable: str
    lag_seconds: float
    def __init__(self, stable: _Optional[_Iterable[_Union[Word, _Mapping]]] = ..., unstable: _Optional[str] = ..., lag_seconds: _Optional[float] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("model", "items", "options", "joins_answers", "refuses_items")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    JOINS_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    REFUSES_ITEMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    items: _containers.RepeatedCompositeFieldContainer[BatchItem]
    options: GenerateOptions
    joins_answers: bool
    refuses_items: bool
    def __init__(self, model: _Optional[str] = ..., items: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ..., options: _Optional[_Union[GenerateOptions, _Mapping]] = ..., joins_answers: _Optional[bool] = ..., refuses_items: _Optional[bool] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("tag", "sources")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    tag: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, tag: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("index", "tag", "response", "error", "more")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    tag: str
    response: GenerateResponse
    error: BatchError
    more: _containers.RepeatedCompositeFieldContainer[GenerateBatchResponse]
    def __init__(self, index: _Optional[int] = ..., tag: _Optional[str] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[BatchError, _Mapping]] = ..., more: _Optional[_Iterable[_Union[GenerateBatchResponse, _Mapping]]] = ...) -> None: ...

class BatchError(_message.Message):
    __slots__ = ("code", "message", "reason", "field", "request_id", "retry_after_seconds")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    reason: str
    field: str
    request_id: str
    retry_after_seconds: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., request_id: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "sources", "target", "priority", "source_language", "target_language", "task")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    model: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    target: Target
    priority: int
    source_language: str
    target_language: str
    task: str
    def __init__(self, model: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., target: _Optional[_Union[Target, _Mapping]] = ..., priority: _Optional[int] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "model", "score", "log_probabilities", "target_tokens", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    score: float
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    target_tokens: _containers.RepeatedScalarFieldContainer[str]
    timings: Timings
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., score: _Optional[float] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., target_tokens: _Optional[_Iterable[str]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "version", "kind", "precision", "provider", "vocab_size", "max_source_length", "max_target_length", "num_slots", "provenance", "sources", "has_attention", "source_shapes", "choices", "eos_ids", "splits_sentences", "has_draft_model", "target_language", "source_language")
    class ProvenanceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SourceShapesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Shape
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Shape, _Mapping]] = ...) -> None: ...
    class ChoicesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Choice
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Choice, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SOURCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TARGET_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HAS_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SHAPES_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    SPLITS_SENTENCES_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    kind: str
    precision: str
    provider: str
    vocab_size: int
    max_source_length: int
    max_target_length: int
    num_slots: int
    provenance: _containers.ScalarMap[str, str]
    sources: _containers.ScalarMap[str, str]
    has_attention: bool
    source_shapes: _containers.MessageMap[str, Shape]
    choices: _containers.MessageMap[str, Choice]
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    splits_sentences: bool
    has_draft_model: bool
    target_language: str
    source_language: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., kind: _Optional[str] = ..., precision: _Optional[str] = ..., provider: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_source_length: _Optional[int] = ..., max_target_length: _Optional[int] = ..., num_slots: _Optional[int] = ..., provenance: _Optional[_Mapping[str, str]] = ..., sources: _Optional[_Mapping[str, str]] = ..., has_attention: _Optional[bool] = ..., source_shapes: _Optional[_Mapping[str, Shape]] = ..., choices: _Optional[_Mapping[str, Choice]] = ..., eos_ids: _Optional[_Iterable[int]] = ..., splits_sentences: _Optional[bool] = ..., has_draft_model: _Optional[bool] = ..., target_language: _Optional[str] = ..., source_language: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("names", "default")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    default: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., default: _Optional[str] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("model", "version", "state", "reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: VersionState
    reason: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[VersionState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
