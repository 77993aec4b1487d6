"""What one layer's attention computes, and its part of a KV pool whose layers differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.attention import head_dim_of, row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """How one layer attends; the default is softmax(q k^T / sqrt(head_dim)) v over all keys up to the query's own.

    A position is counted as in AttentionBatch: a tree's nodes are behind the committed tokens, one position a level.
    A layer's keys and values have one size in the pool: see `pack_kv` where the model's differ.
    """

    window: int | None = None  # keys at positions above the query's own minus `window` are seen; None: all before it
    scale: float | None = None  # factor of scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(score / softcap), scaled before and masked after
    sinks: Tensor | None = None  # [heads of this rank]: each head's logit that only joins the softmax's denominator
    num_heads: int = 0  # heads of q; 0: as given to `make_backend`
    num_kv_heads: int = 0  # times head_dim, the layer's share of a KV slot; 0: the pool's
    head_dim: int = 0

    @property
    def kind(self) -> tuple[float | None, ...]:
        """What layers share that attend alike, apart from their sinks."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return (self.window, self.scale, self.softcap, *sizes)


def complete_layers(
    pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None
) -> list[LayerAttention]:
    """One for each layer of `pool`, without zeros for sizes and with float32 sinks on its device; None: all default.

    ValueError if their number or sizes do not fit the pool, or sinks the heads.
    """
    layers = [LayerAttention()] * len(pool) if layers is None else layers
    if len(layers) != len(pool):
        raise ValueError(f"attention of {len(layers)} layers does not fit a KV pool of {len(pool)}")
    return [_complete(pool, num_heads, layer) for layer in layers]


def layer_pools(pool: Tensor, layers: Sequence[LayerAttention]) -> list[Tensor]:
    """A view [slots, 2, kv_heads, dim] of `pool` for each of the complete `layers`.

    A KV slot has room for the layer with the largest one; a layer that needs less uses the beginning of its room.
    ValueError if one needs more.
    """
    return [_layer_pool(rows, layer) for rows, layer in zip(pool.unbind(), layers, strict=True)]


def pack_kv(k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    """kv [T, 2, kv_heads, head_dim] from k and v [T, kv_heads, dim of each], the narrower ones with zeros behind them.

    The queries are padded alike, and the layer states its scale. Behind v's numbers, each head's result is zeros.
    """
    return torch.stack([F.pad(part, (0, head_dim - part.shape[-1])) for part in (k, v)], 1)


def _complete(pool: Tensor, num_heads: int, layer: LayerAttention) -> LayerAttention:
    layer = replace(
        layer,
        num_heads=layer.num_heads or num_heads,
        num_kv_heads=layer.num_kv_heads or pool.shape[-2],
        head_dim=layer.head_dim or head_dim_of(pool),
        sinks=None if layer.sinks is None else layer.sinks.to(pool.device, torch.float32).contiguous(),
    )
    if layer.num_heads % layer.num_kv_heads:
        raise ValueError(f"{layer.num_heads} query heads cannot share {layer.num_kv_heads} KV heads")
    if layer.sinks is not None and layer.sinks.shape != (layer.num_heads,):
        raise ValueError(f"sinks of shape {tuple(layer.sinks.shape)} are not one for each of {layer.num_heads} heads")
    return layer


def _layer_pool(rows: Tensor, layer: LayerAttention) -> Tensor:
    shape = 2, layer.num_kv_heads, row_bytes(layer.head_dim, rows.dtype) // rows.itemsize
    if rows.shape[1:] == shape:
        return rows
    if math.prod(shape) > rows[0].numel():
        raise ValueError(f"keys and values of shape {shape} do not fit a KV slot of shape {tuple(rows.shape[1:])}")
    return rows.flatten(1)[:, : math.prod(shape)].view(-1, *shape)
