"""EAGLE-3's first state: the aux hidden states of several layers of the target, made one."""

from collections.abc import Callable

import torch
from torch import Tensor

from specray.layers.norm import RMSNorm, norm_of_parts
from specray.models.eagle_files import HeadConfig, TensorNames
from specray.models.eagle_parts import fusion_linear
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.cpu.packed_network import Fusion


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
        weights: list[Tensor] = []  # of each norm, [parts, columns of a part]
        self._fc = None
        if config.norm_before_fc:
            name = names.of_plain("input_norm.weight", "norm_before_fc.weight")
            weight = loader.tensor(name, (count * width,))
            self._norms.append(RMSNorm(weight, eps).of_type(dtype))
            weights.append(weight[None])
        if config.fc_norm:
            each = [loader.tensor(names.of_plain(f"fc_norm.{index}.weight"), (width,)) for index in range(count)]
            self._norms.append(norm_of_parts(each, eps, dtype))
            weights.append(torch.stack(each))
        if config.use_aux_hidden_state or names.has("fc.weight") or width != shape.hidden_size:
            self._fc = fusion_linear(config, loader, names, count * width, shape.hidden_size).run
        self.packed = self._packed(weights)

    def __call__(self, aux_hidden_states: Tensor) -> Tensor:
        """See EagleHead.fuse."""
        states = aux_hidden_states.to(self._dtype)
        for norm in self._norms:
            states = norm(states)
        return states if self._fc is None else self._fc(states)

    def _packed(self, weights: list[Tensor]) -> Fusion | None:
        """The fusion for the CPU kernels; None if they do not have `fc`, or there are several norms in a row."""
        if not isinstance(self._fc, PackedMatrix) or len(weights) > 1:
            return None
        return Fusion(weights[0].float().contiguous() if weights else None, self._fc)
