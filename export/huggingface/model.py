"""The Transformer of imported checkpoints: one model with the options in which families differ.

It exists to be exported: it defines what the graphs compute, and is never trained. The options of each family
are in `export.huggingface.families`.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, G heads of keys and values,
K d_head, F d_ff, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs.architecture import (
    Activation,
    Architecture,
    LayerKind,
    PatchFront,
    SoundFront,
    Stack,
    neighbours,
    patches,
    relative_bias,
)
from seq2seq_serve.export.huggingface.media import Media
from seq2seq_serve.export.huggingface.pictures import Patches
from seq2seq_serve.export.huggingface.sounds import Sounds
from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, State
from seq2seq_serve.training.models.transformer import alignment_layer

NormKind = Literal["layer", "rms"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
}


@dataclass(frozen=True)
class Positions:
    """The vectors that are added to embeddings.

    Attributes:
        compute: Returns the vectors (positions, D) from a first row on; None if the checkpoint has them.
        offset: The row of the table of the first position.
        is_limited: Whether `max_position_embeddings` is the most positions that the model has.
        skips_pad: Whether the pad token has no position.
    """

    compute: Callable[[int, int, int], Tensor] | None
    offset: int = 0
    is_limited: bool = True
    skips_pad: bool = False


ALL_MAPS = frozenset({"query", "key", "value", "output", "gate", "inner", "outer"})


@dataclass(frozen=True)
class StackConfig:
    """The encoder or the decoder: its sizes, and options that may differ between the two.

    Attributes:
        num_heads: The heads together need not be as wide as the model.
        num_key_value_heads: Divides the number of heads, see `export.graphs.architecture.Stack`.
        activation: The feed-forward network's function.
        norm_epsilon: Added to the variance in norms.
        attention_scale: The factor of attention scores.
        norm_kind: The kind of the norms.
        is_pre_norm: Whether norms are before the sublayers, and one at the end of the stack.
        has_embedding_norm: Whether the sum of token and position has a norm.
        embedding_scale: The factor of token embeddings.
        unbiased: The maps of the layers that have no bias, of `ALL_MAPS`.
        kinds: How each layer treats positions; () if it is all the same to all of them.
        positions: The vectors that are added to embeddings; None adds none.
        num_positions: The number of these vectors.
    """

    d_model: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    d_head: int
    d_ff: int
    _: KW_ONLY
    activation: Activation
    norm_epsilon: float
    attention_scale: float
    norm_kind: NormKind = "layer"
    is_pre_norm: bool = True
    has_embedding_norm: bool = False
    embedding_scale: float = 1.0
    unbiased: frozenset[str] = frozenset()
    kinds: tuple[LayerKind, ...] = ()
    positions: Positions | None = None
    num_positions: int = 0

    def __post_init__(self) -> None:
        for name in ("d_model", "num_layers", "num_heads", "num_key_value_heads", "d_head", "d_ff"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, and must be a whole number above 0")
        if not isinstance(self.norm_epsilon, int | float) or not self.norm_epsilon >= 0:
            raise ValueError(f"the epsilon of norms is {self.norm_epsilon!r}, and must be a number")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """`kinds`, one for each layer."""
        return self.kinds or (LayerKind(),) * self.num_layers

    def make_map(self, name: str, d_input: int, d_output: int) -> nn.Linear:
        """A map of the layers, by its name in `ALL_MAPS`."""
        return nn.Linear(d_input, d_output, bias=name not in self.unbiased)

    def make_norm(self, width: int, *, exists: bool = True) -> nn.Module:
        """A norm of the stack's kind; the identity if there is none."""
        if not exists:
            return nn.Identity()
        kind = nn.RMSNorm if self.norm_kind == "rms" else nn.LayerNorm
        return kind(width, eps=self.norm_epsilon)


@dataclass(frozen=True)
class ImportedConfig(ModelConfig):
    """The sizes and options of an imported model.

    Attributes:
        vocab_size: The number of target tokens.
        source_vocab_size: The number of source tokens; 0 for a model that does not read texts.
        media: The sounds or pictures that the model reads; None for a model that reads texts.
        has_source_embedding: Whether source tokens have a matrix of their own.
        has_output: Whether the projection to logits has a matrix of its own.
        has_output_bias: Whether a bias is added to logits.
        has_output_norms: Whether the outputs of sublayers have norms, too.
        has_head_norms: Whether queries and keys have norms, each head for itself.
        is_merged: Whether the decoder's self-attention reads the memory, too, see
            `export.graphs.architecture.Architecture`.
        is_gated: Whether the feed-forward network multiplies two maps, of which one is activated.
        output_scale: The factor of decoder states before the projection.
        score_cap: c; scores s of attentions become c tanh(s / c); None leaves them.
        logits_cap: The same for logits.
        zero_position_id: The token whose position is a vector of zeros; None if all tokens have positions.
        unscaled_id: The token whose embedding is not in the matrices of embeddings, and is not scaled; None
            if there is none.
        max_distance: The distance from which on all distances have one bias; None without relative bias.
    """

    _: KW_ONLY
    source_vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    has_source_embedding: bool = False
    has_output: bool = False
    has_output_bias: bool = False
    has_output_norms: bool = False
    has_head_norms: bool = False
    is_merged: bool = False
    is_gated: bool = False
    output_scale: float = 1.0
    score_cap: float | None = None
    logits_cap: float | None = None
    zero_position_id: int | None = None
    unscaled_id: int | None = None
    max_distance: int | None = None
    media: Media | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_position_id is not None and type(self.zero_position_id) is not int:
            raise ValueError(f"pad_token_id is {self.zero_position_id!r}, and must be a whole number")

    @property
    def sizes(self) -> dict[str, int]:
        """The architecture's sizes, for the manifest."""
        return {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_ff": self.decoder.d_ff,
            "d_head": self.decoder.d_head,
            "num_heads": self.decoder.num_heads,
            "num_encoder_layers": self.encoder.num_layers,
            "num_decoder_layers": self.decoder.num_layers,
        }


class Attention(nn.Module):
    """Multi-head attention whose heads together may have another width than the model.

    Keys and values are those of states that may have another width than queries have.
    """

    def __init__(self, config: ImportedConfig, sizes: StackConfig, d_keys: int) -> None:
        super().__init__()
        D, K = sizes.d_model, sizes.d_head
        width, key_width = sizes.num_heads * K, sizes.num_key_value_heads * K
        self.d_head, self.num_groups = K, sizes.num_heads // sizes.num_key_value_heads
        self.scale, self.cap = sizes.attention_scale, config.score_cap
        self.query = sizes.make_map("query", D, width)
        self.key = sizes.make_map("key", d_keys, key_width)
        self.value = sizes.make_map("value", d_keys, key_width)
        self.output = sizes.make_map("output", width, D)
        self.query_norm = sizes.make_norm(K, exists=config.has_head_norms)
        self.key_norm = sizes.make_norm(K, exists=config.has_head_norms)

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from `x` (B, T, D) over keys and values (B, G, S, K).

        The bias is added to the scores (B, H, T, S). Queries are rotated by angles (T, K / 2). Returns the
        output (B, T, D), and the weights.
        """
        query = _rotated(self.query_norm(self._split_heads(self.query(x))), angles)  # (B, H, T, K)
        key, value = (kept.repeat_interleave(self.num_groups, dim=1) for kept in (key, value))
        scores = query @ key.transpose(2, 3) * self.scale  # (B, H, T, S)
        weights = (_capped(scores, self.cap) + bias).softmax(dim=-1)
        output: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))  # (B, T, D)
        return output, weights

    def keys_and_values(self, x: Tensor, angles: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The keys, rotated by angles (S, K / 2), and the values of `x` (B, S, D), each (B, G, S, K)."""
        key = self.key_norm(self._split_heads(self.key(x)))
        return _rotated(key, angles), self._split_heads(self.value(x))

    def _split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.d_head).transpose(1, 2)


class FeedForward(nn.Module):
    """`a(x W) W'`, or gated `(a(x G) * x W) W'` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ImportedConfig, sizes: StackConfig) -> None:
        super().__init__()
        D, F = sizes.d_model, sizes.d_ff
        self.inner = sizes.make_map("inner", D, F)
        self.gate = sizes.make_map("gate", D, F) if config.is_gated else None
        self.outer = sizes.make_map("outer", F, D)
        self.activate = _ACTIVATIONS[sizes.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.inner(x)
        hidden = self.activate(hidden) if self.gate is None else self.activate(self.gate(x)) * hidden
        output: Tensor = self.outer(hidden)
        return output


class SoundMaps(nn.Module):
    """Whisper's two convolutions over a spectrogram, as linear maps of three neighbouring frames.

    The width of each frame's neighbourhood is 3, and the second convolution has a stride of 2 (Radford et al.
    2022, arXiv:2212.04356, section 2.2).
    """

    def __init__(self, sounds: Sounds, d_model: int) -> None:
        super().__init__()
        self.sounds = sounds
        self.first = nn.Linear(3 * sounds.num_bands, d_model)
        self.last = nn.Linear(3 * d_model, d_model)

    def forward(self, sound: Tensor) -> Tensor:
        """(B, bands, frames) to (B, frames / 2, D)."""
        x = nn.functional.gelu(self.first(neighbours(sound.transpose(1, 2), stride=1)))
        result: Tensor = nn.functional.gelu(self.last(neighbours(x, stride=2)))
        return result

    def front(self) -> SoundFront:
        """The maps as the graphs read them."""
        return SoundFront(self.sounds.num_bands, self.sounds.num_frames, self.first, self.last)


class PatchMap(nn.Module):
    """The map of a picture's patches, and the embeddings of the tokens before them, see `PatchFront`.

    Attributes:
        class_token: (1, 1, D), of all encoders of pictures.
        distillation_token: (1, 1, D), of DeiT (Touvron et al. 2021, arXiv:2012.12877); None for ViT.
    """

    def __init__(self, pictures: Patches, d_model: int) -> None:
        super().__init__()
        self.pictures = pictures
        self.class_token = _table(1, 1, d_model)
        self.distillation_token = _table(1, 1, d_model) if pictures.num_tokens > 1 else None
        self.last = nn.Linear(3 * pictures.patch_size**2, d_model)

    @property
    def tokens(self) -> Tensor:
        """(tokens, D)."""
        both = [self.class_token, self.distillation_token]
        return torch.cat([token[0] for token in both if token is not None])

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, size, size, 3) to (B, S, D)."""
        x = self.last(patches(self.pictures.normal(pictures), self.pictures.patch_size))
        return torch.cat([self.tokens.expand(len(x), -1, -1), x], dim=1)

    def front(self) -> PatchFront:
        """The map as the graphs read it."""
        kind = self.pictures
        mean, deviation = torch.tensor(kind.mean), torch.tensor(kind.deviation)
        return PatchFront(kind.size, kind.patch_size, mean, deviation, self.tokens, self.last)


class Layer(nn.Module):
    """A layer of the encoder, or with attention over the memory one of the decoder.

    Args:
        config: Of the model.
        sizes: Of the layer's stack.
        kind: How its self-attention treats positions.
        d_memory: The width of the states that the layer reads besides those of its own stack; None if it
            reads no others.
    """

    self_attention: Attention
    cross_attention: Attention | None
    feed_forward: FeedForward

    def __init__(
        self, config: ImportedConfig, sizes: StackConfig, kind: LayerKind, d_memory: int | None = None
    ) -> None:
        super().__init__()
        self.kind, self.is_pre_norm = kind, sizes.is_pre_norm
        sublayers: dict[str, nn.Module] = {"self_attention": Attention(config, sizes, sizes.d_model)}
        self.cross_attention = None
        if d_memory is not None:
            sublayers["cross_attention"] = Attention(config, sizes, d_memory)
        sublayers["feed_forward"] = FeedForward(config, sizes)
        for name, sublayer in sublayers.items():
            setattr(self, name, sublayer)
            setattr(self, f"{name}_norm", sizes.make_norm(sizes.d_model))
            output_norm = sizes.make_norm(sizes.d_model, exists=config.has_output_norms)
            setattr(self, f"{name}_output_norm", output_norm)

    @property
    def memory_attention(self) -> Attention:
        """The attention that reads the memory."""
        return self.self_attention if self.cross_attention is None else self.cross_attention

    def attend(
        self,
        x: Tensor,
        context: SelfContext,
        past: tuple[Tensor, Tensor] | None = None,
        memory: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Attention of `x` (B, T, D) to past positions, itself, and the memory's keys, values and their bias.

        Without cross-attention it reads all of them in one softmax. Returns the output, the keys and values
        of all positions, and the weights that the memory has (B, H, T, S).
        """
        y = self._before(x, "self_attention")
        bias, angles = context.of(self.kind)
        present = self.self_attention.keys_and_values(y, angles)
        if past is not None:
            present = torch.cat([past[0], present[0]], dim=2), torch.cat([past[1], present[1]], dim=2)
        key, value = present
        if memory is not None and self.cross_attention is None:
            key, value = torch.cat([key, memory[0]], dim=2), torch.cat([value, memory[1]], dim=2)
            (B, _, _, S), (T, N) = memory[2].shape, bias.shape[-2:]
            bias = torch.cat([bias.expand(B, 1, T, N), memory[2].expand(B, 1, T, S)], dim=3)
        output, weights = self.self_attention(y, key, value, bias, angles)
        x = self._after(x, output, "self_attention")
        if memory is not None and self.cross_attention is not None:
            y = self._before(x, "cross_attention")
            output, weights = self.cross_attention(y, *memory)
            x = self._after(x, output, "cross_attention")
        return x, present, weights if memory is None else weights[..., -memory[0].shape[2] :]

    def finish(self, x: Tensor) -> Tensor:
        """The feed-forward network, the layer's last part."""
        output = self.feed_forward(self._before(x, "feed_forward"))
        return self._after(x, output, "feed_forward")

    def _before(self, x: Tensor, sublayer: str) -> Tensor:
        result: Tensor = getattr(self, f"{sublayer}_norm")(x) if self.is_pre_norm else x
        return result

    def _after(self, x: Tensor, output: Tensor, sublayer: str) -> Tensor:
        total = x + getattr(self, f"{sublayer}_output_norm")(output)
        result: Tensor = total if self.is_pre_norm else getattr(self, f"{sublayer}_norm")(total)
        return result


@dataclass(frozen=True)
class SelfContext:
    """The positions and the bias that the self-attention of each layer of a stack uses, besides the states.

    Attributes:
        queries: (T,), the positions of the states.
        keys: (S,), the positions before them and their own.
        bias: Broadcasts to (B, H, T, S), added to the scores.
        d_head: K.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor
    d_head: int

    def of(self, kind: LayerKind) -> tuple[Tensor, Tensor | None]:
        """The bias of the scores, and the angles (T, K / 2) of the states, in layers of a kind."""
        bias = self.bias
        if kind.window is not None:
            bias = bias + _masked(bias, kind.sees(self.queries, self.keys))
        angles = None if kind.rotary is None else kind.rotary.angles(self.queries, self.d_head)
        return bias, angles


class ImportedModel(EncoderDecoder):
    """An encoder-decoder Transformer with the options of `ImportedConfig`.

    The memory holds the keys and values (B, H, S, K) of each decoder layer's attention over the source, and
    the state those of the positions so far.

    Attributes:
        source_positions: (positions, D), added to source embeddings; None without a table.
        target_positions: The same for targets.
        source_bias: (2 * max_distance + 1, H), the bias of the scores at each distance from a key to its
            query, from the most negative one on (Raffel et al. 2020, arXiv:1910.10683, section 2.1); None
            without such biases.
        target_bias: The same for targets.
        source_unscaled: (D,), the embedding of `unscaled_id` in sources; None without such a token.
        target_unscaled: The same for targets.
    """

    origin = "imported"
    config: ImportedConfig
    encoder_layers: Layers[Layer]
    decoder_layers: Layers[Layer]

    def __init__(self, config: ImportedConfig) -> None:
        super().__init__(config)
        V, D = config.vocab_size, config.d_model
        if config.has_source_embedding:
            self.source_embedding = nn.Embedding(config.source_vocab_size, config.encoder.d_model)
        if config.has_output:
            self.output = nn.Linear(D, V, bias=False)
        self.output_bias = _table(V) if config.has_output_bias else None
        self.front = _front(config)
        distance = config.max_distance
        self.source_positions, self.target_positions = (
            _table(sizes.num_positions, sizes.d_model) if sizes.positions else None
            for sizes in (config.encoder, config.decoder)
        )
        has_unscaled = config.unscaled_id is not None
        self.source_unscaled = _table(config.encoder.d_model) if has_unscaled else None
        self.target_unscaled = _table(config.decoder.d_model) if has_unscaled else None
        self.source_bias = _table(2 * distance + 1, config.encoder.num_heads) if distance else None
        self.target_bias = _table(2 * distance + 1, config.decoder.num_heads) if distance else None
        self.encoder_layers = Layers(
            Layer(config, config.encoder, kind) for kind in config.encoder.layer_kinds
        )
        self.decoder_layers = Layers(
            Layer(config, config.decoder, kind, None if config.is_merged else config.encoder.d_model)
            for kind in config.decoder.layer_kinds
        )
        self.source_norm, self.target_norm = (
            sizes.make_norm(sizes.d_model, exists=sizes.has_embedding_norm)
            for sizes in (config.encoder, config.decoder)
        )
        self.encoder_norm, self.decoder_norm = (
            sizes.make_norm(sizes.d_model, exists=sizes.is_pre_norm)
            for sizes in (config.encoder, config.decoder)
        )

    @property
    def source_kind(self) -> SourceKind:
        return self.config.media or TOKENS

    @property
    def architecture(self) -> Architecture:
        """The model as its graphs read it."""
        return Architecture(
            encoder=self._stack(
                self.config.encoder,
                self.encoder_layers,
                self.encoder_norm,
                embedding=self.source_weight if self.front is None else None,
                positions=self.source_positions,
                embedding_norm=self.source_norm,
                relative_bias=self.source_bias,
                front=None if self.front is None else self.front.front(),
                num_positions=self.config.max_source_length,
                unscaled=self.source_unscaled,
            ),
            decoder=self._stack(
                self.config.decoder,
                self.decoder_layers,
                self.decoder_norm,
                embedding=self.embedding.weight,
                positions=self.target_positions,
                embedding_norm=self.target_norm,
                relative_bias=self.target_bias,
                num_positions=self.config.max_target_length,
                unscaled=self.target_unscaled,
            ),
            output_weight=self.output_weight,
            output_bias=self.output_bias,
            output_scale=self.config.output_scale,
            logits_cap=self.config.logits_cap,
            is_merged=self.config.is_merged,
        )

    def encode(self, *source: Tensor) -> Memory:
        given, source_mask = source
        if self.front is None:
            x = _embed(self.architecture.encoder, given)
        else:
            x = self.front(given) + self.source_positions
        places = torch.arange(x.shape[1])
        bias = _masked(x, source_mask[:, None, None, :]) + _relative_bias(self.source_bias, places, places)
        context = SelfContext(places, places, bias, self.config.encoder.d_head)
        for layer in self.encoder_layers:
            x, _, _ = layer.attend(x, context)
            x = layer.finish(x)
        x = self.encoder_norm(x)  # (B, S, D)
        pairs = [layer.memory_attention.keys_and_values(x) for layer in self.decoder_layers]
        return tuple(tensor for pair in pairs for tensor in pair)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._decode(target_ids, None, memory, source_mask)[0]

    def project(self, states: Tensor) -> Tensor:
        scaled = states * self.config.output_scale
        logits = nn.functional.linear(scaled, self.output_weight, self.output_bias)
        return _capped(logits, self.config.logits_cap)

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, _, weights = self._decode(target_ids, None, memory, source_mask)
        return self.project(states), weights

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The mean over the heads of the layer that aligns best, see `alignment_layer`."""
        return weights[alignment_layer(len(self.decoder_layers))].mean(dim=1)

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        nothing = memory[0].new_zeros(len(source_mask), *memory[0].shape[1:2], 0, memory[0].shape[3])
        return (nothing,) * len(memory)

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        states, new_state, _ = self._decode(token_ids[:, None], state, memory, source_mask)
        return states[:, 0], new_state

    def _decode(
        self, target_ids: Tensor, state: State | None, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Decoder states (B, T, D) of positions after those of the state, the new state, the weights."""
        num_before = 0 if state is None else state[0].shape[2]
        x = _embed(self.architecture.decoder, target_ids, num_before)
        keys = torch.arange(num_before + target_ids.shape[1])
        queries = keys[num_before:]
        bias = _masked(x, keys <= queries[:, None]) + _relative_bias(self.target_bias, queries, keys)
        context = SelfContext(queries, keys, bias, self.config.decoder.d_head)
        memory_bias = _masked(x, source_mask[:, None, None, :])
        new_state: list[Tensor] = []
        all_weights = []
        for i, layer in enumerate(self.decoder_layers):
            past = None if state is None else (state[2 * i], state[2 * i + 1])
            x, present, weights = layer.attend(
                x, context, past, (memory[2 * i], memory[2 * i + 1], memory_bias)
            )
            new_state += present
            all_weights.append(weights)
            x = layer.finish(x)
        return self.decoder_norm(x), tuple(new_state), all_weights

    def _stack(
        self,
        sizes: StackConfig,
        layers: nn.ModuleList,
        final_norm: nn.Module,
        *,
        embedding: Tensor | None,
        positions: Tensor | None,
        embedding_norm: nn.Module,
        relative_bias: Tensor | None,
        num_positions: int,
        unscaled: Tensor | None,
        front: SoundFront | PatchFront | None = None,
    ) -> Stack:
        config, token_id = self.config, self.config.unscaled_id
        return Stack(
            embedding=embedding,
            embedding_scale=sizes.embedding_scale,
            positions=positions,
            embedding_norm=embedding_norm if sizes.has_embedding_norm else None,
            layers=layers,
            final_norm=final_norm if sizes.is_pre_norm else None,
            num_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            d_head=sizes.d_head,
            attention_scale=sizes.attention_scale,
            kinds=sizes.layer_kinds,
            num_positions=num_positions,
            score_cap=config.score_cap,
            activation=sizes.activation,
            relative_bias=relative_bias,
            zero_position_id=config.zero_position_id,
            front=front,
            unscaled=None if unscaled is None or token_id is None else (token_id, unscaled),
        )


def _front(config: ImportedConfig) -> SoundMaps | PatchMap | None:
    if isinstance(config.media, Sounds):
        return SoundMaps(config.media, config.encoder.d_model)
    return PatchMap(config.media, config.encoder.d_model) if isinstance(config.media, Patches) else None


def _embed(stack: Stack, ids: Tensor, num_before: int = 0) -> Tensor:
    """The embeddings (B, T, D) of tokens (B, T) after a number of positions."""
    assert stack.embedding is not None
    x = nn.functional.embedding(ids, stack.embedding) * stack.embedding_scale
    if stack.unscaled is not None:
        token_id, vector = stack.unscaled
        x = torch.where((ids == token_id)[:, :, None], vector, x)
    if stack.positions is not None:
        end = num_before + ids.shape[1]
        if end > len(stack.positions):
            raise ValueError(f"{end} positions, and the model has {len(stack.positions)}")
        added = stack.positions[num_before:end]
        if stack.zero_position_id is not None:
            added = added * (ids != stack.zero_position_id)[:, :, None]
        x = x + added
    return x if stack.embedding_norm is None else stack.embedding_norm(x)


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros of the type of `x` where the mask is True, elsewhere numbers whose exponentials are 0.

    They are finite, even the sum of two, because padding may see no position at all.
    """
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min / 2)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else (x / cap).tanh() * cap


def _rotated(x: Tensor, angles: Tensor | None) -> Tensor:
    """(B, H, T, K) whose vectors are rotated, each pair of halves by one angle of (T, K / 2)."""
    if angles is None:
        return x
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _relative_bias(table: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | float:
    """The bias (H, T, S) of the scores between positions (T,) and (S,)."""
    if table is None:
        return 0.0
    return relative_bias(table, queries, keys).movedim(-1, 0)
