"""The imported model computes what transformers computes, whatever the family."""

import json
import re
import shutil

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
from tests.export.huggingface.checkpoints import CASES, edit, family_name, read_checkpoint
from tests.export.huggingface.tokenizer_files import only_pieces

# Sums of float32 in another order; scores of T5 are larger than those of others, which rounds more.
LIMITS = Limits()
RELATIVE = ("t5", "t5-1.1", "mt5", "byt5")
TOLERANCE = 3e-5
SHAPES = ((1, 1, 1), (3, 13, 9), (2, 40, 39))  # Whisper has 40 positions of targets
FAR_SHAPES = (*SHAPES, (2, 300, 200))  # beyond the largest distance of T5


def slow_unless(cases, *quick):
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


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
        (None, UPPER_HALF),
        ([[3, 0], [30, 1]], UPPER_HALF),
        (5, UPPER_HALF),
    ],
)
def test_heads_that_align_are_those_of_the_checkpoint_or_of_the_upper_layers(
    checkpoint, tmp_path, named, found
):
    folder, theirs = checkpoint("whisper")
    shutil.copytree(folder, tmp_path / "copy")
    edit(tmp_path / "copy" / "generation_config.json", alignment_heads=named)
    ours = imported(tmp_path / "copy")
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
    ours = imported(folder, Limits(200, 150))
    expected, decoded, _ = log_probabilities(theirs, ours, 2, 200, 150)
    torch.testing.assert_close(decoded, expected, atol=TOLERANCE, rtol=0)


def test_a_model_with_a_table_has_as_many_positions_as_the_table(checkpoint):
    folder, _ = checkpoint("marian")
    with pytest.raises(CheckpointError, match=r"65, .* 64"):
        imported(folder, Limits(65, 0))


GENERAL = [{"tokenizer_class": name} for name in ("PreTrainedTokenizerFast", "TokenizersBackend", None)]


@pytest.mark.parametrize("settings", GENERAL)
@pytest.mark.parametrize("has_pieces_only", [False, True])
@pytest.mark.parametrize("case", ["mbart", "mbart50", "m2m100", "nllb"])
def test_a_general_tokenizer_is_of_the_family_that_has_its_languages(
    checkpoint, case, has_pieces_only, settings, tmp_path
):
    folder = shutil.copytree(checkpoint(case)[0], tmp_path / "copy")
    if has_pieces_only and case != "m2m100":
        only_pieces(folder, case)
    edit(folder / "tokenizer_config.json", **settings)
    assert family_of(open_checkpoint(folder)).name == case


@pytest.mark.parametrize("case", ["mbart50", "nllb"])
def test_a_general_tokenizer_without_languages_is_refused(checkpoint, case, tmp_path):
    folder = shutil.copytree(checkpoint(case)[0], tmp_path / "copy")
    written = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(re.sub(r'"(\w\w_[A-Z]{2}|\w{3}_[A-Z]\w{3})"', r'"x\1"', written))
    edit(folder / "tokenizer_config.json", tokenizer_class=None, extra_special_tokens=None)
    with pytest.raises(CheckpointError, match="tokenizer_class"):
        family_of(open_checkpoint(folder))


@pytest.mark.parametrize("case", ["whisper", "nllb", "t5gemma"])
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast"])
def test_files_of_a_tokenizer_that_a_folder_lacks_are_named(checkpoint, case, name, tmp_path):
    folder = shutil.copytree(checkpoint(case)[0], tmp_path / "copy")
    for file in folder.glob("*token*"):
        file.unlink()
    if name:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))

    def read():
        opened = open_checkpoint(folder)
        return read_tokenizers(folder, family_of(opened).name, opened.config, opened.generation)

    with pytest.raises(ValueError, match=r"has no .*tokenizer\.json.*: copy"):
        read()


def test_every_family_has_a_case():
    assert {family_name(case) for case in CASES} == {family.name for family in FAMILIES}


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a small T5 that a test may change."""
    shutil.copytree(checkpoint("t5")[0], tmp_path / "copy")
    return tmp_path / "copy"


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_weight_that_nothing_uses_is_refused_by_name(folder):
    change_weights(folder, lambda weights: weights.update({"encoder.adapter.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"not used: encoder.adapter.weight"):
        imported(folder)


def test_a_missing_weight_is_refused_by_name(folder):
    change_weights(folder, lambda weights: weights.pop("encoder.final_layer_norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing: encoder_norm.weight"):
        imported(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_that_is_not_finite_is_refused_by_name(folder, value, dtype):
    name = "decoder.block.0.layer.0.SelfAttention.v.weight"

    def damage(weights):
        weights[name] = weights[name].to(dtype)
        weights[name][3, 5] = value

    change_weights(folder, damage)
    with pytest.raises(CheckpointError, match=name):
        imported(folder)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"d_ff": 48}, r"wi.weight .*\[40, 32\], .*\[48, 32\]"),
        ({"feed_forward_proj": "laplace"}, "'laplace'"),
        ({"d_kv": 12}, "12 .* multiple of 8"),  # by the operator of attention
        ({"d_kv": None}, "lacks d_kv"),
    ],
)
def test_a_setting_that_is_missing_or_does_not_fit_is_refused(folder, settings, match):
    edit(folder / "config.json", **settings)
    with pytest.raises(CheckpointError, match=match):
        imported(folder)


def test_embeddings_that_are_stored_twice_are_one(folder):
    before = imported(folder)
    change_weights(
        folder, lambda weights: weights.update({"lm_head.weight": weights["shared.weight"].clone()})
    )
    after = imported(folder)
    assert after.output is None
    assert torch.equal(after.embedding.weight, before.embedding.weight)


# slow: the other families tie their weights as those of the quick cases do
@pytest.mark.parametrize(
    "case", slow_unless(CASES, "t5", "t5-1.1", "bart", "nllb", "marian-separate", "t5gemma")
)
def test_tied_weights_may_have_any_one_of_their_names(checkpoint, case, tmp_path):
    folder, theirs = checkpoint(case)
    expected, stored = imported(folder).state_dict(), load_file(folder / "model.safetensors")
    groups: dict[str, set[str]] = {}
    for name, origin in theirs.all_tied_weights_keys.items():
        if not name.endswith("eoi_embedding"):
            origin = origin.replace(".text_model", "")  # which files of T5Gemma 2 leave out
            groups.setdefault(origin, {origin}).add(name)
    for names in groups.values():
        (kept,) = (stored[name] for name in names if name in stored)
        others = {name: tensor for name, tensor in stored.items() if name not in names}
        for name in names:
            copy = tmp_path / name
            shutil.copytree(folder, copy)
            save_file(others | {name: kept}, copy / "model.safetensors", metadata={"format": "pt"})
            ours = imported(copy)
            assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items()), name
            wanted, given, _ = log_probabilities(read_checkpoint(case, copy), ours, 1, 5, 3)
            torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=0)


def test_madlads_layout_has_one_matrix_for_texts_and_another_for_logits(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("t5-1.1")[0], tmp_path / "copy")
    expected = imported(folder).state_dict()
    change_weights(
        folder,
        lambda weights: weights.update({"decoder.embed_tokens.weight": weights.pop("shared.weight")}),
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in imported(folder).state_dict().items())


@pytest.mark.parametrize(
    "case", slow_unless(CASES, "t5", "bart", "m2m100", "trocr-deit", "whisper", "t5gemma")
)
def test_buffers_that_older_releases_saved_are_ignored(checkpoint, case, tmp_path):
    folder = shutil.copytree(checkpoint(case)[0], tmp_path / "copy")
    old = (
        "model.encoder.version",
        "model.decoder.version",
        "encoder.embeddings.position_ids",
        "model.decoder.embed_positions._float_tensor",
        "model.encoder.layers.0.self_attn.rotary_emb.inv_freq",
    )
    change_weights(folder, lambda weights: weights.update({name: torch.full((1,), 3.0) for name in old}))
    expected = imported(checkpoint(case)[0]).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in imported(folder).state_dict().items())


def test_the_bias_that_old_files_of_t5_have_and_nobody_used_is_ignored(folder):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(32, 3)}))
    imported(folder)


@pytest.mark.parametrize("written", [{"scale_decoder_outputs": False}, {"tie_word_embeddings": False}])
def test_a_t5_whose_projection_is_not_scaled_says_so_in_one_of_two_ways(folder, written):
    assert imported(folder).config.output_scale == 32**-0.5
    edit(folder / "config.json", **{"scale_decoder_outputs": None} | written)
    assert imported(folder).config.output_scale == 1


def edited(folder, tmp_path, **changes):
    """A copy of a T5Gemma whose halves have other settings."""
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    config = json.loads(file.read_text())
    for side, settings in changes.items():
        config[side] = {key: value for key, value in (config[side] | settings).items() if value is not None}
    file.write_text(json.dumps(config))
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"attn_logit_softcapping": 9.0}, "attn_logit_softcapping differs"),
        ({"max_position_embeddings": None}, "lacks max_position_embeddings"),
    ],
)
def test_settings_of_t5gemma_that_are_not_supported_are_refused(checkpoint, tmp_path, settings, match):
    with pytest.raises(CheckpointError, match=match):
        imported(edited(checkpoint("t5gemma")[0], tmp_path, decoder=settings))


def test_biases_of_t5gemmas_attention_are_refused(checkpoint, tmp_path):
    biased = {"attention_bias": True}
    with pytest.raises(CheckpointError, match="attention_bias"):
        imported(edited(checkpoint("t5gemma")[0], tmp_path, encoder=biased, decoder=biased))


def test_older_settings_of_t5gemma_mean_the_same(checkpoint, tmp_path):
    """Files of transformers 4 have neither `layer_types` nor `rope_parameters`."""
    folder, _ = checkpoint("t5gemma")
    older = {"layer_types": None, "rope_parameters": None, "rope_theta": 10_000.0}
    config = imported(edited(folder, tmp_path, encoder=older, decoder=older)).config
    assert config == imported(folder).config
    stretched = {
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    folder = edited(folder, tmp_path / "other", decoder=stretched)
    assert {kind.rotary for kind in imported(folder).config.decoder.kinds} == {Rotary(500.0, 4.0)}


def test_buckets_are_those_of_transformers():
    theirs = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    distances = torch.arange(400)
    for num_buckets, max_distance in ((32, 128), (16, 64), (32, 100)):
        expected = theirs(-distances, False, num_buckets, max_distance)
        assert torch.equal(bucket_of(distances, num_buckets, max_distance), expected)


@pytest.mark.parametrize("case", ["trocr", "trocr-deit"])
def test_newer_names_of_weights_are_the_same_model(checkpoint, case, tmp_path):
    """Those that transformers 5 has in memory, and not yet in the files that it writes."""
    folder, theirs = checkpoint(case)
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert "encoder.layers.0.attention.q_proj.weight" in weights
    copy = shutil.copytree(folder, tmp_path / "copy")
    save_file(weights, copy / "model.safetensors")
    ours, expected = imported(copy).state_dict(), imported(folder).state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("enc_to_dec_proj.bias", r"enc_to_dec_proj .*\[\[32, 24\], None\]"),
        ("encoder.embeddings.position_embeddings", "missing: source_positions"),
    ],
)
def test_a_checkpoint_of_pictures_without_a_weight_is_refused(checkpoint, tmp_path, name, match):
    copy = shutil.copytree(checkpoint("trocr-deit")[0], tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights[name]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        imported(copy)


@pytest.mark.parametrize("shape", [(), (32,)])
@pytest.mark.parametrize(
    "name",
    ["encoder.embeddings.position_embeddings", "encoder.embeddings.patch_embeddings.projection.weight"],
)
def test_a_weight_of_too_few_axes_is_refused(checkpoint, tmp_path, name, shape):
    copy = shutil.copytree(checkpoint("trocr")[0], tmp_path / "copy")
    save_file(load_file(copy / "model.safetensors") | {name: torch.zeros(shape)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="has the shape"):
        imported(copy)
