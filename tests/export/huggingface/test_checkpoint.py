"""What cannot be imported is refused by name, before a weight is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, open_checkpoint
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import config_of, family_of
from seq2seq_serve.training.huggingface.weights import read_model
from tests.export.huggingface.checkpoints import change_weights, edit


@pytest.fixture
def folder(copied):
    return copied("bart")


def imported(folder):
    opened = open_checkpoint(folder)
    family = family_of(opened)
    return read_model(opened, family, config_of(family, opened, Limits()))


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        family_of(open_checkpoint(folder))
    assert "\n" not in str(caught.value)


def test_what_is_no_checkpoint_is_refused(folder):
    refused(folder / "nothing", r"nothing .*hf download")
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    refused(folder, "no weights: .*tf_model.h5")
    (folder / "config.json").rename(folder / "adapter_config.json")
    refused(folder, "adapter, .*--merge")
    (folder / "adapter_config.json").unlink()
    refused(folder, "no config.json")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_refused(folder, name):
    (folder / "model.safetensors").unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 310020852\n"
    (folder / name).write_text(pointer)
    refused(folder, f"{name} .*git lfs pull")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_config_that_is_not_json_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, r"config.json is not (JSON|a JSON object)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "decoder-only .*GPT2LMHeadModel"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "decoder-only .*LlamaForCausalLM"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder .*BertForMaskedLM"),
        ({"architectures": ["BartForSequenceClassification"]}, "classifier .*BartForSequenceClassification"),
        ({"model_type": "umt5"}, "'umt5', .* marian, pegasus, bart, "),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(folder, changes, message):
    edit(folder / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("t5", "T5WithLMHeadModel"), ("bart", "BartForMaskedLM")]
)
def test_names_of_2020_are_those_of_models_that_write_texts(folder, model_type, architecture):
    edit(folder / "config.json", model_type=model_type, architectures=[architecture])
    assert family_of(open_checkpoint(folder)).name == model_type


class Evil:
    def __reduce__(self):
        return print, ("this would be code of the checkpoint",)


def test_damaged_weights_are_refused_and_code_is_not_run(folder, capsys):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        list(open_checkpoint(folder).weights())
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        list(open_checkpoint(folder).weights())
    assert capsys.readouterr().out == ""


def write_in_two(folder, *, as_bin):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    ending, index = ("bin", "pytorch_model.bin") if as_bin else ("safetensors", "model.safetensors")
    names = sorted(weights)
    parts = {f"part-{i}.{ending}": {name: weights[name] for name in names[i::2]} for i in range(2)}
    for file, part in parts.items():
        (torch.save if as_bin else save_file)(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / f"{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return list(parts)


@pytest.mark.parametrize("as_bin", [False, True])
def test_weights_may_be_in_several_files(folder, as_bin):
    num_before, before = open_checkpoint(folder).num_weights, imported(folder).state_dict()
    files = write_in_two(folder, as_bin=as_bin)
    after = imported(folder).state_dict()
    assert open_checkpoint(folder).num_weights == num_before >= sum(map(torch.numel, before.values()))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    (folder / files[1]).unlink()
    refused(folder, rf"lacks {files[1]}, which .*index.json names")


@pytest.mark.parametrize("name", ["base_model.model.{}", "{}.base_layer.weight", "{}.lora_A.default.weight"])
def test_an_adapter_that_is_not_merged_is_named(folder, name):
    first = min(load_file(folder / "model.safetensors"))
    change_weights(folder, lambda weights: weights.update({name.format(first): weights[first].clone()}))
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        imported(folder)


def test_tied_weights_of_a_bin_count_once(folder, checkpoint):
    num_weights = open_checkpoint(folder).num_weights
    weights = checkpoint("bart")[1].state_dict()
    assert sum(tensor.numel() for tensor in weights.values()) > 1.5 * num_weights
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    opened = open_checkpoint(folder)
    assert opened.num_weights == num_weights
    assert sum(file.stat().st_size for file in opened.files) >= 4 * num_weights, "not taken for float16"


def test_settings_of_generate_are_those_of_one_file(folder):
    file = folder / "generation_config.json"
    # A null is not taken over: `generate` of transformers would go on to the limit.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None, "pad_token_id": None}))
    generation = open_checkpoint(folder).generation
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 1)
    edit(folder / "generation_config.json", num_beams=4)
    edit(folder / "config.json", num_beams=7, max_length=62)
    assert open_checkpoint(folder).generation["num_beams"] == 4
    assert "max_length" not in open_checkpoint(folder).generation
    (folder / "generation_config.json").unlink()
    generation = open_checkpoint(folder).generation
    assert (generation["num_beams"], generation["max_length"]) == (7, 62)
    assert generation["eos_token_id"] == 2
    edit(
        folder / "config.json", force_bos_token_to_be_generated=True, bos_token_id=0, forced_bos_token_id=None
    )
    assert open_checkpoint(folder).generation["forced_bos_token_id"] == 0


@pytest.mark.parametrize("name", ["decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"])
def test_a_list_of_one_token_is_the_token(folder, name):
    """As in transformers: a second one would be for the second source of a batch."""
    edit(folder / "generation_config.json", **{name: [2]})
    assert open_checkpoint(folder).generation[name] == 2
    edit(folder / "generation_config.json", **{name: [2, 3]})
    refused(folder, rf"{name} is \[2, 3\]")
