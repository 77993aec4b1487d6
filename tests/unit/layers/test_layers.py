"""Layers compared with their definitions."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabEmbedding, VocabHead
from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding, rotate_

CPU = torch.device("cpu")
DIM = 8


class Scaled(Layer):
    """A layer with a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(torch.ones(DIM), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_replaced_submodule_is_called_and_registered() -> None:
    layer, x = Scaled(), torch.randn(2, DIM)
    layer.norm = RMSNorm(torch.full((DIM,), 2.0), 1e-5)
    assert torch.equal(layer(x), layer.norm(x))
    assert torch.equal(layer.state_dict()["norm.weight"], torch.full((DIM,), 2.0))
    assert torch.equal(deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_norm_equals_its_definition(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 3, 64) * scale + scale).to(dtype), torch.rand(64).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 9, 64)])
def test_norm_equals_torch(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    expected = F.rms_norm(x, (shape[-1],), weight, 1e-6)
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x), expected, atol=tolerance, rtol=tolerance)


def test_norm_of_zeros_and_of_no_rows() -> None:
    assert torch.equal(RMSNorm(torch.ones(16), 1e-5)(torch.zeros(2, 16)), torch.zeros(2, 16))
    assert RMSNorm(torch.ones(16), 1e-5)(torch.zeros(0, 16)).shape == (0, 16)


def test_nan_in_one_row_does_not_affect_other_rows_of_a_norm() -> None:
    x = torch.randn(3, 16)
    x[1, 4] = torch.nan
    out = RMSNorm(torch.ones(16), 1e-5)(x)
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()


def test_norm_does_not_change_its_input() -> None:
    x = torch.randn(4, 16)
    before = x.clone()
    RMSNorm(torch.ones(16), 1e-5)(x)
    assert torch.equal(x, before)


def rotated(positions: list[int], x: Tensor) -> Tensor:
    config = LlamaConfig(rope_theta=100.0, max_position_embeddings=64)
    rotary, turned = RotaryEmbedding(config, DIM, 64, torch.float32, CPU), x.clone()
    rotate_(turned, *rotary.at(torch.tensor(positions)))
    return turned


def test_pairs_are_rotated_by_position_times_frequency() -> None:
    x, positions = torch.randn(4, 3, DIM), [0, 1, 7, 63]
    halves = x[..., : DIM // 2].double().numpy() + 1j * x[..., DIM // 2 :].double().numpy()
    turn = np.exp(1j * np.outer(positions, 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))))[:, None]
    expected = np.concatenate(((halves * turn).real, (halves * turn).imag), -1)
    np.testing.assert_allclose(rotated(positions, x).numpy(), expected, atol=1e-5)


def test_a_base_that_is_a_large_integer_is_that_number() -> None:
    """config.json may write it without a point; torch takes no integer beyond 64 bits."""
    tables = [
        RotaryEmbedding(LlamaConfig(rope_theta=theta), DIM, 64, torch.float32, CPU).tables for theta in (10**25, 1e25)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))


def test_product_of_rotated_vectors_depends_only_on_their_distance() -> None:
    q, k = torch.randn(1, 1, DIM), torch.randn(1, 1, DIM)
    products = [float((rotated([p + 5], q) * rotated([p], k)).sum()) for p in (0, 10, 50)]
    assert products == pytest.approx([products[0]] * 3, abs=1e-5)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_type_equals_transformers(kind: str) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(ROPES[kind])
    )
    positions, x = torch.tensor([0, 1, 5, 63, 64, 255]), torch.randn(6, 2, 64)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    turned = x.clone()
    rotate_(turned, *RotaryEmbedding(config, 64, 256, torch.float32, CPU).at(positions))
    torch.testing.assert_close(turned, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_unknown_rope_type_is_refused() -> None:
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    with pytest.raises(ConfigError, match="spiral"):
        RotaryEmbedding(config, DIM, 64, torch.float32, CPU)


def test_a_context_whose_tables_would_fill_the_memory_is_refused() -> None:
    """Found by fuzzing config.json."""
    with pytest.raises(ConfigError, match="2147483647 tokens would take more than 2 GiB; set context_length <= "):
        RotaryEmbedding(LlamaConfig(), DIM, 2**31 - 1, torch.float32, CPU)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_equal_their_definition(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for layer in (ColumnParallelLinear(weight, bias), RowParallelLinear(weight, RankGroup(), bias)):
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_embedding_and_head_use_the_rows_of_their_matrix() -> None:
    weight = torch.randn(10, 6)
    assert torch.equal(VocabEmbedding(weight, RankGroup())(torch.tensor([3, 9, 3])), weight[[3, 9, 3]])
    logits = VocabHead(weight, 9, RankGroup())(torch.eye(6))
    torch.testing.assert_close(logits, weight[:9].T)


@pytest.mark.parametrize(("total", "size"), [(8, 1), (8, 2), (9, 4), (3, 3), (7, 2)])
def test_ranks_share_units_without_overlap_and_nearly_evenly(total: int, size: int) -> None:
    shares = [RankGroup.share(_group(rank, size), total) for rank in range(size)]
    assert [unit for share in shares for unit in range(total)[share]] == list(range(total))
    lengths = [share.stop - share.start for share in shares]
    assert max(lengths) - min(lengths) <= 1


def _group(rank: int, size: int) -> RankGroup:
    """A RankGroup without processes, which `share` does not need."""
    group = RankGroup()
    group.rank, group.size = rank, size
    return group


def test_collectives_of_one_rank_are_no_ops() -> None:
    group, tensor = RankGroup(), torch.randn(3, 2)
    assert group.leads
    assert torch.equal(group.sum(tensor), tensor)
    assert torch.equal(group.gather(tensor), tensor)
    assert group.broadcast_bytes(b"plan") == b"plan"
    assert group.smallest(7) == 7
