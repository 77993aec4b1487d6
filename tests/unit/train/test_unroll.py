from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specray.train.heads import TrainedEagle2Head, TrainedEagle3Head, TrainedParallelHead
from specray.train.target import Target, load_target
from specray.train.unroll import Batch, labeled_positions, unroll
from tests.support.toy import VOCAB_SIZE, write_toy

STEPS = 3
AUX_LAYERS = (0, 1, 2)
Head = TrainedEagle2Head | TrainedEagle3Head


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return load_target(str(write_toy(tmp_path)), torch.float32, torch.device("cpu"), 64)


def a_head(kind: str, target: Target, num_layers: int = 1) -> Head:
    torch.manual_seed(3)
    shape = replace(target.shape, num_layers=num_layers)
    ids = torch.arange(0, VOCAB_SIZE, 2)
    made: dict[str, Callable[[], Head]] = {
        "eagle3": lambda: TrainedEagle3Head(shape, ids, target, AUX_LAYERS),
        "eagle2": lambda: TrainedEagle2Head(shape, ids, target, bias=True),
        "parallel": lambda: TrainedParallelHead(shape, ids, target, AUX_LAYERS, mask_token_id=5),
    }
    head = made[kind]()
    head.start_from(target)
    for parameter in head.parameters():  # values near 0 or 1 would hide mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def a_batch(target: Target, columns: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    hidden = target.shape.hidden_size
    return Batch(
        token_ids=torch.randint(0, VOCAB_SIZE, (2, 9), generator=generator),
        lengths=torch.tensor([9, 7]),
        prompt_lengths=torch.tensor([4, 3]),
        aux_hidden_states=torch.randn(2, 9, columns * hidden, generator=generator),
        final=torch.randn(2, 9, hidden, generator=generator),
    )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_outputs(head: Head, target: Target, batch: Batch, row: int, start: int) -> list[Tensor]:
    """Outputs of the chain at position `start`, computed one position and one step at a time as in serving."""
    weights = {name: tensor.float() for name, tensor in head.state_dict().items()}
    eagle3, num_layers = isinstance(head, TrainedEagle3Head), head.shape.num_layers
    prefixes = ["midlayer."] if eagle3 and num_layers == 1 else [f"layers.{layer}." for layer in range(num_layers)]
    eps, dim = target.shape.eps, target.shape.head_dim
    fold = target.shape.num_heads // target.shape.num_kv_heads
    keys: list[list[Tensor]] = [[] for _ in prefixes]
    values: list[list[Tensor]] = [[] for _ in prefixes]

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = target.rotary.at(torch.tensor([position]))
        return x * cos[0] + x.roll(dim // 2, -1) * sin[0]

    def inner(token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual) of the first layer"""
        embed = target.embedding[token]
        if not eagle3:
            x = torch.cat((embed, state)) @ weights["fc.weight"].T + weights["fc.bias"]
            return x, x
        parts = (
            norm(embed, weights[f"{prefixes[0]}input_layernorm.weight"], eps),
            norm(state, weights[f"{prefixes[0]}hidden_norm.weight"], eps),
        )
        return torch.cat(parts), state

    def entered(states: Tensor) -> Tensor:
        if not eagle3:
            return states
        chunks = [norm(c, weights[f"fc_norm.{i}.weight"], eps) for i, c in enumerate(states.chunk(3))]
        return torch.cat(chunks) @ weights["fc.weight"].T

    def through_layers(token: Tensor, state: Tensor, position: int) -> Tensor:
        """The next state. The position's keys and values are added."""
        x, state = inner(token, state)
        for layer, prefix in enumerate(prefixes):
            if layer:
                x = norm(state, weights[f"{prefix}input_layernorm.weight"], eps)
            q, k, v = ((x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(-1, dim) for name in "qkv")
            q = turned(q, position)
            keys[layer].append(turned(k, position))
            values[layer].append(v)
            heads = []
            for head_index in range(len(q)):
                k = torch.stack([key[head_index // fold] for key in keys[layer]])
                v = torch.stack([value[head_index // fold] for value in values[layer]])
                heads.append((k @ q[head_index] / dim**0.5).softmax(0) @ v)
            state = state + torch.cat(heads) @ weights[f"{prefix}self_attn.o_proj.weight"].T
            x = norm(state, weights[f"{prefix}post_attention_layernorm.weight"], eps)
            gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            state = state + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return state

    outputs = []
    for position in range(start):
        through_layers(batch.token_ids[row, position + 1], entered(batch.aux_hidden_states[row, position]), position)
    state = entered(batch.aux_hidden_states[row, start])
    for step in range(STEPS):
        position = start + step
        if position + 1 >= batch.token_ids.shape[1]:
            break
        token = batch.token_ids[row, position + 1]
        if step and isinstance(head, TrainedParallelHead):
            token, state = torch.tensor(head.mask_token_id), entered(weights["mask_hidden"][0])
        state = through_layers(token, state, position)
        outputs.append(norm(state, weights["norm.weight"], eps) if eagle3 else state)
    return outputs


@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [("eagle3", 1), ("eagle3", 2), ("eagle3", 3), ("eagle2", 1), ("parallel", 1), ("parallel", 2)],
)
def test_unrolled_steps_equal_single_chains(kind: str, num_layers: int, target: Target) -> None:
    head, batch = a_head(kind, target, num_layers), a_batch(target, 1 if kind == "eagle2" else 3)
    labeled = labeled_positions(batch)
    steps = list(unroll(head, target, batch, labeled, STEPS))
    per_row = batch.token_ids.shape[1] - batch.start
    seen = 0
    for depth, step in enumerate(steps):
        for output, chain in zip(step.outputs, step.chains.tolist(), strict=True):
            row, start = chain // per_row, batch.start + chain % per_row
            torch.testing.assert_close(
                output, naive_outputs(head, target, batch, row, start)[depth], rtol=1e-4, atol=1e-4
            )
            seen += 1
    # Chains start two positions before the first generated token. At step 0, row 0 has labels for chains 2 … 6 and
    # row 1 for 1 … 4.
    assert seen == (5 + 4 + 3) + (4 + 3 + 2)


def test_labels_are_the_final_states_one_step_ahead(target: Target) -> None:
    batch = a_batch(target, 1)
    labeled = labeled_positions(batch)
    head = a_head("eagle2", target)
    per_row = batch.token_ids.shape[1] - batch.start
    for depth, step in enumerate(unroll(head, target, batch, labeled, STEPS)):
        for label, chain in zip(step.labels.tolist(), step.chains.tolist(), strict=True):
            row, start = chain // per_row, batch.start + chain % per_row
            assert torch.equal(labeled.final[label], batch.final[row, start + 1 + depth])
            assert labeled.next_ids[label] == batch.token_ids[row, start + 2 + depth]


def test_tokens_outside_the_draft_vocabulary_have_no_label(target: Target) -> None:
    batch = a_batch(target, 1)
    usable = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    usable[batch.token_ids[0, 5]] = True
    labeled = labeled_positions(batch, usable)
    assert set(labeled.next_ids.tolist()) == {int(batch.token_ids[0, 5])}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_gradients_reach_every_parameter_through_all_steps(kind: str, num_layers: int, target: Target) -> None:
    head, batch = a_head(kind, target, num_layers), a_batch(target, 3)
    last = list(unroll(head, target, batch, labeled_positions(batch), STEPS))[-1]
    (last.outputs @ head.output_weight.T).sum().backward()
    assert [name for name, parameter in head.named_parameters() if parameter.grad is None] == []
