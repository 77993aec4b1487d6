import pytest
import torch

from specray.ops import torch_ops
from specray.ops.cpu.library import kernels
from specray.ops.cpu.ops import CpuOps
from specray.train import loss as module
from specray.train.loss import Labels, soft_labels, soft_loss
from specray.train.trained_parts import rms_norm


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "_CHUNKS", {"cpu": 3})
    monkeypatch.setattr(module, "_BLOCK", 7)


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def _computing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU kernels, where they are there, and without."""
    if request.param == "torch":
        monkeypatch.setenv("SPECRAY_KERNELS", "torch")


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("total_variation", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", [1, 11, 64, 100])
def test_loss_and_gradients_equal_plain_torch(total_variation: float, size: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(count, 8, requires_grad=True) for count in (20, size))
    labels = soft_labels(torch.randn(6, 8), torch.randn(size, 8))
    label_of, importance = torch.randint(0, 6, (20,)), torch.rand(20)

    loss, agrees = soft_loss(hidden, weight, labels, label_of, importance, total_variation)
    got = torch.autograd.grad(2 * loss, (hidden, weight))

    logits = hidden @ weight.T
    wanted = labels.probs[label_of]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 12, 77])
def test_soft_labels_are_renormalized_probabilities(dtype: torch.dtype, size: int) -> None:
    final, rows = torch.randn(300, 8, dtype=dtype), torch.randn(size, 8, dtype=dtype)
    labels = soft_labels(final, rows)
    logits = final @ rows.T
    torch.testing.assert_close(labels.probs, logits.float().softmax(-1).to(dtype))
    assert torch.equal(logits.gather(1, labels.best[:, None])[:, 0], logits.amax(1))


@pytest.mark.parametrize("_computing", ["kernels"], indirect=True)
@pytest.mark.parametrize("total_variation", [0.0, 0.8])
def test_kernel_and_torch_agree_in_bfloat16(total_variation: float) -> None:
    """On logits of very different sizes. The gradients are rounded to bfloat16 once, the losses not at all."""
    if (own := kernels()) is None:
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)
    logits = (torch.randn(40, 333) * torch.logspace(-2, 2, 40)[:, None]).bfloat16()
    probs = (torch.randn(9, 333) * 5).softmax(-1).bfloat16()
    labels, label_of = Labels(probs, probs.argmax(-1)), torch.randint(0, 9, (40,))
    losses, agrees, by_kernel = torch.empty(40), torch.empty(40, dtype=torch.bool), logits.clone()
    CpuOps(own).compare_(by_kernel, (labels.probs, labels.best), label_of, total_variation, losses, agrees)
    in_float = logits.float()
    expected = torch_ops._compare_chunk_(in_float, probs[label_of].float(), labels.best[label_of], total_variation)
    torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(agrees, expected[1])
    torch.testing.assert_close(by_kernel, in_float.bfloat16(), rtol=1e-2, atol=1e-6)


def test_rms_norm_and_its_gradients_equal_torch() -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    direction = torch.randn(2, 3, 8)
    ours, theirs = rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad((ours * direction).sum(), (x, weight)),
        torch.autograd.grad((theirs * direction).sum(), (x, weight)),
    )
