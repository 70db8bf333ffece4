from seq2seq_serve.training.reports.curves import learning_curve

LINES = [
    {"step": 20, "kind": "train", "loss": 5.0},
    {"step": 40, "kind": "train", "loss": 4.0},
    {"step": 40, "kind": "dev", "loss": 4.5, "bleu": 12.0, "chrf": 30.0},
]


def test_the_picture_has_losses_and_scores_over_steps() -> None:
    losses, scores = learning_curve(LINES).axes
    assert (losses.get_ylabel(), scores.get_xlabel()) == ("nats a token", "step")
    assert scores.get_ylim()[0] == 0
    assert losses.get_xlim() == scores.get_xlim()
    curves = {
        line.get_label(): line.get_xydata().tolist() for axes in (losses, scores) for line in axes.lines
    }
    assert curves == {
        "training, as it is minimised": [[20, 5.0], [40, 4.0]],
        "dev, cross-entropy": [[40, 4.5]],
        "dev BLEU": [[40, 12.0]],
        "dev chrF": [[40, 30.0]],
    }
