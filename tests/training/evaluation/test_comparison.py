import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.evaluation import scoring
from seq2seq_serve.training.evaluation.comparison import (
    TOKENIZATIONS,
    MetricSettings,
    compare,
    tokenization_for,
)


def texts(seed: int, noise: float) -> list[str]:
    """Sentences of cased words with their points on, with some words changed."""
    words = random.Random(0)
    changes = random.Random(seed)
    sentences = [
        [words.choice(["Ein", "Hund", "läuft", "schnell,", "heute"]) for _ in range(9)] for _ in range(40)
    ]
    return [
        " ".join("anders" if changes.random() < noise else word for word in sentence) + "."
        for sentence in sentences
    ]


REFERENCES = [texts(1, 0.0), texts(2, 0.1)]
BASELINE, SYSTEM = texts(3, 0.3), texts(4, 0.15)


def sacrebleu_command(tmp_path: Path, *flags: str) -> str:
    names = []
    for number, lines in enumerate([*REFERENCES, BASELINE, SYSTEM]):
        write_lines(tmp_path / str(number), lines)
        names.append(str(tmp_path / str(number)))
    command = [sys.executable, "-m", "sacrebleu", *names[:2], "-i", *names[2:], "-m", "bleu", "chrf", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("settings", [MetricSettings(num_resamples=200), MetricSettings("none", True, 100)])
def test_scores_intervals_and_p_values_are_those_of_sacrebleus_own_command(
    tmp_path: Path, settings: MetricSettings
) -> None:
    flags = ["--paired-bs", "--paired-bs-n", str(settings.num_resamples), "-f", "text", "-w", "4"]
    flags += [
        "--tokenize",
        settings.tokenization or "13a",
        *(["-lc", "--chrf-lowercase"] if settings.is_lower_cased else []),
    ]
    output = sacrebleu_command(tmp_path, *flags)
    for scores in compare([BASELINE, SYSTEM], REFERENCES, settings):
        for score in scores:
            found = re.findall(r"[\d.]+", output)
            for value in (score.score, score.mean, score.half_interval):
                assert f"{value:.4f}" in found
            if score.p_value is not None:
                assert f"{score.p_value:.4f}" in found
            assert score.signature in output


def test_without_a_bootstrap_there_is_the_score_alone() -> None:
    ((bleu, chrf),) = compare([SYSTEM], REFERENCES, MetricSettings(num_resamples=0))
    assert (bleu.metric, chrf.metric) == ("BLEU", "chrF2")
    assert bleu.mean is bleu.half_interval is bleu.p_value is None
    assert re.fullmatch(r"BLEU [\d.]+\n  [\d./]+ \(BP = .*\)\n  nrefs:2\|case:mixed\|.*", str(bleu))
    assert "bs:" not in bleu.signature


@pytest.mark.parametrize(
    ("text", "tokenization"),
    [
        ("나는 학생입니다. GPU 2개", "13a"),
        ("A house, 家, and a map.", "13a"),
        ("我是学生。GPU 有 2 个", "zh"),
        ("私は学生です。東京大学", "char"),
        ("รถไฟขบวนสุดท้ายออกจากสถานีตอนห้าทุ่ม", "char"),
        ("ខ្ញុំជាសិស្ស។", "char"),
        ("", "13a"),
    ],
)
def test_a_script_without_spaces_has_its_own_tokenization(text: str, tokenization: str) -> None:
    assert tokenization_for([text, None]) == tokenization


def test_the_references_decide_unless_the_caller_does() -> None:
    """By words of 13a, a translation of Chinese that is nearly right has nothing in common with it."""
    system, reference = ["我今天很高兴见到你。"], [["我今天很高兴看见你。"]]
    ((bleu, _),) = compare([system], reference, MetricSettings(num_resamples=0))
    assert bleu.score == sacrebleu.corpus_bleu(system, reference, tokenize="zh").score > 50
    ((words, _),) = compare([system], reference, MetricSettings("13a", num_resamples=0))
    assert words.score == 0
    assert scoring.score(system, reference[0]).bleu == bleu.score
    assert scoring.score(system, reference[0], "13a").bleu == 0
    assert "tok:zh" in scoring.score(system, reference[0]).bleu_signature


@pytest.mark.parametrize("tokenization", TOKENIZATIONS)
def test_a_tokenization_works_or_names_the_package_that_it_lacks(tokenization: str) -> None:
    settings = MetricSettings(tokenization, num_resamples=0)
    texts = [["나는 학생이다 ."]]
    needed = {"ja-mecab": "MeCab", "ko-mecab": "mecab_ko"}.get(tokenization)
    if needed and importlib.util.find_spec(needed) is None:
        with pytest.raises(ValueError, match=f"{tokenization}: .*pip install"):
            compare(texts, texts, settings)
    else:
        ((bleu, _),) = compare(texts, texts, settings)
        assert f"tok:{tokenization}" in bleu.signature


@pytest.mark.parametrize(
    ("systems", "references"), [([["a"], ["a", "b"]], [["a"]]), ([["a"]], [["a"], ["b", "c"]]), ([[]], [[]])]
)
def test_unequal_or_empty_sets_are_refused(systems: list[list[str]], references: list[list[str]]) -> None:
    with pytest.raises(ValueError, match=r"hypotheses and references have .* sentences"):
        compare(systems, references, MetricSettings())
