import pytest
import torch

from specray.train import loss as module
from specray.train.loss import soft_labels, soft_loss
from specray.train.norm import rms_norm


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3)
    monkeypatch.setattr(module, "_BLOCK", 7)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("total_variation", [0.0, 0.7, 1.0])
def test_loss_and_gradients_equal_plain_torch(total_variation: float) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 8, requires_grad=True) for size in (20, 11))
    labels = soft_labels(torch.randn(6, 8), torch.randn(11, 8))
    label_of, importance = torch.randint(0, 6, (20,)), torch.rand(20)

    loss, agrees = soft_loss(hidden, weight, labels, label_of, importance, total_variation)
    got = torch.autograd.grad(2 * loss, (hidden, weight))

    logits = hidden @ weight.T
    wanted = labels[label_of]
    crossed = -(wanted * logits.log_softmax(-1)).sum(-1)
    distance = (wanted - logits.softmax(-1)).abs().sum(-1) / 2
    plain = importance @ ((1 - total_variation) * crossed + total_variation * distance)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, torch.autograd.grad(2 * plain, (hidden, weight)))
    assert torch.equal(agrees, logits.argmax(-1) == wanted.argmax(-1))


def test_frozen_output_weight_gets_no_gradient() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    labels = soft_labels(torch.randn(4, 8), weight)
    loss, _ = soft_loss(hidden, weight, labels, torch.arange(4), torch.ones(4))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_soft_labels_are_renormalized_probabilities() -> None:
    final, rows = torch.randn(300, 8), torch.randn(12, 8)
    torch.testing.assert_close(soft_labels(final, rows), (final @ rows.T).softmax(-1))


def test_rms_norm_and_its_gradients_equal_torch() -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    direction = torch.randn(2, 3, 8)
    ours, theirs = rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad((ours * direction).sum(), (x, weight)),
        torch.autograd.grad((theirs * direction).sum(), (x, weight)),
    )
