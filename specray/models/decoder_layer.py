"""A decoder layer around any attention, and its dense feed-forward."""

from torch import Tensor
from transformers import PretrainedConfig

from specray.layers.linear import GatedLinear, RowParallelLinear
from specray.layers.module import Layer
from specray.layers.norm import RMSNorm
from specray.models.loading import Loader
from specray.ops.attention import Attend
from specray.ops.linear import is_row_wise


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: PretrainedConfig, loader: Loader, prefix: str, attention: Layer, ffn: Layer) -> None:
        """`attention` and `ffn` return this rank's part of their output."""
        super().__init__()
        size, eps = (config.hidden_size,), config.rms_norm_eps
        self.group = loader.group
        self.input_norm = RMSNorm(loader.tensor(prefix + "input_layernorm.weight", size), eps, self.group)
        self.attention = attention
        self.ffn_norm = RMSNorm(loader.tensor(prefix + "post_attention_layernorm.weight", size), eps, self.group)
        self.ffn = ffn

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        return is_row_wise(self.attention) and is_row_wise(self.ffn)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed, hidden = self.attended(self.input_norm(hidden), hidden, cos, sin, attend)
        if isinstance(self.ffn, FeedForward):
            return self.ffn.added(normed, hidden)
        return self.group.sum(self.ffn(normed)).add_(hidden)

    def attended(
        self, normed: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(what the feed-forward reads, the residual stream before it); `normed` is `input_norm(hidden)`."""
        return self.ffn_norm.after_add(self.attention(normed, cos, sin, attend), hidden)


class FeedForward(Layer):
    """down(silu(gate(x)) * up(x)), of which each rank has an equal share of the `ffn_size` inner units."""

    def __init__(self, hidden_size: int, ffn_size: int, loader: Loader, prefix: str) -> None:
        super().__init__()
        size, part = (ffn_size, hidden_size), loader.group.share(ffn_size)
        gate = loader.weight(prefix + "gate_proj.weight", size, part)
        up = loader.weight(prefix + "up_proj.weight", size, part)
        self.gate_up = GatedLinear(gate, up, loader.quantization)
        down = loader.weight(prefix + "down_proj.weight", size[::-1], part, 1)
        self.down = RowParallelLinear(down, loader.group, quantization=loader.quantization)

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        return is_row_wise(self.gate_up.run) and is_row_wise(self.down.run)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the output."""
        return self.down.part(self.gate_up(x))

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum of every rank's part, and of `residual`, as a new tensor."""
        return self.down.added(self.gate_up(x), residual)
