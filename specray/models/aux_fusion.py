"""EAGLE-3's first state: the aux hidden states of several layers of the target, made one."""

from collections.abc import Callable

import torch
from torch import Tensor

from specray.layers.norm import RMSNorm, norm_of_parts
from specray.models.eagle_files import HeadConfig, TensorNames
from specray.models.eagle_parts import fusion_linear
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader


class AuxFusion:
    """The head's norms of the aux hidden states, if any, then `fc`, if any; in the head's `dtype`."""

    def __init__(
        self,
        config: HeadConfig,
        shape: LlamaShape,
        loader: Loader,
        names: TensorNames,
        count: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """`count` states of `width` columns."""
        eps = shape.eps
        self._dtype = dtype
        self._norms: list[Callable[[Tensor], Tensor]] = []
        self._fc = None
        if config.norm_before_fc:
            name = names.of_plain("input_norm.weight", "norm_before_fc.weight")
            self._norms.append(RMSNorm(loader.tensor(name, (count * width,)), eps).of_type(dtype))
        if config.fc_norm:
            each = [names.of_plain(f"fc_norm.{index}.weight") for index in range(count)]
            self._norms.append(norm_of_parts([loader.tensor(name, (width,)) for name in each], eps, dtype))
        if config.use_aux_hidden_state or names.has("fc.weight") or width != shape.hidden_size:
            self._fc = fusion_linear(config, loader, names, count * width, shape.hidden_size).run

    def __call__(self, aux_hidden_states: Tensor) -> Tensor:
        """See EagleHead.fuse."""
        states = aux_hidden_states.to(self._dtype)
        for norm in self._norms:
            states = norm(states)
        return states if self._fc is None else self._fc(states)
