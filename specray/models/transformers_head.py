"""The output matrix of transformers' causal language models, and what they compute after it: scales and caps."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specray.layers.linear import VocabHead
from specray.layers.parallel import RankGroup
from specray.ops.grouped_weight import Weight

_MOVES = {"slice", "view", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "_to_copy", "lift_fresh"}


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
        given = _Given()
        output = model.get_output_embeddings()
        for name, child in list(model.named_children()):
            if child is body:
                setattr(model, name, _GivenStates())
        model.set_output_embeddings(given)
        is_finished = _computes(model, given)
        super().__init__(weight, vocab_size, group, quantization, is_screened and not is_finished, bias)
        assert output is not None
        self._finish = (model, given) if is_finished else None

    def shard(self, hidden_states: Tensor, only_largest: bool = False) -> Tensor:
        """See VocabHead."""
        logits = super().shard(hidden_states, only_largest)
        if self._finish is None:
            return logits
        return _finished(*self._finish, logits[None])[0].to(torch.float32)


class _Given(nn.Module):
    """In place of the output matrix: gives the logits that were set."""

    logits: Tensor

    def forward(self, _: Tensor) -> Tensor:
        return self.logits


class _GivenStates(nn.Module):
    """In place of the decoder, and of the part of it that OPT calls: gives states that nobody reads."""

    @property
    def decoder(self) -> "_GivenStates":
        return self

    def forward(self, input_ids: Tensor, **_: Any) -> "_States":
        return _States(last_hidden_state=input_ids[..., None])


class _States(SimpleNamespace):
    """A decoder's output that has nothing but states."""

    last_hidden_state: Tensor

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def _finished(model: Any, given: _Given, logits: Tensor) -> Tensor:
    """[1, n, vocab] from the products of the output matrix, of the same shape."""
    given.logits = logits
    ids = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    finished: Tensor = model(input_ids=ids, use_cache=False).logits
    return finished


def _computes(model: Any, given: _Given) -> bool:
    """Whether the model changes the logits that its output matrix gives."""
    with Operations() as operations, torch.device("meta"):
        _finished(model, given, torch.empty(1, 2, 3))
    return bool(operations.names - _MOVES - {"zeros", "empty"})


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))
