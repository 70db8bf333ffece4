"""The drawing of a memory network's hops."""

import pytest

from seq2seq_serve.client.attention import save_hops
from seq2seq_serve.drawing import overlay
from seq2seq_serve.protos.seq2seq_v1_pb2 import Attention, Hop, Hypothesis


@pytest.mark.parametrize(
    ("second", "sentences", "hops"),
    [
        ([0.4, 0.6], ["Sam runs.", "Ida sleeps."], [[0.25, 0.75], [0.4, 0.6]]),
        ([0.1, 0.2], ["Sam runs.", "Ida sleeps.", "(no sentence)"], [[0.25, 0.75, 0], [0.1, 0.2, 0.7]]),
    ],
)
def test_weights_on_no_sentence_have_a_row_of_their_own(second, sentences, hops, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(overlay, "save_story", lambda *given: drawn.append(given))
    weights = [[0.25, 0.75], second]
    attention = Attention(
        source_tokens=["Sam runs.", "Ida sleeps."],
        target_tokens=["yes"],
        weights=second,
        hops=[Hop(weights=each) for each in weights],
    )
    save_hops(Hypothesis(text="yes", attention=attention), "Does Sam run? ", tmp_path / "a.png")
    [(rows, labels, title, path)] = drawn
    assert rows == [pytest.approx(row, abs=1e-6) for row in hops]
    assert (labels, title, path) == (sentences, "Does Sam run? → yes", tmp_path / "a.png")
