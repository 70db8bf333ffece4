"""The imported model computes what transformers computes, whatever the family."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, open_checkpoint
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import FAMILIES, config_of, family_of
from seq2seq_serve.training.huggingface.tokenizers import read_tokenizers
from seq2seq_serve.training.huggingface.weights import read_model
from seq2seq_serve.training.models.options import Rotary
from seq2seq_serve.training.models.positions import bucket_of
from tests.export.huggingface.checkpoints import CASES, change_weights, edit, family_name
from tests.export.huggingface.tokenizer_files import only_pieces

# Sums of float32 in another order; scores of T5 are larger than those of others, which rounds more.
LIMITS = Limits()
RELATIVE = ("t5", "t5-1.1", "mt5", "byt5")
TOLERANCE = 3e-5
SHAPES = ((1, 1, 1), (3, 13, 9), (2, 40, 39))  # Whisper has 40 positions of targets
FAR_SHAPES = (*SHAPES, (2, 300, 200))  # beyond the largest distance of T5


def imported(folder, limits=LIMITS):
    opened = open_checkpoint(folder)
    family = family_of(opened)
    return read_model(opened, family, config_of(family, opened, limits))


def log_probabilities(theirs, ours, B, S, T):
    """Those of transformers, of `decode`, and of repeated `step`; the last row of texts is padded."""
    config, generator = theirs.config, torch.Generator().manual_seed(0)
    target_ids = torch.randint(3, ours.config.vocab_size - 8, (B, T), generator=generator)
    if ours.config.media is None:
        source = torch.randint(3, config.vocab_size - 8, (B, S), generator=generator)
        mask = torch.ones(B, S, dtype=torch.bool)
        mask[1:, S - S // 2 :] = False
        source[~mask] = config.pad_token_id
        named = {"input_ids": source, "attention_mask": mask.long()}
    else:
        media, rng = ours.config.media, np.random.default_rng(0)
        source, mask = media.tensors([media.random(rng, 0, 0) for _ in range(B)])
        named = media.arguments(source)
    with torch.inference_mode():
        expected = theirs(**named, decoder_input_ids=target_ids).logits
        memory = ours.encode(source, mask)
        decoded = ours.decode(target_ids, memory, mask)
        state, steps = ours.start(memory, mask), []
        for position in range(T):
            states, state = ours.step(target_ids[:, position], state, memory, mask)
            steps.append(ours.project(states))
    return [logits.log_softmax(-1) for logits in (expected, decoded, torch.stack(steps, dim=1))]


@pytest.mark.parametrize("case", CASES)
def test_the_imported_model_equals_transformers(checkpoint, case):
    folder, theirs = checkpoint(case)
    ours = imported(folder, Limits(300, 300) if case in RELATIVE else LIMITS)
    for shape in FAR_SHAPES if case in RELATIVE else SHAPES:
        expected, decoded, stepped = log_probabilities(theirs, ours, *shape)
        assert expected.std() > 0.1, "a model whose tokens are all alike proves nothing"
        torch.testing.assert_close(decoded, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(stepped, decoded, atol=TOLERANCE, rtol=0)


UPPER_HALF = [(layer, head) for layer in (1, 2) for head in range(4)]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ([[1, 3], [0, 2], [1, 3]], [(0, 2), (1, 3)]),
        ([[0, 1], [3, 0], [1], [0, None], "?", [1, 9]], [(0, 1)]),
        *((wrong, UPPER_HALF) for wrong in (None, [[3, 0], [30, 1]], 5)),
    ],
)
def test_heads_that_align_are_those_of_the_checkpoint_or_of_the_upper_layers(
    checkpoint, copied, named, found
):
    folder, theirs = copied("whisper"), checkpoint("whisper")[1]
    edit(folder / "generation_config.json", alignment_heads=named)
    ours = imported(folder)
    assert list(ours.architecture.alignment_heads) == found
    theirs.set_attn_implementation("eager")
    source, mask = ours.config.media.tensors([ours.config.media.random(np.random.default_rng(0), 0, 0)])
    target_ids = torch.randint(3, 90, (1, 7))
    with torch.inference_mode():
        expected = theirs(source, decoder_input_ids=target_ids, output_attentions=True).cross_attentions
        _, weights = ours.decode_with_attention(target_ids, ours.encode(source, mask), mask)
    heads = torch.stack([expected[layer][:, head] for layer, head in found], dim=2)
    torch.testing.assert_close(ours.alignment(weights), heads, atol=TOLERANCE, rtol=0)


def test_m2m100_has_as_many_positions_as_one_asks_for(checkpoint):
    folder, theirs = checkpoint("m2m100")
    expected, decoded, _ = log_probabilities(theirs, imported(folder, Limits(200, 150)), 2, 200, 150)
    torch.testing.assert_close(decoded, expected, atol=TOLERANCE, rtol=0)


def test_a_model_with_a_table_has_as_many_positions_as_the_table(checkpoint):
    folder, _ = checkpoint("marian")
    with pytest.raises(CheckpointError, match=r"65, .* 64"):
        imported(folder, Limits(65, 0))


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
@pytest.mark.parametrize("has_pieces_only", [False, True])
@pytest.mark.parametrize("case", ["mbart", "mbart50", "m2m100", "nllb"])
def test_a_general_tokenizer_is_of_the_family_that_has_its_languages(copied, case, has_pieces_only, name):
    folder = copied(case)
    if has_pieces_only and case != "m2m100":
        only_pieces(folder, case)
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    assert family_of(open_checkpoint(folder)).name == case


@pytest.mark.parametrize("case", ["mbart50", "nllb"])
def test_a_general_tokenizer_without_languages_is_refused(copied, case):
    folder = copied(case)
    written = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(re.sub(r'"(\w\w_[A-Z]{2}|\w{3}_[A-Z]\w{3})"', r'"x\1"', written))
    edit(folder / "tokenizer_config.json", tokenizer_class=None, extra_special_tokens=None)
    with pytest.raises(CheckpointError, match="tokenizer_class"):
        family_of(open_checkpoint(folder))


@pytest.mark.parametrize("case", ["whisper", "nllb", "t5gemma"])
@pytest.mark.parametrize("settings", [None, '{"tokenizer_class": "PreTrainedTokenizerFast"}'])
def test_files_of_a_tokenizer_that_a_folder_lacks_are_named(copied, case, settings):
    folder = copied(case)
    for file in folder.glob("*token*"):
        file.unlink()
    if settings:
        (folder / "tokenizer_config.json").write_text(settings)

    def read():
        opened = open_checkpoint(folder)
        return read_tokenizers(folder, family_of(opened).name, opened.config, opened.generation)

    with pytest.raises(ValueError, match=r"has no .*tokenizer\.json.*: copy"):
        read()


def test_every_family_has_a_case():
    assert {family_name(case) for case in CASES} == {family.name for family in FAMILIES}


def damaged(name, place, value, dtype=torch.float32):
    """A change of weights: one number of a tensor."""

    def damage(weights):
        weights[name] = weights[name].to(dtype)
        weights[name][place] = value

    return damage


EMBEDDINGS = (
    "encoder.embeddings.position_embeddings",
    "encoder.embeddings.patch_embeddings.projection.weight",
)
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
VALUES = "decoder.block.0.layer.0.SelfAttention.v.weight"


@pytest.mark.parametrize(
    ("case", "change", "match"),
    [
        (
            "t5",
            lambda weights: weights.update({"encoder.a.weight": torch.zeros(3)}),
            "not used: encoder.a.we",
        ),
        (
            "t5",
            lambda weights: weights.pop("encoder.final_layer_norm.weight"),
            "missing: encoder_norm.weight",
        ),
        *(("t5", damaged(VALUES, (3, 5), value), VALUES) for value in (torch.nan, torch.inf, -torch.inf)),
        ("t5", damaged(VALUES, (3, 5), torch.nan, torch.float16), VALUES),
        ("trocr-deit", lambda weights: weights.pop("enc_to_dec_proj.bias"), r"enc_to_.*\[\[32, 24\], None\]"),
        ("trocr-deit", lambda weights: weights.pop(EMBEDDINGS[0]), "missing: source_positions"),
        *(
            (
                "trocr",
                lambda weights, name=name, shape=shape: weights.update({name: torch.zeros(shape)}),
                "shape",
            )
            for name in EMBEDDINGS
            for shape in ((), (32,))
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(copied, case, change, match):
    folder = copied(case)
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=match):
        imported(folder)


def assert_same_weights(folder, expected):
    ours = imported(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items()), folder


# The other families tie their weights as these do.
@pytest.mark.parametrize("case", ["t5", "t5-1.1", "bart", "nllb", "marian-separate", "t5gemma", "t5gemma2"])
def test_tied_weights_may_have_any_one_of_their_names(checkpoint, copied, case):
    folder, theirs = checkpoint(case)
    expected, stored = imported(folder).state_dict(), load_file(folder / "model.safetensors")
    groups: dict[str, set[str]] = {}
    for name, origin in theirs.all_tied_weights_keys.items():
        if not name.endswith("eoi_embedding"):
            origin = origin.replace(".text_model", "")  # which files of T5Gemma 2 leave out
            groups.setdefault(origin, {origin}).add(name)
    copy = copied(case)
    for names in groups.values():
        (kept,) = (stored[name] for name in names if name in stored)
        others = {name: tensor for name, tensor in stored.items() if name not in names}
        for name in names:
            save_file(others | {name: kept}, copy / "model.safetensors", metadata={"format": "pt"})
            assert_same_weights(copy, expected)


OLD = (
    "model.encoder.version",
    "model.decoder.version",
    "encoder.embeddings.position_ids",
    "model.decoder.embed_positions._float_tensor",
    "model.encoder.layers.0.self_attn.rotary_emb.inv_freq",
)


def renames_shared(weights):
    weights["decoder.embed_tokens.weight"] = weights.pop("shared.weight")


@pytest.mark.parametrize(
    ("case", "change"),
    [
        # Buffers that older releases saved
        *(
            (case, lambda weights: weights.update({name: torch.full((1,), 3.0) for name in OLD}))
            for case in ("t5", "bart", "m2m100", "trocr-deit", "whisper", "t5gemma")
        ),
        # A bias that old files have and nobody used
        ("t5", lambda weights: weights.update({UNUSED: torch.zeros(32, 3)})),
        # Embeddings that are stored twice
        ("t5", lambda weights: weights.update({"lm_head.weight": weights["shared.weight"].clone()})),
        # MADLAD's layout: one matrix for texts and another one for logits
        ("t5-1.1", renames_shared),
    ],
)
def test_files_of_other_releases_are_the_same_model(checkpoint, copied, case, change):
    folder = copied(case)
    change_weights(folder, change)
    assert_same_weights(folder, imported(checkpoint(case)[0]).state_dict())


@pytest.mark.parametrize("case", ["trocr", "trocr-deit"])
def test_newer_names_of_weights_are_the_same_model(checkpoint, copied, case):
    """Those that transformers 5 has in memory, and not yet in the files that it writes."""
    folder, theirs = checkpoint(case)
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert "encoder.layers.0.attention.q_proj.weight" in weights
    save_file(weights, (copy := copied(case)) / "model.safetensors")
    assert_same_weights(copy, imported(folder).state_dict())


@pytest.mark.parametrize("written", [{"scale_decoder_outputs": False}, {"tie_word_embeddings": False}])
def test_a_t5_whose_projection_is_not_scaled_says_so_in_one_of_two_ways(copied, written):
    folder = copied("t5")
    assert imported(folder).config.output_scale == 32**-0.5
    edit(folder / "config.json", **{"scale_decoder_outputs": None} | written)
    assert imported(folder).config.output_scale == 1


def test_older_settings_of_t5gemma_mean_the_same(checkpoint, copied):
    """Files of transformers 4 have neither `layer_types` nor `rope_parameters`."""
    older, folder = {"layer_types": None, "rope_parameters": None, "rope_theta": 10_000.0}, copied("t5gemma")
    for half in ("encoder", "decoder"):
        edit(folder / "config.json", half, **older)
    assert imported(folder).config == imported(checkpoint("t5gemma")[0]).config
    scaling = {"rope_type": "linear", "factor": 4.0}
    edit(folder / "config.json", "decoder", rope_theta=500.0, rope_scaling=scaling)
    assert {kind.rotary for kind in imported(folder).config.decoder.kinds} == {Rotary(500.0, 4.0)}


def test_buckets_are_those_of_transformers():
    theirs = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    distances = torch.arange(400)
    for num_buckets, max_distance in ((32, 128), (16, 64), (32, 100)):
        expected = theirs(-distances, False, num_buckets, max_distance)
        assert torch.equal(bucket_of(distances, num_buckets, max_distance), expected)
