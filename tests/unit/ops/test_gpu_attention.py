"""What the Triton attention promises beyond `test_attention`: chunks, and one result wherever a token is computed."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specray.errors import ConfigError
from specray.ops.attention import AttentionBatch
from specray.ops.backends import make_backend
from specray.ops.gpu.attention import TritonAttention
from specray.ops.layer_attention import LayerAttention

KV_HEADS, GROUP, DIM, SLOTS = 2, 3, 16, 128
CONTEXT = 75  # keys before the tokens that are compared: more than two chunks of the tests
DEFAULT = LayerAttention()
ALL = LayerAttention(window=40, scale=0.3, softcap=2.0, sinks=torch.linspace(-1, 2, KV_HEADS * GROUP))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.ops.gpu.attention.CHUNK", 32)
    monkeypatch.setattr("specray.ops.gpu.attention.KEYS", 16)


class Tokens:
    """Tokens at positions 0 …, each with a query, a key and a value of its own."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(count, KV_HEADS * GROUP, DIM)
        self.kv = torch.randn(count, 2, KV_HEADS, DIM)
        self.slots = np.random.default_rng(0).permutation(np.arange(16, SLOTS))

    def attend(self, query_len: int, kv_len: int, enough_programs: int, way: LayerAttention = DEFAULT) -> Tensor:
        """The last `query_len` of the first `kv_len` tokens, of which the others are committed."""
        pool = torch.zeros(1, SLOTS, 2, KV_HEADS, DIM)
        slots = torch.from_numpy(self.slots[:kv_len])
        pool[0, slots] = self.kv[:kv_len]
        batch = AttentionBatch([query_len], [kv_len], slots[None], slots[kv_len - query_len :], [(0, 0)])
        backend = TritonAttention(pool, KV_HEADS * GROUP, [way])
        backend.enough_programs = enough_programs
        return backend.plan(batch)(0, self.q[kv_len - query_len : kv_len], self.kv[kv_len - query_len : kv_len])


@pytest.mark.parametrize("way", [DEFAULT, LayerAttention(window=20), LayerAttention(window=40), ALL])
def test_chunks_of_one_program_and_of_several_give_the_same_bits(way: LayerAttention) -> None:
    tokens = Tokens(CONTEXT)
    for kv_len in (1, 32, 33, 64, CONTEXT):
        assert torch.equal(tokens.attend(1, kv_len, 0, way), tokens.attend(1, kv_len, 10**6, way))


def test_a_path_of_a_tree_gives_the_bits_of_the_committed_tokens() -> None:
    """Node 2 is the first draft's child, and node 1 its sibling that is not on the path."""
    tokens = Tokens(CONTEXT + 3)
    expected = [tokens.attend(1, CONTEXT + depth + 1, 0) for depth in range(3)]
    nodes, depths = [0, 2, 3], [0, 1, 2]  # node 1 is a sibling of node 2
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    order = torch.tensor([0, 0, 1, 2])  # of each node's query and KV, by depth
    pool = torch.zeros(1, SLOTS, 2, KV_HEADS, DIM)
    slots = torch.from_numpy(tokens.slots[: CONTEXT + 4])
    pool[0, slots[:CONTEXT]] = tokens.kv[:CONTEXT]
    batch = AttentionBatch([4], [CONTEXT + 4], slots[None], slots[CONTEXT:], [(4, 4)], mask[None])
    q, kv = tokens.q[CONTEXT + order], tokens.kv[CONTEXT + order].clone()
    kv[1] = 100.0  # the sibling
    for enough_programs in (0, 10**6):
        backend = TritonAttention(pool, KV_HEADS * GROUP)
        backend.enough_programs = enough_programs
        seen = backend.plan(batch)(0, q, kv)
        assert all(torch.equal(seen[node], expected[depth][0]) for node, depth in zip(nodes, depths, strict=True))


def test_a_chunk_of_a_prompt_is_close_to_its_tokens_alone() -> None:
    """Tiles of different heights are summed by different BLAS calls in the interpreter, so bits may differ there."""
    tokens = Tokens(CONTEXT)
    whole = tokens.attend(CONTEXT, CONTEXT, 0)
    alone = torch.cat([tokens.attend(1, position + 1, 0) for position in range(CONTEXT)])
    torch.testing.assert_close(whole, alone, atol=1e-6, rtol=1e-5)


def test_other_requests_do_not_change_a_result() -> None:
    tokens = Tokens(CONTEXT)
    alone = tokens.attend(1, CONTEXT, 0)
    pool = torch.zeros(1, SLOTS, 2, KV_HEADS, DIM)
    slots = torch.from_numpy(tokens.slots[:CONTEXT])
    pool[0, slots] = tokens.kv
    batch = AttentionBatch(
        [1, 1], [7, CONTEXT], slots.repeat(2, 1), torch.stack((slots[6], slots[-1])), [(0, 0), (0, 0)]
    )
    q, kv = tokens.q[[6, CONTEXT - 1]], tokens.kv[[6, CONTEXT - 1]]
    assert torch.equal(TritonAttention(pool, KV_HEADS * GROUP).plan(batch)(0, q, kv)[1], alone[0])


def test_on_a_cpu_the_kernels_are_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(1, SLOTS, 2, KV_HEADS, DIM)
    assert isinstance(make_backend("triton", pool, KV_HEADS), TritonAttention)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="attention_backend=triton needs an NVIDIA GPU, and the device is cpu"):
        make_backend("triton", pool, KV_HEADS)
