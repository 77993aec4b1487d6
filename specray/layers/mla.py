"""Multi-head latent attention (DeepSeek-V2 and -V3): all heads read one compressed key and value of each token.

Keys and values of all heads are linear maps of a latent [kv_rank]; the maps are moved over to the queries and to the
output, so that attention runs on the latent itself. To the KV pool this is one KV head of width kv_rank + rope_dim:
its key is [latent, rotary part], its value [latent, zeros]. A token costs 2 * (kv_rank + rope_dim) numbers a layer
(DeepSeek-V3: 1,152), twice the least possible, for the pool keeps the latent as key and as value; keys and values of
its 128 heads would be 49,152 padded to one width. Each rank of several keeps the whole latent. Not here: loading
(`specray.models.deepseek`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.layers.linear import RowParallelLinear
from specray.layers.norm import RMSNorm
from specray.layers.rotary import rotate_
from specray.ops.attention import Attend


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of one head and of the latent."""

    kv_rank: int
    rope_dim: int  # of query and key, with the rotary position
    nope_dim: int  # of query and key, without
    value_dim: int

    @property
    def pool_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class LatentAttention:
    """Attention of this rank's heads over the pool's one KV head."""

    def __init__(
        self,
        index: int,
        sizes: LatentSizes,
        query: Callable[[Tensor], Tensor],
        compress: Callable[[Tensor], Tensor],
        latent_norm: RMSNorm,
        expand: Tensor,
        out: RowParallelLinear,
        scale: float,
    ) -> None:
        """`query` gives [T, heads * query_dim], `compress` [T, kv_rank + rope_dim], rotary parts in half-split order.

        `expand` [heads, nope_dim + value_dim, kv_rank] makes keys and values of the latent; `scale` is the softmax's.
        """
        self._index = index
        self._sizes = sizes
        self._query = query
        self._compress = compress
        self._latent_norm = latent_norm
        self._key_map = expand[:, : sizes.nope_dim].contiguous()
        self._value_map = expand[:, sizes.nope_dim :].transpose(1, 2).contiguous()
        self._out = out
        self._query_scale = scale * sizes.pool_dim**0.5  # the kernels divide by the root of the width they see

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        sizes = self._sizes
        queries = self._query(x).view(len(x), -1, sizes.query_dim)
        plain, turned = queries.split_with_sizes((sizes.nope_dim, sizes.rope_dim), -1)
        on_latent = plain.transpose(0, 1).bmm(self._key_map).transpose(0, 1)
        q = torch.cat((on_latent, turned), -1).mul_(self._query_scale)  # [T, heads, pool_dim]
        rotate_(q[..., sizes.kv_rank :], cos, sin)
        seen = attend(self._index, q, self._kv(x, cos, sin)).view_as(q)[..., : sizes.kv_rank]
        return self._out(seen.transpose(0, 1).bmm(self._value_map).transpose(0, 1).flatten(1))

    def _kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, 2, 1, pool_dim]"""
        latent, turned = self._compress(x).split_with_sizes((self._sizes.kv_rank, self._sizes.rope_dim), -1)
        kv = x.new_zeros(len(x), 2, 1, self._sizes.pool_dim)
        kv[:, :, 0, : self._sizes.kv_rank] = self._latent_norm(latent)[:, None]
        kv[:, 0, 0, self._sizes.kv_rank :] = turned
        rotate_(kv[:, 0, :, self._sizes.kv_rank :], cos, sin)
        return kv


def half_split(weight: Tensor, rope_dim: int) -> Tensor:
    """Rows [..., rope_dim, in] of interleaved rotary pairs (0, 1), (2, 3), … in the order that `rotate_` expects."""
    assert weight.shape[-2] == rope_dim
    return torch.cat((weight[..., 0::2, :], weight[..., 1::2, :]), -2)
