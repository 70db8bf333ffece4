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

# Every way in which peft's LoRA names its modules, and what else it merges
LORA = {
    "names": {"target_modules": ["q_proj", "v_proj"], "r": 4},
    "pattern": {"target_modules": r".*decoder.*\.(k_proj|fc1)", "r": 3, "lora_alpha": 5},
    "all": {"target_modules": "all-linear", "r": 2, "use_rslora": True},
    "patterns": {"target_modules": "all-linear", "rank_pattern": {"fc2": 5}, "alpha_pattern": {"q_proj": 30}},
    "dora": {"target_modules": ["q_proj", "fc1"], "use_dora": True},
    "modules": {"target_modules": ["q_proj"], "modules_to_save": ["fc2"]},
    "biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
}


def saved(folder, path, config, *, seed=0):
    """Saves a random adapter for a checkpoint; returns the model with it."""
    checkpoint = open_checkpoint(folder)
    media = config_of(family_of(checkpoint), checkpoint, Limits()).media
    torch.manual_seed(seed)
    model = peft.get_peft_model(read_theirs(folder, media), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def differences(folder, adapter, model) -> tuple[float, float]:
    """The worst differences of log-probabilities: of the merged checkpoint, and of the checkpoint alone."""
    worst = []
    with merged_checkpoint(folder, adapter) as merged:
        for path in (merged, folder):
            checkpoint = open_checkpoint(path)
            family = family_of(checkpoint)
            config = config_of(family, checkpoint, Limits())
            batches = random_batches(config, checkpoint.config.get("pad_token_id", 1))
            with torch.inference_mode():
                expected = [
                    model(**batch.named_source(config.media), decoder_input_ids=batch.target_ids).logits
                    for batch in batches
                ]
            log_probabilities = [logits.log_softmax(-1) for logits in expected]
            worst.append(worst_difference(read_model(checkpoint, family, config), batches, log_probabilities))
    return worst[0], worst[1]


@pytest.mark.parametrize("way", LORA)
def test_a_merged_checkpoint_computes_what_peft_computes(way, checkpoint, tmp_path):
    folder, _ = checkpoint("marian", SHALLOW)
    model = saved(folder, tmp_path, peft.LoraConfig(**LORA[way]))
    merged, alone = differences(folder, tmp_path, model)
    assert merged < 1e-4
    assert alone > 1e-3


@pytest.mark.parametrize("case", ["t5", "bart", "nllb", "whisper", "trocr", "trocr-deit"])
def test_families_of_all_kinds_are_merged(case, checkpoint, tmp_path):
    folder, _ = checkpoint(case, SHALLOW)
    model = saved(folder, tmp_path, peft.LoraConfig(target_modules="all-linear", r=2))
    merged, alone = differences(folder, tmp_path, model)
    assert merged < 1e-4
    assert alone > 1e-3


def test_another_kind_of_adapter_is_merged_if_peft_can(checkpoint, tmp_path):
    folder, _ = checkpoint("bart", SHALLOW)
    config = peft.IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"])
    merged, _ = differences(folder, tmp_path, saved(folder, tmp_path, config))
    assert merged < 1e-4
    prompts = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    saved(folder, tmp_path / "prompts", prompts)
    with (
        pytest.raises(CheckpointError, match="PROMPT_TUNING"),
        merged_checkpoint(folder, tmp_path / "prompts"),
    ):
        pass


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_tokens_that_came_with_an_adapter_are_merged(checkpoint, tmp_path):
    folder, _ = checkpoint("bart", SHALLOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.add_tokens([f"<law{number}>" for number in range(model.config.vocab_size)])
    model.resize_token_embeddings(len(tokenizer))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with merged_checkpoint(folder, tmp_path) as merged:
        found = transformers.AutoModelForSeq2SeqLM.from_pretrained(merged, dtype=torch.float32).eval()
        assert transformers.AutoTokenizer.from_pretrained(merged).get_vocab() == tokenizer.get_vocab()
    ids = torch.tensor([[5, len(tokenizer) - 1, 7]])
    with torch.inference_mode():
        logits = [one(input_ids=ids, decoder_input_ids=ids).logits for one in (found, adapted)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_peft_does_not_save_whole_is_refused(checkpoint, tmp_path):
    folder, _ = checkpoint("bart", SHALLOW)
    # A trained copy of embeddings that are tied: peft saves one of them.
    saved(folder, tmp_path, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["shared"]))
    with pytest.raises(CheckpointError, match="cannot be merged"), merged_checkpoint(folder, tmp_path):
        pass


def test_an_adapter_of_another_model_is_refused(checkpoint, tmp_path):
    shallow, deep = (checkpoint("bart", depth)[0] for depth in (SHALLOW, DEEP))
    t5, _ = checkpoint("t5", SHALLOW)
    for folder, other in ((shallow, t5), (shallow, deep), (deep, shallow)):
        adapter = tmp_path / str(len(list(tmp_path.iterdir())))
        saved(other, adapter, peft.LoraConfig(target_modules=["fc1", "wo"]))
        with pytest.raises(CheckpointError, match="LORA"), merged_checkpoint(folder, adapter):
            pass
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
