"""Stories, pictures and language models go through the whole of training, and resume bit for bit."""

import dataclasses
import re
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import ExportError, export_bundle
from seq2seq_serve.training import loop
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.commands import score_run
from seq2seq_serve.training.config import ModelConfig, TrainingConfig
from seq2seq_serve.training.data import built_in
from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, load_corpus
from seq2seq_serve.training.data.sources import Pictures
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation.comparison import MetricSettings
from seq2seq_serve.training.interrupt import TrainingInterrupted
from seq2seq_serve.training.models.captioner import Captioner, CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetwork, MemoryNetworkConfig
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import Preset, preset_named
from seq2seq_serve.training.run import RunFolder, Summary, TrainedModel, load_run, read_weights, write_weights

CAPTIONER = {"vocab_size": 300, "d_model": 16, "d_hidden": 16, "d_annotation": 16, "size": 16}
CAPTIONER |= {"max_source_length": 16, "max_target_length": 16, "dropout": 0.1}
MODELS: dict[str, ModelConfig] = {
    "story": MemoryNetworkConfig(100, 16, max_source_length=9, max_target_length=4, num_linear_steps=6),
    "hard": CaptionerConfig(**CAPTIONER, attention="hard", entropy_weight=0.01),
    "nothing": CaptionerConfig(**CAPTIONER, source="nothing"),
}


def corpus_for(name: str, folder: Path) -> Corpus:
    """Twelve pairs and three for dev."""
    colours = "red", "green", "blue"
    pairs = []
    for number in range(15):
        colour = colours[number % 3]
        if name == "story":
            source = f"Sam is in room {number}. Sam likes {colour}. What does Sam like?"
            pairs.append(SentencePair(source, colour))
        else:
            file = folder / f"{number}.png"
            Image.new("RGB", (16, 16), colour).save(file)
            pairs.append(SentencePair(str(file), f"a {colour} picture"))
    return Corpus("colours", tuple(pairs[:12]), tuple(pairs[12:]))


def train(
    name: str, folder: Path, corpus: Corpus, files: CorpusFiles | None = None
) -> tuple[RunFolder, Summary]:
    run = RunFolder(folder)
    if not run.is_run:
        training = dataclasses.replace(
            preset_named("memory-network").training,
            max_steps=12,
            batch_tokens=40,
            eval_interval_steps=6,
            checkpoint_interval_steps=3,
        )
        preset = dataclasses.replace(preset_named("memory-network"), model=MODELS[name], training=training)
        start_run(run, preset, corpus, files)
    return run, continue_run(run, None, torch.device("cpu"), Console(file=StringIO()))


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_ends_in_the_same_weights(name, tmp_path, monkeypatch, press_ctrl_c):
    steps = []
    model_class = MemoryNetwork if name == "story" else Captioner
    begin_step = model_class.begin_step
    monkeypatch.setattr(model_class, "begin_step", lambda *args: (begin_step(*args), steps.append(args[1])))
    corpus = corpus_for(name, tmp_path)
    whole, summary = train(name, tmp_path / "whole", corpus)
    press_ctrl_c(5)
    with pytest.raises(TrainingInterrupted):
        train(name, tmp_path / "interrupted", corpus)
    interrupted, again = train(name, tmp_path / "interrupted", corpus)
    assert steps == [*range(1, 13)] * 2
    weights = [read_weights(folder.model_file, folder.read_config().model) for folder in (whole, interrupted)]
    for key in weights[0]:
        assert torch.equal(weights[0][key], weights[1][key]), key
    assert again.dev_score == summary.dev_score


@pytest.mark.parametrize("name", ["story", "nothing"])
def test_a_run_is_scored_by_its_own_metric(name, tmp_path, capsys):
    run, summary = train(name, tmp_path / "run", corpus_for(name, tmp_path))
    assert main(["score", str(run.path)]) == 0
    header, score = capsys.readouterr().out.splitlines()
    is_story = name == "story"
    assert score == (f"accuracy {summary.dev_accuracy:.2f} %" if is_story else f"loss {summary.dev_loss:.3f}")
    assert header.startswith(f"{run.path}, dev pairs, ")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("story", r"run attends to sentences, .* use `python -m client answer --attention FILE`"),
        ("hard", r"run attends to places, .* use `python -m client caption --attention FILE`"),
        ("nothing", "run is a language model: it has no source to attend to"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--encoder"]])
def test_attention_to_other_sources_than_texts_is_left_to_the_client(name, advice, flags, tmp_path, caplog):
    """The text was read as a story or as the bytes of a file's name."""
    run = RunFolder(tmp_path / "run")
    start_run(run, Preset("tiny", MODELS[name], TrainingConfig()), corpus_for(name, tmp_path))
    config = run.read_config().model
    write_weights(run.model_file, make_model(config).state_dict(), config)
    run.write_summary(Summary(0.0, 0.0, "", "", "random weights", steps=0, seconds=0.0))
    assert main(["attention", str(run.path), "Where is Sam?", *flags]) == 1
    assert re.search(advice, caplog.text)


def test_a_language_model_generates_nothing_in_an_evaluation(tmp_path, monkeypatch):
    """All its targets are equal, and each evaluation generated one for every dev pair."""
    monkeypatch.delattr(loop, "translate")
    run, summary = train("nothing", tmp_path / "run", corpus_for("nothing", tmp_path))
    assert (summary.dev_bleu, summary.dev_chrf, summary.dev_accuracy) == (None, None, None)
    assert summary.dev_score == -summary.dev_loss < 0
    dev = [line for line in run.read_metrics() if line["kind"] == "dev"]
    assert [line.keys() & {"loss", "bleu", "chrf", "accuracy"} for line in dev] == [{"loss"}] * 2


def test_a_captioner_starts_with_the_decoder_of_a_language_model(tmp_path):
    corpus = corpus_for("nothing", tmp_path)
    parent, _ = train("nothing", tmp_path / "language-model", corpus)
    with pytest.raises(ExportError, match="a language model cannot be served"):
        export_bundle(load_run(parent.path), tmp_path / "bundle", [Precision.FP32])
    size = load_run(parent.path).tokenizer.vocab_size
    run = RunFolder(tmp_path / "captioner")
    model = CaptionerConfig(**CAPTIONER | {"vocab_size": size})
    preset = dataclasses.replace(preset_named("captioner"), model=model)
    start_run(run, preset, corpus, parent=load_run(parent.path))
    initial = read_weights(run.initial_file, run.read_config().model)
    given = read_weights(parent.model_file, parent.read_config().model)
    assert torch.equal(initial["cell.hidden.weight"], given["cell.hidden.weight"])
    assert {key for key in initial if key not in given} == {
        key for key in initial if key.startswith(("features.", "annotations."))
    }


def check_goes_on(path: Path, corpus: Corpus | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumes the finished run, scores it, and reads its dev sources as an export does."""
    console = Console(file=StringIO())
    summary = continue_run(RunFolder(path), corpus, torch.device("cpu"), console, {"max_steps": 15})
    assert summary.steps == 15
    score_run(path, None, "dev", 1, 0.6, MetricSettings(), torch.device("cpu"))
    assert f"{path}, dev pairs, beam 1, 3 sentences" in capsys.readouterr().out
    trained = load_run(path)
    assert all(Path(source).is_relative_to(path.parent) for source, _ in trained.dev)
    kind = trained.model.source_kind
    assert len(kind.encode([source for source, _ in trained.dev], trained.tokenizer)) == len(trained.dev) > 0


@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_run_on_the_built_in_pictures_can_be_moved(is_encoded, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(built_in, "_NUM_PICTURES", {"train": 12, "dev": 3, "test": 2})
    monkeypatch.setitem(MODELS, "hard", dataclasses.replace(MODELS["hard"], max_target_length=99))
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    corpus = load_corpus(CorpusFiles(), 0, Pictures(16), RunFolder(folder).pictures)
    train("hard", folder, corpus)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    folder.rename(moved)
    if not is_encoded:
        shutil.rmtree(moved / "encoded")
    monkeypatch.chdir(moved)
    assert [Path(pair.source) for pair in RunFolder(moved).read_pairs("test")] == [
        moved / "pictures" / "test" / f"0000{number}.png" for number in range(2)
    ]
    check_goes_on(moved, None, capsys)


def test_a_run_on_pictures_that_were_moved_goes_on_with_the_corpus_given_again(tmp_path, capsys):
    data = tmp_path / "data"
    (data / "dev").mkdir(parents=True)
    corpus_for("hard", data)
    lines = [f"{number}.png\ta {('red', 'green', 'blue')[number % 3]} picture" for number in range(15)]
    (data / "train.tsv").write_text("\n".join(lines[:12]))
    (data / "dev" / "dev.tsv").write_text("\n".join(f"../{line}" for line in lines[12:]))

    def files() -> CorpusFiles:
        return CorpusFiles(tsv=str(data / "train.tsv"), dev_tsv=str(data / "dev" / "dev.tsv"))

    run, _ = train("hard", tmp_path / "runs" / "run", load_corpus(files(), 0, Pictures(16)), files())
    data = data.rename(run.path.parent / "data")
    with pytest.raises(ValueError, match=r"(?i)no such file"):
        continue_run(run, None, torch.device("cpu"), Console(file=StringIO()), {"max_steps": 15})
    check_goes_on(run.path, load_corpus(files(), 0, Pictures(16)), capsys)


@pytest.mark.parametrize("name", MODELS)
def test_a_child_may_change_what_its_parent_leaves_free(name, tmp_path):
    """A captioner refused max_target_length, and a memory network max_source_length, as a wrong size."""
    corpus = corpus_for(name, tmp_path)
    run = RunFolder(tmp_path / "parent")
    start_run(run, Preset("tiny", MODELS[name], TrainingConfig()), corpus)
    config = run.read_config().model
    model = make_model(config)
    for parameter in (*model.parameters(), *model.buffers()):
        torch.nn.init.ones_(parameter)
    parent = TrainedModel(model, run.read_tokenizer(), config, {}, [])
    for limit in ("max_source_length", "max_target_length"):
        child = RunFolder(tmp_path / limit)
        changed = dataclasses.replace(config, **{limit: getattr(config, limit) + 1})
        preset = Preset("tiny", changed, TrainingConfig())
        if limit not in config.free_in_a_child:
            with pytest.raises(ValueError, match=f"{limit} is .* and cannot become"):
                start_run(child, preset, corpus, parent=parent)
            continue
        start_run(child, preset, corpus, parent=parent)
        initial = read_weights(child.initial_file, changed)
        make_model(changed).load_state_dict(initial)
        anew = {key for key, weight in initial.items() if not (weight == 1).all()}
        assert anew == ({"baseline"} if name != "story" and limit == "max_target_length" else set())
    assert ("max_source_length" in config.free_in_a_child) == (name != "story")
