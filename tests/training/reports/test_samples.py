from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.reports.samples import choose_samples

TEXTS = [f"{'bob ' * number}a{'xyz' * (5 - number)}" for number in range(6)]


def test_models_with_other_tokenizers_are_followed_by_the_same_sources(model: Transformer) -> None:
    """The page of runs showed other sentences beside each other."""
    pairs = [SentencePair(text, "target") for text in TEXTS]
    tokenizers = [train_tokenizer([word] * 9, 300) for word in ("bob bob bob", "xyzxyzxyz")]
    orders = [sorted(TEXTS, key=lambda text: len(one.encode_source(text))) for one in tokenizers]
    assert orders[0] != orders[1]
    chosen = [choose_samples(pairs, model, one) for one in tokenizers]
    assert chosen[0] == chosen[1]
    lengths = [len(pair.source) for pair in chosen[0]]
    assert len(lengths) == 3
    assert lengths == sorted(lengths)
