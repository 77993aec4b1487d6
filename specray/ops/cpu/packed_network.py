"""The weights of a draft model as the CPU kernels read them."""

import ctypes
from typing import NamedTuple

from torch import Tensor

from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.cpu.structs import FLOAT_TYPES, DraftNetworkStruct, MatrixStruct, pointer
from specray.ops.grouped_weight import to_int4
from specray.ops.quantised_weight import Weight


class Fusion(NamedTuple):
    """From a step's hidden states, several parts side by side, to the first state."""

    norms: Tensor | None  # float32 [parts, columns of a part]
    matrix: PackedMatrix


class StateInput(NamedTuple):
    """How a node's state joins the embedding of its token: x = [embedding, state], normed, then projected."""

    token_norm: Tensor | None  # float32 [H]
    state_norm: Tensor | None
    project: PackedMatrix | None
    state_first: bool = False  # x = [state, embedding]
    residual_is_normed: bool = False  # whether an unprojected residual stream starts from the normed state


class CoarseOutput(NamedTuple):
    """An output matrix in two precisions: logits are computed from `matrix`, the most likely ones again from `rows`.

    Reading the output matrix is most of the time of a level. In 4 bits it takes half as long as in 8.
    """

    matrix: PackedMatrix
    rows: Tensor  # [num_columns, H]

    @classmethod
    def of(cls, kernels: Kernels, weight: Weight) -> "CoarseOutput":
        rows = weight if isinstance(weight, Tensor) else weight.float().bfloat16()
        return cls(PackedMatrix(kernels, to_int4(rows)), rows.contiguous())


class PackedNetwork:
    """A draft model of H columns: embedding, state, decoder layers, output matrix. None of it is split over ranks."""

    def __init__(
        self,
        layers: FusedLayers,
        embedding: Tensor,
        inputs: StateInput | None,
        norm: Tensor | None,
        output: PackedMatrix | CoarseOutput,
        num_columns: int,
        target_ids: Tensor | None,
        state_is_normed: bool = False,
        output_is_normed: bool = False,
        fusion: Fusion | None = None,
    ) -> None:
        """`inputs` None: the layers read the embedding alone. `norm` float32 [H] comes before the output matrix.

        `target_ids` int64 [num_columns] are the target's ids of its columns; None: the same ids. `state_is_normed`:
        nodes pass their children the normed output. `output_is_normed`: the outputs given to `grow` are normed.
        `fusion` None: `draft` takes states.
        """
        self._layers = layers
        self._embedding, self._norm, self._output, self._inputs = embedding.contiguous(), norm, output, inputs
        matrix, rows = output if isinstance(output, CoarseOutput) else (output, None)
        self._target_ids = None if target_ids is None else target_ids.contiguous()
        inputs = inputs or StateInput(None, None, None)
        self.fuses = fusion is not None
        self._fusion = fusion
        norms = None if fusion is None else fusion.norms
        self._struct = DraftNetworkStruct(
            fuse=MatrixStruct() if fusion is None else fusion.matrix.struct,
            fuse_norms=pointer(norms),
            num_norms=0 if norms is None else len(norms),
            embedding=pointer(self._embedding),
            embedding_type=FLOAT_TYPES[embedding.dtype],
            vocab_size=len(embedding),
            token_norm=pointer(inputs.token_norm),
            state_norm=pointer(inputs.state_norm),
            project=MatrixStruct() if inputs.project is None else inputs.project.struct,
            reads_states=self._inputs is not None,
            state_first=inputs.state_first,
            residual_is_normed=inputs.residual_is_normed,
            num_layers=len(layers.structs),
            layers=ctypes.addressof(layers.structs),
            sizes=layers.sizes,
            cos=layers.cos,
            sin=layers.sin,
            norm=pointer(norm),
            state_is_normed=state_is_normed,
            output_is_normed=output_is_normed,
            num_columns=num_columns,
            output=matrix.struct,
            output_rows=pointer(rows),
            rows_type=0 if rows is None else FLOAT_TYPES[rows.dtype],
            target_ids=pointer(self._target_ids),
        )
        self._level_bytes = layers.num_bytes + matrix.num_bytes

    def use_mask(self, token_id: int, state: Tensor) -> None:
        """Predict all levels of trees in one pass, from masks after the first; only of a network that `fuses`.

        A mask reads this token and this state, float32 [H], where others read those before it.
        """
        assert self.fuses
        self._mask_state = state.contiguous()
        self._struct.mask_state, self._struct.mask_token = pointer(self._mask_state), token_id
