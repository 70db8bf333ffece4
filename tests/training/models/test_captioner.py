import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from seq2seq_serve.training.config import PAD_ID
from seq2seq_serve.training.models.captioner import Captioner, CaptionerConfig
from seq2seq_serve.training.models.vision import PictureFeatures

V, B, T, WIDTH = 40, 3, 6, 5
PICTURE = CaptionerConfig(V, 12, d_annotation=8, d_hidden=10, size=12, num_channels=4, dropout=0.0)
CLIP = dataclasses.replace(PICTURE, source="clip", size=16, max_source_length=9)
LOCAL = dataclasses.replace(CLIP, is_local=True)
FEATURES = dataclasses.replace(PICTURE, source="features", feature_width=WIDTH, max_source_length=9)
CONFIGS = {"picture": PICTURE, "clip": CLIP, "local clip": LOCAL, "features": FEATURES}
ATTENTIONS = ("soft", "hard", "mean")
LENGTHS = {"picture": (9, 9, 9), "clip": (7, 4, 1), "features": (7, 4, 1)}


def make(config: CaptionerConfig, **settings: Any) -> Captioner:
    torch.manual_seed(0)
    return Captioner(dataclasses.replace(config, **settings)).eval()


def random_batch(config: CaptionerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Sources of several lengths with rubbish in the padding, their mask, and targets."""
    torch.manual_seed(1)
    lengths = torch.tensor(LENGTHS[config.source])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    pixels = (config.size, config.size, 3)
    shape = {"picture": pixels, "clip": (mask.shape[1], *pixels), "features": (mask.shape[1], WIDTH)}
    x = torch.randint(0, 256, (B, *shape[config.source]), dtype=torch.uint8)
    return (x if config.source != "features" else x / 64), mask, torch.randint(4, V, (B, T))


@pytest.fixture(params=itertools.product(CONFIGS, ATTENTIONS), ids=" ".join)
def model(request: pytest.FixtureRequest) -> Captioner:
    name, attention = request.param
    return make(CONFIGS[name], attention=attention)


@pytest.fixture
def batch(model: Captioner) -> tuple[Tensor, Tensor, Tensor]:
    return random_batch(model.config)


def expected_logits(model: Captioner, annotations: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The equations of one row, word by word: logits (T, V) and alpha (T, M)."""
    weights = dict(model.named_parameters())

    def layer(name: str, x: Tensor) -> Tensor:
        y = weights[f"{name}.weight"] @ x
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    A, E, D = model.config.d_annotation, model.config.d_hidden, model.config.d_model
    mean = sum(annotations) / len(annotations)
    h, c = layer("initial", mean).tanh().split(E)
    logits, alphas = [], []
    for token_id in target_ids:
        word = weights["embedding.weight"][token_id] * math.sqrt(D)
        context, alpha = mean, torch.tensor([])
        if model.config.attention != "mean":
            hidden = [(layer("attention.key", a) + layer("attention.query", h)).tanh() for a in annotations]
            alpha = torch.stack([model.attention.v @ each for each in hidden]).softmax(0)
            context = sum((share * a for share, a in zip(alpha, annotations, strict=True)), torch.zeros(A))
            if model.config.attention == "hard":
                context = annotations[alpha.argmax()]
        z = torch.sigmoid(layer("gate", h)) * context
        i, f, g, o = (layer("cell.input", word) + layer("context", z) + layer("cell.hidden", h)).split(E)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        output = (word + layer("readout", torch.cat([h, z]))).tanh()
        logits.append(weights["embedding.weight"] @ output)
        alphas.append(alpha)
    return torch.stack(logits), torch.stack(alphas)


def test_decoding_follows_the_equations(model: Captioner, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    x, mask, target = batch
    with torch.no_grad():
        annotations = model.annotations(model.features(x))
        memory = model.encode(x, mask)
        logits, weights = model.decode_with_attention(target, memory, mask)
    for row in range(B):
        own = annotations[row, mask[row]]
        expected, alphas = expected_logits(model, own, target[row])
        torch.testing.assert_close(logits[row], expected)
        if weights:
            torch.testing.assert_close(weights[0][row, 0][:, mask[row]], alphas)
            assert weights[0][row, 0][:, ~mask[row]].abs().sum() == 0
    assert (model.alignment(weights) is None) == (model.config.attention == "mean")


@pytest.mark.parametrize("is_local", [False, True])
def test_only_local_features_of_a_frame_see_the_frames_before_it(is_local: bool) -> None:
    model = make(CLIP, is_local=is_local)
    clip, _, _ = random_batch(CLIP)
    changed = clip.clone()
    changed[0, 3] = 255 - changed[0, 3]
    before, after = (model.features(each)[0] for each in (clip, changed))
    differs = (before - after).abs().amax(dim=1) > 0
    assert differs.nonzero()[:, 0].tolist() == ([3, 4, 5] if is_local else [3])


def test_equal_patches_have_annotations_that_say_where_they_are() -> None:
    for config in (PICTURE, CLIP):
        model = make(config)
        x, mask, _ = random_batch(config)
        annotations, _ = model.encode(torch.full_like(x, 100), torch.ones_like(mask))
        distances = torch.cdist(annotations[0], annotations[0]) + 10 * torch.eye(annotations.shape[1])
        assert distances.min() > 0.01


def test_a_place_is_a_patch_of_the_picture_row_after_row() -> None:
    model = make(dataclasses.replace(PICTURE, size=56))
    picture = torch.full((1, 56, 56, 3), 128, dtype=torch.uint8)
    changed = picture.clone()
    changed[0, 4:8, 48:52] = 255  # row 1, column 12
    difference = (model.features(picture) - model.features(changed)).abs().sum(dim=2)
    rows, columns = difference.view(14, 14).nonzero().unbind(1)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 6, 7, 13)


def test_contours_are_the_same_in_all_colours_and_colours_are_those_of_the_place() -> None:
    features = make(dataclasses.replace(PICTURE, size=24)).features
    assert isinstance(features, PictureFeatures)
    pixels = torch.rand(2, 3, 24, 24)
    contours, colours = features.contours(pixels), features.colours(pixels)
    torch.testing.assert_close(features.contours(pixels.flip(1)), contours)  # blue, green, red
    bright = features.contours(0.3 - pixels)[:, :, 1:-1, 1:-1]  # the border is a contour, too
    torch.testing.assert_close(bright[:, :, 3:-3, 3:-3], contours[:, :, 4:-4, 4:-4])
    assert (features.colours(pixels.flip(1)) - colours).abs().max() > 0.01
    pixels[0, :, 4:8, 8:12] = 0  # row 1, column 2
    changed = (features.colours(pixels) - colours).abs().sum(dim=1) > 0
    assert changed.nonzero().tolist() == [[0, 1, 2]]


def hard(**settings: Any) -> Captioner:
    """A model in training whose rows all sample their places."""
    return make(FEATURES, attention="hard", **({"soft_share": 0.0, "entropy_weight": 0.0} | settings)).train()


def gradients(model: Captioner, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    names = (name for name, _ in model.named_parameters())
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def test_the_gradient_of_sampled_places_is_right_in_expectation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all places that can be sampled, the expected gradient is the gradient of the expected loss."""
    model = hard()
    features, mask = torch.randn(1, 3, WIDTH), torch.ones(1, 3, dtype=torch.bool)
    target_ids, label_ids = torch.tensor([[1, 7, 9, 9]]), torch.tensor([[7, 9, 2, PAD_ID]])
    expected_loss = torch.zeros(())
    found = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for places in itertools.product(range(3), repeat=3):
        model.baseline[:3] = torch.tensor([-3.0, -0.5, -2.0])  # any constant
        drawn = iter([*places, 0])
        monkeypatch.setattr(model, "_draw_places", lambda _, drawn=drawn: torch.tensor([next(drawn)]))
        memory = model.encode(features, mask)
        states, trace = model.decode_and_trace(target_ids, memory, mask)
        log_p = model.project(states).log_softmax(-1)[0, range(3), label_ids[0, :3]]
        cross_entropy = -log_p.mean()
        probability = trace[2][0, :3].sum().exp()
        expected_loss = expected_loss + probability * cross_entropy
        extra = model.extra_loss(trace, states, label_ids)
        assert extra is not None
        for name, gradient in gradients(model, cross_entropy + extra).items():
            found[name] += probability.detach() * gradient
    expected = gradients(model, expected_loss)
    assert expected["attention.query.weight"].abs().max() > 1e-4
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_places_are_sampled_from_alpha_among_a_rows_own() -> None:
    model, num_rows = hard(), 4000
    mask = (torch.arange(6) < 4).expand(num_rows, -1)
    memory = model.encode(torch.randn(1, 6, WIDTH).expand(num_rows, -1, -1), mask)
    target_ids = torch.ones(num_rows, 1, dtype=torch.int64)
    _, (weights, _, log_chosen, is_hard) = model.decode_and_trace(target_ids, memory, mask)
    assert is_hard.all()
    assert weights[:, :, 4:].sum() == 0
    for share in weights[0, 0, :4]:
        found = torch.isclose(log_chosen[:, 0], share.log()).float().mean()
        assert abs(found - share) < 4 * (share * (1 - share) / num_rows) ** 0.5  # four standard errors


def test_a_share_of_the_rows_has_the_soft_context_and_no_loss_of_sampled_places() -> None:
    model, soft = hard(soft_share=0.5), make(FEATURES)
    soft.load_state_dict(model.state_dict())
    x, mask, target = (each[:2].repeat_interleave(200, dim=0) for each in random_batch(FEATURES))
    memory = model.encode(x, mask)
    states, (*trace, is_hard) = model.decode_and_trace(target, memory, mask)
    is_soft = ~is_hard[:, 0]
    assert 0.35 < is_soft.float().mean() < 0.65
    difference = (states - soft.decode_states(target, memory, mask)).abs().amax(dim=(1, 2))
    assert difference[is_soft].max() < 1e-5
    assert difference[~is_soft].min() > 1e-5
    log_chosen = trace[2].detach().requires_grad_()
    extra = model.extra_loss((*trace[:2], log_chosen, is_hard), states, target)
    assert extra is not None
    (gradient,) = torch.autograd.grad(extra, log_chosen)
    assert gradient[is_soft].abs().max() == 0
    assert gradient[~is_soft].abs().min() > 0


def test_the_baseline_follows_the_log_probability_of_each_position() -> None:
    model = hard()
    torch.manual_seed(1)
    states, label_ids = torch.randn(B, 3, 12), torch.tensor([[5, 6, 7], [8, 2, PAD_ID], [2, PAD_ID, PAD_ID]])
    trace = torch.full((B, 3, 1), 1.0), torch.ones(B, 1, dtype=torch.bool), torch.zeros(B, 3)
    is_hard = torch.tensor([[True], [True], [False]])
    log_p = model.project(states).log_softmax(-1).gather(2, label_ids[:, :, None])[:, :, 0].detach()
    means = torch.stack([log_p[:2, 0].mean(), log_p[:2, 1].mean(), log_p[0, 2]])
    model.eval().extra_loss((*trace, is_hard), states, label_ids)
    assert model.baseline.abs().max() == 0  # evaluation changes nothing
    model.train()
    for expected in (0.1 * means, 0.19 * means):
        model.begin_step(1)
        for row in range(B):  # a batch in pieces
            piece = [each[row : row + 1] for each in (*trace, is_hard, states, label_ids)]
            model.extra_loss(tuple(piece[:4]), *piece[4:])
        model.finish_step(lambda own: own)
        torch.testing.assert_close(model.baseline[:3], expected)
    assert model.baseline[3:].abs().max() == 0
    assert "baseline" in model.state_dict()


def test_the_entropy_of_alpha_is_rewarded() -> None:
    model = hard(entropy_weight=0.5, reward_weight=0.0)
    weights = torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]], requires_grad=True)
    mask, label_ids = torch.tensor([[True, True, False]]), torch.tensor([[5, 2, PAD_ID]])
    trace = weights, mask, torch.zeros(1, 3), torch.tensor([[True]])
    extra = model.extra_loss(trace, torch.zeros(1, 3, 12), label_ids)
    assert extra is not None
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(extra, torch.tensor(-0.5 * entropy / 2))
    extra.backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


def test_the_penalty_wants_every_place_looked_at_once() -> None:
    model = make(FEATURES, stochastic_penalty=0.3).train()
    weights = torch.tensor([[[0.25, 0.75, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    mask, label_ids = torch.tensor([[True, True, False]]), torch.tensor([[5, 2, PAD_ID]])
    extra = model.extra_loss((weights, mask), torch.zeros(1, 3, 12), label_ids)
    torch.testing.assert_close(extra, torch.tensor(0.3 * (0.25**2 + 0.25**2) / 2))
    assert make(FEATURES).extra_loss((weights, mask), torch.zeros(1, 3, 12), label_ids) is None


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (PICTURE, {"size": 30}, "size is 30, and must be a multiple of 4"),
        (PICTURE, {"size": 64, "max_source_length": 196}, "at least 256, the places of 64 x 64 pixels"),
        (
            PICTURE,
            {"source": "sound"},
            "source is 'sound', and must be 'picture', 'clip', 'features' or 'nothing'",
        ),
        (PICTURE, {"attention": "none"}, "attention is 'none', and must be 'soft', 'hard' or 'mean'"),
        (PICTURE, {"is_local": True}, "is_local is True, and must be false unless source is clip"),
        (PICTURE, {"feature_width": 5}, "feature_width is 5, and must be null unless source is features"),
        (FEATURES, {"feature_width": None}, "feature_width is None, and must be the width of the features"),
        (CLIP, {"is_local": 1}, "is_local is 1, and must be true or false"),
        (PICTURE, {"soft_share": 1.5}, "soft_share is 1.5, and must be at most 1"),
        (PICTURE, {"reward_weight": -1}, "reward_weight is -1, and must be at least 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    config: CaptionerConfig, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **settings)
