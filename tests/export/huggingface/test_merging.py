"""Adapters that `peft` saved, merged into their checkpoints."""

import shutil

import numpy as np
import peft
import pytest
import torch
import transformers

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.export.__main__ import main
from seq2seq_serve.export.huggingface.merging import merged_checkpoint
from seq2seq_serve.export.huggingface.reference import random_batches, read_theirs, worst_difference
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, open_checkpoint
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import config_of, family_of
from seq2seq_serve.training.huggingface.weights import read_model
from tests.export.huggingface.checkpoints import DEEP, SHALLOW

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALL = {"target_modules": "all-linear", "r": 2}
# Every way in which peft's LoRA names its modules and what else it merges, and families of all kinds
LORA = [
    ("marian", {"target_modules": ["q_proj", "v_proj"], "r": 4}),
    ("marian", {"target_modules": r".*decoder.*\.(k_proj|fc1)", "r": 3, "lora_alpha": 5}),
    ("marian", {**ALL, "use_rslora": True}),
    ("marian", {**ALL, "rank_pattern": {"fc2": 5}, "alpha_pattern": {"q_proj": 30}}),
    ("marian", {"target_modules": ["q_proj", "fc1"], "use_dora": True}),
    ("marian", {"target_modules": ["q_proj"], "modules_to_save": ["fc2"]}),
    ("marian", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    *((case, ALL) for case in ("t5", "bart", "nllb", "whisper", "trocr", "trocr-deit")),
]
IA3 = peft.IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"])


def adapted(model, config):
    """A model with a random adapter."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def saved(folder, path, config):
    """Saves a random adapter for a checkpoint; returns the model with it."""
    checkpoint = open_checkpoint(folder)
    media = config_of(family_of(checkpoint), checkpoint, Limits()).media
    model = adapted(read_theirs(folder, media), config)
    model.save_pretrained(path)
    return model


def difference(folder, model) -> float:
    """The worst difference of log-probabilities of a checkpoint from a model with an adapter."""
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint)
    config = config_of(family, checkpoint, Limits())
    batches = random_batches(config, checkpoint.config.get("pad_token_id", 1))
    with torch.inference_mode():
        expected = [
            model(**batch.named_source(config.media), decoder_input_ids=batch.target_ids).logits.log_softmax(
                -1
            )
            for batch in batches
        ]
    return worst_difference(read_model(checkpoint, family, config), batches, expected)


@pytest.mark.parametrize(("case", "config"), [*LORA, ("bart", IA3)])
def test_a_merged_checkpoint_computes_what_peft_computes(case, config, checkpoint, tmp_path):
    folder, _ = checkpoint(case, SHALLOW)
    model = saved(folder, tmp_path, peft.LoraConfig(**config) if isinstance(config, dict) else config)
    with merged_checkpoint(folder, tmp_path) as merged:
        assert difference(merged, model) < 1e-4
    assert difference(folder, model) > 1e-3


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_tokens_that_came_with_an_adapter_are_merged(checkpoint, tmp_path):
    folder, _ = checkpoint("bart", SHALLOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.add_tokens([f"<law{number}>" for number in range(model.config.vocab_size)])
    model.resize_token_embeddings(len(tokenizer))
    tuned = adapted(model, peft.LoraConfig(target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with merged_checkpoint(folder, tmp_path) as merged:
        found = transformers.AutoModelForSeq2SeqLM.from_pretrained(merged, dtype=torch.float32).eval()
        assert transformers.AutoTokenizer.from_pretrained(merged).get_vocab() == tokenizer.get_vocab()
    ids = torch.tensor([[5, len(tokenizer) - 1, 7]])
    with torch.inference_mode():
        logits = [one(input_ids=ids, decoder_input_ids=ids).logits for one in (found, tuned)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def refused(folder, adapter, match):
    with pytest.raises(CheckpointError, match=match), merged_checkpoint(folder, adapter):
        pass


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_peft_does_not_save_whole_or_cannot_merge_is_refused(checkpoint, tmp_path):
    folder, _ = checkpoint("bart", SHALLOW)
    # A trained copy of embeddings that are tied: peft saves one of them.
    saved(folder, tmp_path, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["shared"]))
    refused(folder, tmp_path, "cannot be merged")
    prompts = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    saved(folder, tmp_path / "prompts", prompts)
    refused(folder, tmp_path / "prompts", "PROMPT_TUNING")


def test_an_adapter_of_another_model_is_refused(checkpoint, tmp_path):
    shallow, deep = (checkpoint("bart", depth)[0] for depth in (SHALLOW, DEEP))
    t5, _ = checkpoint("t5", SHALLOW)
    for folder, other in ((shallow, t5), (shallow, deep), (deep, shallow)):
        adapter = tmp_path / str(len(list(tmp_path.iterdir())))
        saved(other, adapter, peft.LoraConfig(target_modules=["fc1", "wo"]))
        refused(folder, adapter, "LORA")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"), merged_checkpoint(folder, folder):
        pass


def test_the_command_merges_an_adapter(checkpoint, tmp_path, capsys):
    folder, _ = checkpoint("marian", SHALLOW)
    adapter, bundle = tmp_path / "legal", tmp_path / "bundle"
    saved(folder, adapter, peft.LoraConfig(target_modules=["fc1"]))
    command = ["huggingface", str(folder), str(bundle), "--precision", "fp32", "--merge", str(adapter)]
    assert main(command) == 0
    assert str(adapter) in capsys.readouterr().err
    manifest = load_bundle(bundle).manifest
    assert manifest.provenance["adapter"] == "legal"
    assert manifest.provenance["checkpoint"] == folder.name
    assert np.isfinite(next(iter(manifest.variants.values())).parity.max_log_probability_difference)
    shutil.rmtree(bundle)
    assert main([*command[:-1], str(folder)]) == 1
    assert not bundle.exists()
