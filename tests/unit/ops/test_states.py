"""A token's bits in layers with states: alone and in a batch, in a prompt chunk, decoded, and as a node of a tree."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from specray.ops.device_ops import ops_on
from specray.ops.states import AnyStateRows, PaddedStateRows, StatePass, StateRows, StateShape
from specray.ops.states_torch import Convolution, DeltaNet
from specray.ops.torch_ops import TorchOps

HEADS, K_DIM, V_DIM, WIDTH, LENGTH, SLOTS = 4, 8, 21, 4, 9, 8
TYPES = [torch.float32, torch.bfloat16, torch.float16]
# The path 1, 2, 5 of a tree of six drafts; the others are wrong.
TREE, PATH = [-1, 0, 1, 0, 1, 2, 3], [1, 2, 5]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class DeltaOperation:
    """As `specray.models.transformers_states` has them."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops
        rates, bias = -random(HEADS, seed=1).exp(), random(HEADS, seed=2)
        self.net = DeltaNet(2, HEADS, K_DIM, V_DIM, rates, bias, random(V_DIM, seed=3), 1e-6)
        self.shape = StateShape((HEADS, K_DIM, V_DIM), torch.float32, 0)

    def inputs(self, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
        sizes = (self.net.num_channels, HEADS, HEADS, HEADS * V_DIM)
        return [random(length, size, seed=seed + place).to(dtype) for place, size in enumerate(sizes)]

    def __call__(self, inputs: Sequence[Tensor], pool: Tensor, rows: AnyStateRows) -> Tensor:
        qkv, a, b, z = inputs
        return self._ops.gated_delta(self.net, qkv, a, b, z, pool, rows)


class ConvolutionOperation:
    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops
        self.conv = Convolution(random(WIDTH, 21, seed=1), random(21, seed=2), has_silu=True)
        self.shape = StateShape((WIDTH - 1, 21), torch.float32, 21)

    def inputs(self, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
        return [random(length, 21, seed=seed).to(dtype)]

    def __call__(self, inputs: Sequence[Tensor], pool: Tensor, rows: AnyStateRows) -> Tensor:
        return self._ops.convolve(self.conv, inputs[0], pool, rows)


KINDS = [DeltaOperation, ConvolutionOperation]
OPS = [
    pytest.param(ops, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, ops in (("torch", TorchOps()), ("best", ops_on(torch.device("cpu"))))
    for dtype in TYPES
]
if find_spec("triton") is not None:
    from specray.ops.gpu.ops import TritonOps

    OPS.append(pytest.param(TritonOps(), torch.bfloat16, id="triton-bfloat16"))  # its interpreter is slow
IN_GRAPHS = [each for each in OPS if not str(each.id).startswith("best")]
Operation = DeltaOperation | ConvolutionOperation


def pool_of(operation: Operation, dtype: torch.dtype) -> Tensor:
    """Nothing resets a state, so what lies in the pool is of other requests."""
    kept = operation.shape.dtype if isinstance(operation, DeltaOperation) else dtype
    return random(SLOTS, *operation.shape.shape, seed=9).to(kept)


def decoded(operation: Operation, inputs: Sequence[Tensor], pool: Tensor, slot: int) -> Tensor:
    """Row after row, each in a step of its own."""
    results = []
    for place in range(len(inputs[0])):
        rows = StateRows.of([slot], [1], [1], [place == 0])
        results.append(operation([part[place : place + 1] for part in inputs], pool, rows))
    return torch.cat(results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ops", "dtype"), OPS)
def test_chunks_and_batches_give_the_bits_of_decoding(ops: TorchOps, kind: type[Operation], dtype: torch.dtype) -> None:
    operation = kind(ops)
    first, second = (operation.inputs(LENGTH, dtype, seed) for seed in (20, 40))
    alone, pool = pool_of(operation, dtype), pool_of(operation, dtype)
    expected = decoded(operation, first, alone, 1), decoded(operation, second, alone, 3)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start, end in ((0, 2), (2, 3), (3, 9)):
        joined = [torch.cat((a[start:end], b[start:end])) for a, b in zip(first, second, strict=True)]
        copies = [{end - start - 1: 4}, {1: 6}] if start == 3 else None
        rows = StateRows.of([1, 3], [end - start] * 2, [end - start] * 2, [start == 0] * 2, copies=copies)
        parts = operation(joined, pool, rows).chunk(2)
        found[0].append(parts[0])
        found[1].append(parts[1])
    assert torch.equal(torch.cat(found[0]), expected[0])
    assert torch.equal(torch.cat(found[1]), expected[1])
    decoded(operation, [part[: LENGTH - 1] for part in first], alone, 4)
    decoded(operation, [part[:4] for part in second], alone, 6)
    assert torch.equal(pool, alone)


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ops", "dtype"), OPS)
def test_a_step_leaves_the_state_behind_the_accepted_drafts(
    ops: TorchOps, kind: type[Operation], accepted: int, dtype: torch.dtype
) -> None:
    """Two requests: a tree, of whose path a part is accepted, and a chain of which nothing is."""
    operation = kind(ops)
    text, wrong = operation.inputs(LENGTH, dtype, 20), operation.inputs(LENGTH, dtype, 40)
    expected, pool = pool_of(operation, dtype), pool_of(operation, dtype)
    results = decoded(operation, text, expected, 1)
    decoded(operation, [part[:5] for part in text], pool, 1)
    decoded(operation, [part[:3] for part in wrong], pool, 2)
    other = pool[2].clone()
    # Row 5 of the text is the root, rows 6 to 8 are the path.
    nodes = [wrong_part[:7].clone() for wrong_part in wrong]
    for part, right in zip(nodes, text, strict=True):
        part[[0, *PATH]] = right[5:9]
    chain = [part[3:6] for part in wrong]
    step = [torch.cat(parts) for parts in zip(nodes, chain, strict=True)]
    # Behind the root, behind the first accepted draft if there is one, and behind more than there are.
    copies: list[dict[int, int]] = [{1: 4, 2: 5, 9: 6}, {2: 7}]
    rows = StateRows.of([1, 2], [7, 3], [1, 1], [False] * 2, [TREE, [-1, 0, 1]], copies)
    states = StatePass([pool], rows, copies)
    assert not states.is_complete
    found = states.run(operation, *step)
    assert states.is_complete
    assert torch.equal(found[[0, *PATH]], results[5:9])
    states.commit([PATH[:accepted], []])
    after = pool_of(operation, dtype)
    decoded(operation, [part[: 6 + accepted] for part in text], after, 1)
    decoded(operation, [part[:4] for part in wrong], after, 2)
    decoded(operation, [part[:6] for part in text], after, 4)
    if accepted:
        decoded(operation, [part[:7] for part in text], after, 5)
    assert torch.equal(pool, after)
    assert not torch.equal(pool[2], other)


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ops", "dtype"), IN_GRAPHS)
def test_a_padded_step_gives_the_bits_and_states_of_a_ragged_one(
    ops: TorchOps, kind: type[Operation], accepted: int, dtype: torch.dtype
) -> None:
    """A tree, a chain that is padded to its size, and padding in front: its slot is another request's."""
    operation, width = kind(ops), len(TREE)
    ragged, padded = pool_of(operation, dtype), pool_of(operation, dtype)
    trees, slots, accepts = [TREE, [-1, 0, 1]], [1, 2], [PATH[:accepted], [1, 2]]
    inputs = [operation.inputs(length, dtype, seed) for length, seed in ((width, 20), (3, 40))]
    copies = [{1: 4, 2: 5}, {3: 6}]
    rows = StateRows.of(slots, [width, 3], [1, 1], [False, True], trees, copies)
    states = StatePass([ragged], rows, copies)
    expected = states.run(operation, *(torch.cat(parts) for parts in zip(*inputs, strict=True)))
    states.commit(accepts)

    def at_nodes(values: list[list[int]], fill: int = -1) -> Tensor:
        return torch.tensor([[fill] * width, *([*each, *[fill] * (width - len(each))] for each in values)])

    parents = at_nodes(trees)
    sees = torch.eye(width, dtype=torch.bool).repeat(3, 1, 1)
    for row, tree in enumerate(trees, 1):
        for node, parent in enumerate(tree[1:], 1):
            sees[row, node] |= sees[row, parent]
    stored = at_nodes([[4, 5], [-1, -1, 6]])
    of_slots, is_fresh = torch.tensor([2, *slots]), torch.tensor([True, False, True])
    step = [torch.zeros(3, width, part.shape[1], dtype=dtype) for part in inputs[0]]
    for row, of_request in enumerate(inputs, 1):
        for whole, part in zip(step, of_request, strict=True):
            whole[row, : len(part)] = part
    forward = PaddedStateRows(of_slots, torch.tensor([0, 1, 1]), is_fresh, parents, stored, sees)
    found = operation([part.flatten(0, 1) for part in step], padded, forward)
    found = found.view(3, width, -1)
    assert torch.equal(torch.cat((found[1], found[2, :3])), expected)
    nodes = at_nodes(accepts, fill=0)[:, : width - 1]
    chain = torch.arange(-1, width - 2).expand(3, -1)
    kept = [part[torch.arange(3)[:, None], nodes].flatten(0, 1) for part in step]
    behind = PaddedStateRows(
        of_slots, torch.tensor([0, accepted, 2]), torch.zeros(3, dtype=torch.bool), chain, stored[:, 1:]
    )
    operation(kept, padded, behind)
    assert torch.equal(padded, ragged)
    # The same rows without padding between them, but behind them.
    flat = [torch.cat((*parts, parts[0][:2])) for parts in zip(*inputs, strict=True)]
    places = torch.tensor([[0] * width, list(range(width)), [width, width + 1, width + 2, *[0] * (width - 3)]])
    of_flat = torch.tensor([*range(width, 2 * width + 3), 0, 0])
    padded = pool_of(operation, dtype)
    found = operation(flat, padded, replace(forward, places=(places, of_flat)))
    assert torch.equal(found[: width + 3], expected)
    operation(kept, padded, behind)
    assert torch.equal(padded, ragged)
