"""Reads config.json of heads that draft a block of tokens in one pass: DFlash, JetSpec and DSpark.

Three layouts are supported. z-lab's and JetSpec's is a Qwen3 config with `dflash_config`. DeepSpec's is one with the
settings at top level. speculators nests the Qwen3 config in `transformer_layer_config`. Layers that sliding windows
belong to attend to earlier rows of the block only, unless the file says otherwise.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from specray.errors import ConfigError
from specray.models.heads.eagle_files import HeadConfig

_Id = Annotated[int, Field(ge=0)]


class BlockMask(NamedTuple):
    """What the rows of a block attend to in one layer, beside the context before the block."""

    is_causal: bool  # earlier rows and themselves only, not all rows
    window: int | None = None  # keys less than this many positions away; None: all


class BlockConfig(HeadConfig):
    """config.json of a DFlash, JetSpec or DSpark head."""

    named: ClassVar[str] = "a DFlash or DSpark head"
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = HeadConfig.unsupported | {
        "projector_type": ("dflash",),  # Domino
        "selector_rank": (),  # DFlash 2
        "attention_sink_bias": (False,),
        "add_swa_attention_sink_bias": (False,),
        "use_swa": (False,),
        "is_neox_style": (True,),
    }

    block_size: Annotated[int, Field(ge=2, le=256)] = 16
    mask_token_id: _Id | None = None
    target_layer_ids: list[int] = Field(default_factory=list)  # layers whose output is read
    aux_hidden_state_layer_ids: list[int] = Field(default_factory=list)  # speculators: layers whose input is read
    sample_from_anchor: bool | None = None
    speculators_model_type: str | None = None
    num_anchors: int | None = None  # DeepSpec's trainer: its heads all sample from the anchor
    is_causal: bool | None = None
    causal: bool | None = None  # vLLM's name for it
    causal_head: bool | None = None  # JetSpec's
    sliding_window_non_causal: bool = False
    markov_rank: Annotated[int, Field(ge=0)] = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def check(self, path: Path) -> None:
        size = self.vocab_size
        if self.mask_token_id is None or self.mask_token_id >= size:
            raise ConfigError(
                f"{path}: mask_token_id={self.mask_token_id}, but the rows of a block that are not known yet need a "
                f"token below vocab_size={size}; set it to the id that the head was trained with"
            )
        layers = self.layer_types[: self.num_hidden_layers]
        if "sliding_attention" in layers and self.use_sliding_window and self.sliding_window is None:
            raise ConfigError(f"{path}: layer_types has sliding_attention, but sliding_window is not set; set it")
        if layers and len(layers) < self.num_hidden_layers:
            raise ConfigError(
                f"{path}: layer_types has {len(layers)} entries for num_hidden_layers={self.num_hidden_layers}; "
                "give one for each layer"
            )
        if self.confidence_head_with_markov and not self.markov_rank:
            raise ConfigError(
                f"{path}: confidence_head_with_markov=true needs a markov_rank above 0; choose another head"
            )

    @property
    def has_markov_rows(self) -> bool:
        """DSpark: logits depend on the token before."""
        return self.markov_rank > 0

    @property
    def samples_from_anchor(self) -> bool:
        """Whether row k of a block predicts the token behind it (DSpark), and not its own (DFlash)."""
        if self.sample_from_anchor is not None:
            return self.sample_from_anchor
        return self.num_anchors is not None or self.speculators_model_type == "dspark"

    @property
    def num_predicted(self) -> int:
        """Tokens that a block of the trained size predicts."""
        return self.block_size - (not self.samples_from_anchor)

    @property
    def masks(self) -> list[BlockMask]:
        """One for each layer."""
        chosen = next((v for v in (self.is_causal, self.causal, self.causal_head) if v is not None), None)
        masks = []
        for kind in self.layer_types[: self.num_hidden_layers] or ["full_attention"] * self.num_hidden_layers:
            slides = kind == "sliding_attention" and self.use_sliding_window
            is_causal = slides and not self.sliding_window_non_causal if chosen is None else chosen
            masks.append(BlockMask(is_causal, self.sliding_window if slides else None))
        return masks

    def aux_hidden_state_layers(self, folder: Path, num_layers: int) -> tuple[int, ...]:
        """Aux hidden states (see TargetModel) of the target that the head reads as context."""
        if self.aux_hidden_state_layer_ids:
            key, ids = "aux_hidden_state_layer_ids", self.aux_hidden_state_layer_ids
            return self._aux_layers(folder, num_layers, ids, are_outputs=False, key=key, is_set=True)
        ids = self.target_layer_ids or _spread(self.num_hidden_layers, num_layers)
        is_set = bool(self.target_layer_ids)
        return self._aux_layers(folder, num_layers, ids, are_outputs=True, key="target_layer_ids", is_set=is_set)


def _spread(count: int, num_layers: int) -> list[int]:
    """DFlash's default: `count` layers of the target, evenly spaced from the second to the third from the end."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + index * (num_layers - 4) / (count - 1)) for index in range(count)]
