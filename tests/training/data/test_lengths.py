import numpy as np
import pytest
from numpy.typing import NDArray

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.data.lengths import learn_length_bound, target_limits

Lengths = NDArray[np.int32]


def limits_of(bound: LengthBound, source_lengths: Lengths) -> Lengths:
    return np.array([bound.max_new_tokens(int(length)) for length in source_lengths], np.int32)


@pytest.mark.parametrize("ratio", [0.3, 1, 4])
def test_no_target_of_the_corpus_is_cut_and_there_is_room_above(ratio: float) -> None:
    chance = np.random.default_rng(1)
    sources = chance.integers(2, 100, 3000).astype(np.int32)
    targets = (5 + sources * ratio * chance.uniform(0.5, 2, 3000)).astype(np.int32)
    bound = learn_length_bound(sources, targets)
    assert (targets + 10 <= limits_of(bound, sources)).all()
    assert bound.max_new_tokens(100) < 100 * 4 * ratio + 40  # and yet it ends what repeats itself


def test_an_outlier_among_very_many_pairs_does_not_loosen_the_bound() -> None:
    sources, targets = np.full(20_001, 10, np.int32), np.full(20_001, 12, np.int32)
    bound = learn_length_bound(sources, targets)
    targets[7] = 250
    assert learn_length_bound(sources, targets).constant == bound.constant
    assert (targets > limits_of(bound, sources)).sum() == 1


def test_limits_are_those_of_each_source_and_never_above_the_models() -> None:
    config = TransformerConfig(
        vocab_size=260, d_model=8, d_ff=8, num_heads=1, num_encoder_layers=1, num_decoder_layers=1
    )
    sources = 1, 10, 200
    assert target_limits(sources, config, LengthBound(1.5, 3)) == [4, 18, 256]
    assert target_limits(sources, config, None) == [256, 256, 256]
