"""The step operations of each device give exactly what torch's give, on random batches: one table for all of them.

Batches have trees, chains and roots alone, greedy and sampled requests, filters, broken logits, and rows of padding
without a node. An operation that a device gets a kernel for must be in the table.
"""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specray.ops.cpu.library import kernels
from specray.ops.sampling_state import SamplingBatch
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.node_sampler import coupled
from specray.spec_decode.step_ops import KernelStepOps, step_ops
from specray.spec_decode.torch_step_ops import TorchStepOps
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput
from tests.support.distributions import OPTIONS
from tests.support.sampling import CPU, state_of
from tests.support.step_cases import MAX_TOKENS, SLOTS, random_table
from tests.support.verify_cases import FILTERED, VOCAB_SIZE, inputs, known

DEVICES: dict[str, type[TorchStepOps]] = {"auto": KernelStepOps}  # by SPECRAY_KERNELS
if find_spec("triton") is not None:
    from specray.spec_decode.triton_step_ops import TritonStepOps

    DEVICES["triton"] = TritonStepOps


def verify(ops: TorchStepOps, batch: VerifyInput) -> Any:
    return known(ops.verify(batch))


def verify_chosen(ops: TorchStepOps, batch: VerifyInput) -> Any:
    tokens = torch.where(batch.logits.isfinite().all(-1), batch.logits.argmax(-1), -1)
    return known(ops.verify_chosen(tokens, batch.tree))


def choose(ops: TorchStepOps, batch: VerifyInput) -> Any:
    """Shards have no filters."""
    plain, tree = without_filters(batch), batch.tree
    found = [ops.choose(plain, first_id=3), ops.choose(padded(plain))]
    nodes = torch.arange(tree.tokens.shape[1])
    is_visited = (nodes < tree.num_nodes[:, None]) & (tree.ancestors().sum(-1) - 1 <= tree.max_depth)
    places = tree.places(len(batch.logits))[is_visited]
    return [part[places].tolist() for choices in found for part in (choices.tokens, choices.is_finite)]


def verify_padded(ops: TorchStepOps, batch: VerifyInput) -> Any:
    return known(ops.verify_padded(padded(batch), coupled))


def accept(ops: TorchStepOps, batch: VerifyInput) -> Any:
    return known(ops.accept(batch.tree, TorchStepOps(CPU).choose(without_filters(batch))))


def table(ops: TorchStepOps, batch: VerifyInput) -> Any:
    """The input of a step, of a draft head, and what a step commits."""
    made = random_table(batch.num_nodes[0], shortest=12)
    rows, total = ops.table(made.buffer), sum(batch.num_nodes)
    count = len(batch.num_nodes)
    slots, starts = torch.arange(SLOTS).flip(0)[:count], made.num_tokens[:-1].long().flip(0)[:count] - 3
    known_tokens = torch.arange(count) % 3 + 1
    tree = (batch.tree.tokens, batch.tree.parents, batch.tree.num_nodes)
    size = total + int((known_tokens - 1).sum())
    built = rows.build_step((slots, starts, known_tokens), tree, size, 20, batch.tree.tokens.shape[1] > 1)
    read = rows.extend_input(slots, starts, starts + known_tokens, int(known_tokens.sum()))
    cells = rows.cells(slots, starts, made.buffer.kv_column), *(rows.kv_slots(slots, at, 4) for at in (None, starts))
    rows.append(slots, ops.verify(batch).outcome)
    return [*built[:-1], built[-1], *read, *cells, made.num_tokens[:-1], made.token_ids[:-1, :MAX_TOKENS]]


CASES: dict[str, Callable[[TorchStepOps, VerifyInput], Any]] = {
    each.__name__: each for each in (verify, verify_chosen, choose, verify_padded, accept, table)
}
ELSEWHERE = {"trees", "release_trees", "await_trees"}  # `test_cpu_steps` and `test_gpu_steps`


def replaced(ops: type[TorchStepOps]) -> set[str]:
    return {name for name, member in vars(ops).items() if inspect.isfunction(member)} - {"__init__"}


def without_filters(batch: VerifyInput) -> VerifyInput:
    options = [state.options._replace(top_p=1.0) for state in batch.sampling.states]
    return batch._replace(sampling=SamplingBatch.of([state_of(option, size=VOCAB_SIZE) for option in options], CPU))


def padded(batch: VerifyInput) -> PaddedVerifyInput:
    """As CUDA graphs hold a step: rows of padding behind the nodes, and a request without a node at the end."""
    tree, count = batch.tree, len(batch.num_nodes)
    tokens, parents = (torch.nn.functional.pad(part, (0, 0, 0, 1), value=NONE) for part in (tree.tokens, tree.parents))
    num_nodes, lengths = (torch.cat((part, torch.tensor([0]))) for part in (tree.num_nodes, batch.lengths))
    options = SamplingBatch.of([*batch.sampling.states, state_of(OPTIONS, size=VOCAB_SIZE)], CPU)
    logits = torch.cat((batch.logits, torch.zeros(count % 3, VOCAB_SIZE)))
    is_sampled = any(state.is_sampled for state in batch.sampling.states)
    return PaddedVerifyInput(
        logits, DraftTree(tokens, parents, num_nodes, tree.max_depth), options, lengths, is_sampled
    )


PAIRS = [(device, name) for device, ops in DEVICES.items() for name in sorted(replaced(ops) - ELSEWHERE)]


@pytest.mark.parametrize(("device", "name"), PAIRS)
@given(inputs(FILTERED))
@settings(max_examples=12)
def test_an_operation_is_that_of_torch(device: str, name: str, batch: VerifyInput) -> None:
    """Triton's kernels run in its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        expected = CASES[name](step_ops(CPU), batch)
        patch.setenv("SPECRAY_KERNELS", device)
        ops = step_ops(CPU)
        if device == "auto" and kernels() is None:
            pytest.skip("needs the compiled kernels")
        assert type(ops) is DEVICES[device]
        torch.testing.assert_close(CASES[name](ops, batch), expected, atol=0, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_an_operation_with_a_kernel_has_a_specification(device: str) -> None:
    assert replaced(DEVICES[device]) <= replaced(TorchStepOps)
