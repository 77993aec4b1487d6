"""Multi-head latent attention (DeepSeek-V2 and -V3): all heads read one compressed key and value of each token.

The keys and values of all heads are linear maps of a latent [kv_rank]. The maps are applied to the queries and to the
output instead (weight absorption), so that attention runs on the latent. The KV pool sees one KV head of width
kv_rank + rope_dim, with key [latent, rotary part] and value [latent, zeros]. A token takes 2 * (kv_rank + rope_dim)
numbers a layer (DeepSeek-V3: 1,152), twice the minimum, because the pool stores the latent as key and as value; keys
and values of all 128 heads would take 49,152. Every rank stores the whole latent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specray.layers.linear import ColumnParallelLinear, RowParallelLinear
from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.layers.rotary import rotate_
from specray.ops.attention import Attend
from specray.ops.linear import is_row_wise, make_batched


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of one head and of the latent."""

    kv_rank: int
    rope_dim: int  # part of query and key that has the rotary position
    nope_dim: int  # part of query and key that has none
    value_dim: int

    @property
    def pool_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class LatentAttention(Layer):
    """Attention of this rank's heads over the pool's one KV head."""

    def __init__(
        self,
        index: int,
        sizes: LatentSizes,
        query: nn.Module,
        compress: ColumnParallelLinear,
        latent_norm: RMSNorm,
        expand: Tensor,
        out: RowParallelLinear,
        scale: float,
    ) -> None:
        """`query` gives [T, heads * query_dim], `compress` [T, kv_rank + rope_dim], rotary parts in half-split order.

        `expand` [heads, nope_dim + value_dim, kv_rank] maps the latent to keys and values; `scale` is the softmax's.
        """
        super().__init__()
        self._index = index
        self._sizes = sizes
        self._query = query
        self._compress = compress
        self._latent_norm = latent_norm
        self._key_map = make_batched(expand[:, : sizes.nope_dim].transpose(1, 2))
        self._value_map = make_batched(expand[:, sizes.nope_dim :])
        self._out = out
        self._query_scale = scale * sizes.pool_dim**0.5  # the kernels divide by sqrt(pool_dim)

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        queries = [part.run for part in self._query.modules() if isinstance(part, ColumnParallelLinear)]
        return all(map(is_row_wise, (*queries, self._compress.run, self._key_map, self._value_map, self._out.run)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """This rank's part of the output."""
        sizes = self._sizes
        queries = self._query(x).view(len(x), -1, sizes.query_dim)
        plain, turned = queries.split_with_sizes((sizes.nope_dim, sizes.rope_dim), -1)
        on_latent = self._key_map(plain.transpose(0, 1)).transpose(0, 1)
        q = torch.cat((on_latent, turned), -1).mul_(self._query_scale)  # [T, heads, pool_dim]
        rotate_(q[..., sizes.kv_rank :], cos, sin)
        seen = attend(self._index, q, self._kv(x, cos, sin)).view_as(q)[..., : sizes.kv_rank]
        return self._out.part(self._value_map(seen.transpose(0, 1)).transpose(0, 1).flatten(1))

    def _kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, 2, 1, pool_dim]"""
        latent, turned = self._compress(x).split_with_sizes((self._sizes.kv_rank, self._sizes.rope_dim), -1)
        kv = x.new_zeros(len(x), 2, 1, self._sizes.pool_dim)
        kv[:, :, 0, : self._sizes.kv_rank] = self._latent_norm(latent)[:, None]
        kv[:, 0, 0, self._sizes.kv_rank :] = turned
        rotate_(kv[:, 0, :, self._sizes.kv_rank :], cos, sin)
        return kv


def half_split(weight: Tensor, rope_dim: int) -> Tensor:
    """Reorder rows [..., rope_dim, in] from interleaved rotary pairs (0, 1), (2, 3), … to what `rotate_` expects."""
    assert weight.shape[-2] == rope_dim
    return torch.cat((weight[..., 0::2, :], weight[..., 1::2, :]), -2)
