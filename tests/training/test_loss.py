import dataclasses
import math
import random
import shutil

import pytest
import torch
from torch.nn import functional

from seq2seq_serve.training import fast_loss
from seq2seq_serve.training.config import PAD_ID
from seq2seq_serve.training.data.batches import Batch, make_batch
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.fast_loss import label_smoothed_loss
from seq2seq_serve.training.loss import BatchLoss, cross_entropy
from seq2seq_serve.training.models.captioner import Captioner, CaptionerConfig
from seq2seq_serve.training.models.recurrent import Recurrent, RecurrentConfig
from seq2seq_serve.training.models.transformer import Transformer


def test_label_smoothing_spreads_its_share_over_the_vocabulary() -> None:
    # p = (1/2, 1/4, 1/8, 1/8), q = (0.1, 0.1, 0.7, 0.1) at e = 0.4
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0]]).log()
    expected = torch.tensor((0.1 * 1 + 0.1 * 2 + 0.7 * 3 + 0.1 * 3) * math.log(2))
    torch.testing.assert_close(cross_entropy(logits, torch.tensor([2]), 0.4), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_definition_is_torchs(label_smoothing: float) -> None:
    torch.manual_seed(0)
    logits, label_ids = torch.randn(6, 20), torch.randint(20, (6,))
    expected = functional.cross_entropy(logits, label_ids, label_smoothing=label_smoothing)
    torch.testing.assert_close(cross_entropy(logits, label_ids, label_smoothing), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_fast_form_has_the_loss_and_the_gradients_of_the_definition(
    label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fast_loss._CHUNK_VALUES, "cpu", 3 * 50)  # 3 rows at a time, and 1 is left over
    torch.manual_seed(0)
    states, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    label_ids = torch.randint(50, (10,))
    expected = cross_entropy(states @ weight.T, label_ids, label_smoothing)
    expected_gradients = torch.autograd.grad(2 * expected, [states, weight])
    found = label_smoothed_loss(states, weight, label_ids, label_smoothing)
    torch.testing.assert_close(found, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(2 * found, [states, weight]), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


# The compiler imports a part of torch that uses what torch itself has deprecated.
of_torchs_own = pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")


@pytest.fixture
def batches() -> list[Batch]:
    """Of several lengths and sizes."""
    chance = random.Random(0)

    def ids(longest: int) -> list[int]:
        return chance.choices(range(4, 300), k=chance.randint(2, longest))

    return [
        make_batch([EncodedPair(ids(longest), ids(longest)) for _ in range(num_rows)])
        for longest, num_rows in ((5, 7), (9, 4), (20, 11))
    ]


def test_the_loss_of_a_batch_is_that_of_its_real_target_tokens(
    model: Transformer, batches: list[Batch]
) -> None:
    batch = batches[0]
    logits = model(*batch.source, batch.target_ids)
    labels = torch.zeros_like(batch.target_ids).flatten()
    labels[batch.label_places] = batch.label_ids
    expected = functional.cross_entropy(
        logits.flatten(0, 1), labels, ignore_index=PAD_ID, label_smoothing=0.0
    )
    torch.testing.assert_close(BatchLoss(model, torch.float32)(batch, 0.0), expected)


def test_bf16_loss_and_gradients_are_as_accurate_as_those_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    states = torch.randn(60, 16, requires_grad=True)
    weight = (0.5 * torch.randn(400, 16)).requires_grad_()
    label_ids = torch.randint(400, (30,)).repeat(2)

    def answer() -> list[torch.Tensor]:
        loss = label_smoothed_loss(states, weight, label_ids, 0.1)
        return [loss.detach(), *torch.autograd.grad(loss, [states, weight])]

    expected = answer()
    with torch.autocast("cpu", torch.bfloat16):
        found = answer()
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        assert 0 < (value - exact).norm() < 0.03 * exact.norm()  # bf16 has 8 bits of precision


def test_a_matrix_that_is_not_trained_may_be_in_bf16_and_gets_no_gradient() -> None:
    torch.manual_seed(0)
    weight, label_ids = (0.5 * torch.randn(400, 32)).bfloat16(), torch.randint(400, (60,))
    states = torch.randn(60, 32, requires_grad=True)
    trained = weight.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = label_smoothed_loss(states, trained, label_ids, 0.1)
        found = label_smoothed_loss(states, weight, label_ids, 0.1)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(loss, states) for loss in (found, expected)]
        assert torch.equal(*(gradient for (gradient,) in gradients))


def test_bf16_gradients_are_accurate_where_the_model_is_confident() -> None:
    """Half of the gradient was wrong: p, here 0.996, was rounded to 8 bits before 1 was subtracted."""
    torch.manual_seed(0)
    weight, label_ids = (0.5 * torch.randn(200, 64)).requires_grad_(), torch.randint(200, (60,))
    labels = weight.detach()[label_ids]
    towards_label = 12 * labels / labels.square().sum(dim=1, keepdim=True)
    states = (towards_label + 0.05 * torch.randn(60, 64)).requires_grad_()
    assert (states @ weight.t()).softmax(dim=1).gather(1, label_ids[:, None]).median() > 0.99

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(label_smoothed_loss(states, weight, label_ids, 0.0), [states, weight])

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    for value, exact in zip(found, expected, strict=True):
        assert (value - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("label_smoothing", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_a_certain_prediction_is_not_negative(dtype: torch.dtype, label_smoothing: float) -> None:
    """In bf16 the label's logit was the exact one, and the normaliser was that of rounded logits."""
    torch.manual_seed(0)
    weight = torch.randn(40, 16, requires_grad=True)
    label_ids = torch.arange(40)
    states = (3 * weight.detach() + 0.1 * torch.randn(40, 16)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        losses = [
            label_smoothed_loss(states[row : row + 1], weight, label_ids[row : row + 1], label_smoothing)
            for row in range(40)
        ]
    assert torch.stack(losses).min() >= 0


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_the_loss_has_the_gradients_of_the_extra_loss_and_not_its_value(attention: str) -> None:
    torch.manual_seed(0)
    sizes = {"d_annotation": 8, "d_hidden": 8, "feature_width": 5, "dropout": 0.0}
    config = CaptionerConfig(
        50, 8, source="features", attention=attention, stochastic_penalty=3.0, reward_weight=2.0, **sizes
    )
    model = Captioner(config).train()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    text = make_batch([EncodedPair([5, 6], [7, 8, 9]), EncodedPair([5], [10])])
    batch = dataclasses.replace(text, source=(torch.randn(2, 3, 5), mask))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def answer(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, parameters, retain_graph=True))

    torch.manual_seed(1)  # the places that hard attention draws
    states, trace = model.decode_and_trace(batch.target_ids, model.encode(*batch.source), mask)
    rows = states.flatten(0, 1)[batch.label_places]
    expected = label_smoothed_loss(rows, model.output_weight, batch.label_ids, 0.1)
    extra = model.extra_loss(trace, states, batch.padded_labels)
    assert extra is not None
    assert extra.abs() > 0.1
    torch.manual_seed(1)
    found = BatchLoss(model, torch.float32)(batch, 0.1)
    torch.testing.assert_close(found, expected)
    # Sums in another order: rounding.
    torch.testing.assert_close(answer(found), answer(expected + extra), rtol=1e-5, atol=1e-6)
    assert any((a - b).abs().max() > 0.01 for a, b in zip(answer(found), answer(expected), strict=True))


def test_a_model_that_would_be_compiled_for_each_length_is_not_compiled() -> None:
    model = Recurrent(RecurrentConfig(300, 8, 8, 1, 1))
    with pytest.raises(ValueError, match=r"a Recurrent model would be compiled again .* leave out --compile"):
        BatchLoss(model, torch.float32, is_compiled=True)


@pytest.mark.slow  # compiling takes a minute
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
@of_torchs_own
def test_a_compiled_model_has_the_same_loss_and_gradients_at_all_lengths(
    model: Transformer, batches: list[Batch]
) -> None:
    plain, compiled = BatchLoss(model, torch.float32), BatchLoss(model, torch.float32, is_compiled=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for batch in batches:
        losses = plain(batch, 0.1), compiled(batch, 0.1)
        torch.testing.assert_close(*losses)
        # Sums in another order: rounding.
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, parameters) for loss in losses), rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow  # all of compiling but its last step comes before the compiler is missed
@of_torchs_own
def test_a_missing_compiler_is_named(model: Transformer, batches: list[Batch]) -> None:
    from torch._inductor import config, utils  # takes long to import

    torch._dynamo.reset()
    with (
        utils.fresh_cache(),
        config.patch({"cpp.cxx": (None, "/no/compiler")}),
        pytest.raises(
            ValueError, match=r"InvalidCxxCompiler.*: install a C\+\+ compiler .* leave out --compile"
        ),
    ):
        BatchLoss(model, torch.float32, is_compiled=True)(batches[0], 0.1)
