import pytest
import sacrebleu
import torch

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.training.config import EOS_ID
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.evaluation.scoring import score, translate
from seq2seq_serve.training.models.transformer import Transformer

REFERENCES = ["Today is Friday .", "I am a student who reads a book .", "It is finally Friday ."]


def test_scores_are_sacrebleus_own() -> None:
    hypotheses = ["Today is Monday .", "I am a student who reads books .", "It is Friday ."]
    result = score(hypotheses, REFERENCES)
    assert result.bleu == sacrebleu.corpus_bleu(hypotheses, [REFERENCES]).score
    assert 0 < result.bleu < 100
    assert result.chrf == sacrebleu.corpus_chrf(hypotheses, [REFERENCES]).score


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrong_number_of_hypotheses_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} hypotheses for {3 if count else 0} references"):
        score(REFERENCES[:count], REFERENCES if count else [])


def test_translations_keep_the_order_and_end_without_eos(model: Transformer) -> None:
    tokenizer = train_tokenizer([], 260)
    texts = ["abcdef", "a", "abc"]
    together = translate(model, tokenizer, texts)
    assert together == [translate(model, tokenizer, [text, "abcdef"])[0] for text in texts]
    assert translate(model, tokenizer, []) == []


@pytest.mark.parametrize("beam_size", [1, 2])
def test_a_model_that_repeats_itself_stops_at_the_bound(model: Transformer, beam_size: int) -> None:
    with torch.no_grad():
        model.embedding.weight[EOS_ID] = 0  # eos is never the most probable
    tokenizer = train_tokenizer([], 260)
    texts = ["a", "abcd"]
    bounded = translate(model, tokenizer, texts, beam_size=beam_size, length_bound=LengthBound(1.0, 3))
    whole = translate(model, tokenizer, texts, beam_size=beam_size)
    for text, long, short in zip(texts, whole, bounded, strict=True):
        assert tokenizer.encode(short) == tokenizer.encode(long)[: len(text) + 1 + 3]


def test_error_rates_count_the_edits_of_the_nearest_reference() -> None:
    hypotheses = [" a cat sat", "on the  mat"]
    result = score(hypotheses, [["a cat sat down", "a dog sat on it"], ["on a mat"]])
    assert result.wer == pytest.approx(100 * (1 + 1) / (4 + 3))
    assert result.cer == pytest.approx(100 * (len(" down") + 3) / (len("a cat sat down") + len("on a mat")))
    assert result.by("cer") == -result.cer
    assert score(["a b"], ["a b"]).error_rates == "WER 0.00 %, CER 0.00 %"
