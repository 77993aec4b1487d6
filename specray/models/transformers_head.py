"""The output matrix of transformers' causal language models, and what they compute beside it: scales and caps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specray.layers.linear import VocabHead
from specray.layers.parallel import RankGroup
from specray.models.transformers_skeleton import holder_of
from specray.ops.quantised_weight import Weight

_MOVES = {
    "slice",
    "select",
    "view",
    "_unsafe_view",
    "alias",
    "detach",
    "unsqueeze",
    "squeeze",
    "_to_copy",
    "lift_fresh",
}


class FinishedHead(VocabHead):
    """A VocabHead whose logits are finished as the forward method of `model` does it.

    Takes the body and the output matrix out of `model`, whose forward then computes nothing else.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        vocab_size: int,
        group: RankGroup,
        quantization: str | None,
        is_screened: bool,
        model: Any,
        body: nn.Module,
    ) -> None:
        """`is_screened`: see VocabHead; not where logits are finished, which may make the largest ones equal."""
        output = model.get_output_embeddings()
        model = holder_of(model, output)  # within some image models it is a causal language model
        states, product = _GivenStates(), _Product()
        for name, child in list(model.named_children()):
            if body in child.modules():
                setattr(model, name, states)
        model.set_output_embeddings(product)
        is_finished = _computes(model, states)
        super().__init__(weight, vocab_size, group, quantization, is_screened and not is_finished, bias)
        assert output is not None
        self.is_finished = is_finished
        self.returns_float32 = self.returns_float32 or is_finished
        self._finish = (model, states, product) if is_finished else None

    def shard(self, hidden_states: Tensor, only_largest: bool = False) -> Tensor:
        """See VocabHead."""
        if self._finish is None:
            return super().shard(hidden_states, only_largest)
        model, states, product = self._finish
        product.compute = lambda given: VocabHead.shard(self, given).to(torch.float32)
        return _finished(model, states, hidden_states)


class _Product(nn.Module):
    """In place of the output matrix."""

    compute: Callable[[Tensor], Tensor] = staticmethod(lambda states: states)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.compute(hidden_states[0])[None]


class _GivenStates(nn.Module):
    """In place of the decoder, and of the part of it that OPT calls: gives the states that were set."""

    states: Tensor

    @property
    def decoder(self) -> "_GivenStates":
        return self

    def forward(self, *_: Any, **__: Any) -> "_States":
        return _States(last_hidden_state=self.states)


class _States(SimpleNamespace):
    """A decoder's output that has nothing but states."""

    last_hidden_state: Tensor

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def _finished(model: Any, states: _GivenStates, hidden_states: Tensor) -> Tensor:
    """float32 [n, vocab] from hidden states [n, hidden]."""
    states.states = hidden_states[None]
    ids = torch.zeros(states.states.shape[:2], dtype=torch.int64, device=hidden_states.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.to(torch.float32)


def _computes(model: Any, states: _GivenStates) -> bool:
    """Whether the model computes something beside the product with its output matrix."""
    with Operations() as operations, torch.device("meta"):
        _finished(model, states, torch.empty(2, 3))
    return bool(operations.names - _MOVES - {"zeros", "empty"})


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))
