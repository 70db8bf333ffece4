"""Adapters that `peft` saved, served beside their base: the tokens and scores of transformers with peft."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from seq2seq_serve import load
from seq2seq_serve.bundle.adapters import AdapterError, load_adapter
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.__main__ import main
from seq2seq_serve.export.exporter import ExportError
from seq2seq_serve.export.huggingface.adapters import export_adapter
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.export.huggingface.reference import read_theirs
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, open_checkpoint
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import config_of, family_of
from tests.export.huggingface.checkpoints import DEEP, SHALLOW, SOUNDS, Depth, edit, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALL = {"target_modules": "all-linear", "r": 2}
# Every way in which peft's LoRA chooses and scales modules, and families of all kinds
WAYS = {
    "names": ("marian", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 20}),
    "pattern": ("marian", {"target_modules": r".*decoder.*\.(k_proj|fc1)", "r": 3, "lora_alpha": 5}),
    "rslora": ("marian", ALL | {"use_rslora": True, "lora_alpha": 3}),
    "patterns": ("marian", ALL | {"rank_pattern": {"fc2": 5}, "alpha_pattern": {"q_proj": 30}}),
    "layers": (
        "marian",
        {"target_modules": ["q_proj", "fc1"], "r": 2, "layers_to_transform": [0], "layers_pattern": "layers"},
    ),
    "t5": ("t5", {"target_modules": ["q", "v", "wi", "wo"], "r": 3}),
    "t5-1.1": ("t5-1.1", ALL),
    "bart": ("bart", ALL),
    "nllb": ("nllb", ALL),
    "mbart50": ("mbart50", {"target_modules": ["fc1", "out_proj"], "r": 3}),
    "whisper": ("whisper", ALL),
    "trocr": ("trocr", ALL),
    "t5gemma2": ("t5gemma2", {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"], "r": 3}),
}
QUICK = ("names", "patterns")
SETTINGS = {"provider": "cpu", "threads": 1, "max_slots": 8}


@pytest.fixture(scope="session")
def adaptable(made_once):
    """A folder with a checkpoint, and its bundle whose rows may name adapters."""

    def make(case, folder) -> None:
        depth = Depth(2, 1) if case in SOUNDS else SHALLOW
        make_checkpoint(case, folder / "checkpoint", depth)
        export_checkpoint(folder / "checkpoint", folder / "bundle", [Precision.FP32], adapters=True)

    return lambda case: made_once(f"adaptable-{case}", lambda folder: make(case, folder))


def media_of(folder):
    checkpoint = open_checkpoint(folder)
    return config_of(family_of(checkpoint), checkpoint, Limits()).media


def saved(folder, path, config, *, seed: int = 0):
    """Saves a random adapter of a checkpoint; returns the model with it."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(read_theirs(folder, media_of(folder)), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


def sources_of(manifest, media, count: int) -> list:
    rng = np.random.default_rng(0)
    if media is not None:
        return [media.random(rng, 0, 0) for _ in range(count)]
    taken = {manifest.special_ids.pad_id, *manifest.special_ids.eos_ids}
    usable = [one for one in range(min(manifest.source_vocab_size, 60)) if one not in taken]
    end = manifest.special_ids.eos_ids[0]
    return [[*rng.choice(usable, rng.integers(1, 9)).tolist(), end] for _ in range(count)]


def start_of(manifest, chosen) -> list[int]:
    """The tokens that the decoder reads before a target."""
    return [
        manifest.choices[place].ids[chosen[place]] if isinstance(place, str) else place
        for place in manifest.template.start
    ]


def their_scores(model, media, source, start: list[int], target: list[int]):
    """The log-probabilities of all tokens at each place of a target, (T, V)."""
    ids = torch.tensor([[*start, *target]])
    if media is None:
        arguments = {"input_ids": torch.tensor([source])}
    else:
        arguments = media.arguments(media.tensors([source])[0])
    with torch.inference_mode():
        logits = model(**arguments, decoder_input_ids=ids[:, :-1]).logits
    return logits.log_softmax(-1)[0, len(start) - 1 :]


@pytest.mark.parametrize(
    "way", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WAYS]
)
def test_rows_with_an_adapter_have_the_tokens_and_scores_of_peft(way, adaptable, tmp_path):
    """A token of a greedy target is the best of the model that peft makes, unless it may not be chosen."""
    case, config = WAYS[way]
    folder = adaptable(case)
    checkpoint, bundle_path = folder / "checkpoint", folder / "bundle"
    theirs = {}
    for seed, name in enumerate("ab"):
        theirs[name] = saved(checkpoint, tmp_path / name, peft.LoraConfig(**config), seed=seed)
        export_adapter(tmp_path / name, bundle_path, tmp_path / f"our-{name}", checkpoint_path=checkpoint)
    manifest, media = load_bundle(bundle_path).manifest, media_of(checkpoint)
    sources = sources_of(manifest, media, 2 if media else 8)
    chosen = {name: one.default or sorted(one.ids)[0] for name, one in manifest.choices.items()}
    generation = manifest.generation
    is_free = not (generation.suppressed_token_ids or generation.begin_suppressed_token_ids)
    num_forced = len(manifest.template.forced)
    given = sources if media is None else [next(iter(source.values())) for source in sources]
    largest_change = 0.0
    with load(bundle_path, adapters={name: tmp_path / f"our-{name}" for name in theirs}, **SETTINGS) as model:
        for name, its in theirs.items():
            answers = list(model.generate(given, adapter=name, max_new_tokens=8, beam_size=1, **chosen))
            for source, one, answer in zip(sources, given, answers, strict=True):
                target = list(answer.hypotheses[0].token_ids)
                expected = their_scores(its, media, source, start_of(manifest, chosen), target)
                found, alone = (
                    np.array(model.score(one, target, adapter=which, **chosen).log_probabilities)
                    for which in (name, "")
                )
                best = expected[range(len(target)), target]
                np.testing.assert_allclose(found[: len(best)], best, atol=5e-3)  # terms in half precision
                largest_change = max(largest_change, np.abs(found - alone).max())
                if is_free:
                    assert expected.argmax(-1).tolist()[num_forced:] == target[num_forced:]
    assert largest_change > 0.05


REFUSED = [
    ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["fc2"]}, "trained modules"),
    ({"target_modules": ["q_proj"], "bias": "lora_only"}, "trained biases"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "lora_embedding"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_changes_the_model_otherwise_is_refused_by_name(config, text, adaptable, tmp_path, capsys):
    folder = adaptable("marian")
    saved(folder / "checkpoint", tmp_path / "a", peft.LoraConfig(**config))
    arguments = [tmp_path / "a", folder / "bundle", tmp_path / "out", "--checkpoint", folder / "checkpoint"]
    assert main(["adapter", *map(str, arguments)]) == 1
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert text in line
    assert "--merge" in line
    assert not (tmp_path / "out").exists()


def test_another_kind_of_adapter_is_refused(adaptable, tmp_path):
    folder = adaptable("marian")
    saved(folder / "checkpoint", tmp_path, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(CheckpointError, match=r"kind IA3, and LORA is served: .*--merge"):
        export_adapter(tmp_path, folder / "bundle", tmp_path / "out")


def test_an_adapter_of_another_base_is_refused(adaptable, tmp_path):
    """By its names and shapes, by the weights of the checkpoint, and by the name that it records."""
    folder = adaptable("marian")
    saved(folder / "checkpoint", tmp_path / "a", peft.LoraConfig(target_modules=["q_proj"], r=2))
    other = tmp_path / "other"
    shutil.copytree(folder / "checkpoint", other)
    weights = load_file(other / "model.safetensors")
    weights["model.encoder.layers.0.fc1.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not a bundle of .*other.*'checkpoint'"):
        export_adapter(tmp_path / "a", folder / "bundle", tmp_path / "out", checkpoint_path=other)
    edit(tmp_path / "a" / "adapter_config.json", base_model_name_or_path="someone/gone")
    with pytest.raises(CheckpointError, match=r"'someone/gone', which is not a folder here: .*--checkpoint"):
        export_adapter(tmp_path / "a", folder / "bundle", tmp_path / "out")
    make_checkpoint("bart", tmp_path / "bart", DEEP)
    saved(tmp_path / "bart", tmp_path / "deep", peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(CheckpointError, match=r"changes encoder_layers\.1\.self_attention\.query, which"):
        export_adapter(
            tmp_path / "deep", folder / "bundle", tmp_path / "out", checkpoint_path=folder / "checkpoint"
        )


def test_a_bundle_without_places_for_adapters_is_refused(imported, tmp_path):
    folder = imported("marian")
    saved(folder / "checkpoint", tmp_path / "a", peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ExportError, match="takes no adapters: export it with --adapters"):
        export_adapter(tmp_path / "a", folder / "bundle", tmp_path / "out")


def test_a_damaged_adapter_is_refused_with_what_is_wrong(adaptable, tmp_path):
    folder = adaptable("marian")
    saved(folder / "checkpoint", tmp_path / "a", peft.LoraConfig(target_modules=["q_proj"], r=2))
    out = tmp_path / "out"
    export_adapter(tmp_path / "a", folder / "bundle", out, checkpoint_path=folder / "checkpoint")
    with pytest.raises(ExportError, match="already exists"):
        export_adapter(tmp_path / "a", folder / "bundle", out, checkpoint_path=folder / "checkpoint")
    content = (out / "adapter.bin").read_bytes()
    manifest = json.loads((out / "adapter.json").read_text())

    def refused(text: str, weights: bytes = content, **changes) -> None:
        (out / "adapter.bin").write_bytes(weights)
        (out / "adapter.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(AdapterError, match=text):
            load_adapter(out)

    refused("was changed: its sha256", bytes([content[0] ^ 1, *content[1:]]))
    refused("was changed", content[:-2])
    refused("more than", content + b"xx")
    refused("format_version 2, and this program reads 1", format_version=2)
    refused("parts", parts={})
    refused("colour is unknown", colour="red")
    (out / "adapter.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter\.json"):
        load_adapter(out)
    (out / "adapter.json").unlink()
    with pytest.raises(AdapterError, match=r"is not an adapter, it has no adapter\.json"):
        load_adapter(out)
