"""Reads config.json of draft heads in every known form, and finds their tensors by their known names.

Four layouts are supported: SafeAILab's (`midlayer.*`, EAGLE-3), `layers.0.*` (EAGLE-1 and -2, newer EAGLE-3), and
speculators' (settings nested in `transformer_layer_config`; its EAGLE-1 has `fusion_fc` and `transformer.*`), each with
or without `model.` before a name. `architectures` is not read: heads of both kinds say LlamaForCausalLM. `block_files`
adds the settings of heads that draft a block.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PretrainedConfig

from specray.errors import ConfigError, first_of
from specray.layers.parallel import RankGroup
from specray.models.llama_config import LlamaConfig
from specray.models.llama_shape import LlamaShape, heads_of_rank
from specray.models.loading import Loader
from specray.models.target_model import BEFORE_FINAL_NORM, ModelShape

_Size = Annotated[int, Field(ge=1)]
Kind = Literal[2, 3, "block"]  # of a head; 2 also for EAGLE-1, block for one that drafts a block


class HeadConfig(BaseModel):
    """config.json of an EAGLE head. None: not set there.

    Settings that only trainers or other engines read are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    named: ClassVar[str] = "an EAGLE head"
    # Settings that would change the computation in ways that are not implemented, and the values that do not.
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "mlp_bias": (False,),
        "hidden_act": ("silu", "swish"),
        "layernorms": (False,),
        "use_mtp_layernorm": (False,),
        "parallel_draft_step": (1,),
        "partial_rotary_factor": (1.0,),
    }

    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    vocab_size: _Size
    draft_vocab_size: _Size | None = None
    truncated_vocab_size: _Size | None = None  # another name for it, used by nebius
    target_hidden_size: _Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0.0)] = 1e-6
    max_position_embeddings: _Size = 2048
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool | None = None
    qkv_bias: bool | None = None  # SafeAILab's EAGLE-1 and -2 for Qwen2 targets
    bias: bool | None = None
    fusion_bias: bool | None = None  # speculators' word for `bias`
    eagle_aux_hidden_state_layer_ids: list[int] = []
    aux_ids_are_nested: bool = False  # in `eagle_config`; set by `read`
    num_aux_hidden_states: _Size | None = None
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    ptd_token_id: Annotated[int, Field(ge=0)] | None = None  # P-EAGLE: the token that stands for unknown ones
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []
    sliding_window: _Size | None = None
    use_sliding_window: bool = True

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the settings in `folder`. ConfigError for one that is not implemented."""
        path = folder / "config.json"
        return cls.of(_read_object(path), path)

    @classmethod
    def of(cls, content: dict[str, Any], path: Path) -> Self:
        """The settings `content` of the file `path`, nested or not. ConfigError for one that is not implemented."""
        settings = _flat(content)
        settings["aux_ids_are_nested"] = not content.get(_AUX_IDS)
        for name, harmless in cls.unsupported.items():
            if name in settings and settings[name] not in harmless:
                raise ConfigError(
                    f"{path}: {name}={settings[name]!r} is not supported in {cls.named}"
                    f"{f' (only {harmless[0]!r})' if harmless else ''}; choose another head"
                )
        try:
            config = cls.model_validate(settings)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{path} does not describe {cls.named} ({problems}); correct it") from error
        config.check(path)
        return config

    def check(self, path: Path) -> None:
        """ConfigError if settings of the file `path` contradict each other."""
        if self.truncated_vocab_size not in (None, self.vocab_size, self.num_draft_ids):
            raise ConfigError(
                f"{path}: truncated_vocab_size={self.truncated_vocab_size} is not draft_vocab_size="
                f"{self.draft_vocab_size}; choose another head"
            )
        if len(set(self.layer_types[: self.num_hidden_layers])) > 1:
            raise ConfigError(f"{path}: layer_types={self.layer_types} differ, which is not supported in a head")

    @property
    def num_draft_ids(self) -> int:
        """Size of an EAGLE-3 head's own vocabulary, that of the target by default."""
        return self.draft_vocab_size or self.truncated_vocab_size or self.vocab_size

    @property
    def window(self) -> int | None:
        """Positions that a query attends to, its own included; None: all. Without `layer_types`, attention is full."""
        is_sliding = self.use_sliding_window and self.layer_types[:1] == ["sliding_attention"]
        return self.sliding_window if is_sliding else None

    def check_target(self, folder: Path, target: ModelShape) -> None:
        """ConfigError unless the head was made for a target of this width and vocabulary."""
        width = self.target_hidden_size or self.hidden_size
        for name, ours, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_hidden_size" if self.target_hidden_size else "hidden_size", width, target.hidden_size),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"{folder / 'config.json'}: {name}={ours}, but the target's is {theirs}; a draft head works with "
                    "the one target it was trained for: set speculative.draft_model_path to a head made for this target"
                )

    def aux_hidden_state_layers(self, folder: Path, num_layers: int) -> tuple[int, ...]:
        """Aux hidden states (see TargetModel) that EAGLE-3 reads of a target of `num_layers`.

        Ids nested in `eagle_config` (SafeAILab, SpecForge) are layers whose output is read. Ids at top level
        (speculators, vLLM) are layers whose input is read, except for SafeAILab's triple, which speculators' converter
        copies.
        """
        if not self.use_aux_hidden_state:
            return (num_layers,)
        named, triple = self.eagle_aux_hidden_state_layer_ids, [1, num_layers // 2 - 1, num_layers - 4]
        are_outputs = self.aux_ids_are_nested or named == triple
        return self._aux_layers(folder, num_layers, named or triple, are_outputs, _AUX_IDS, bool(named))

    def _aux_layers(
        self, folder: Path, num_layers: int, ids: list[int], are_outputs: bool, key: str, is_set: bool
    ) -> tuple[int, ...]:
        """Aux hidden states that are the outputs or inputs of layers `ids`, which `key` has if it `is_set`."""
        layers = tuple(index + are_outputs for index in ids)
        problem = None
        if self.num_aux_hidden_states not in (None, len(layers)):
            problem = f"num_aux_hidden_states={self.num_aux_hidden_states}, but there are {len(layers)} aux layers"
        elif not all(0 <= layer <= num_layers for layer in layers):
            problem = f"the target has no {'outputs' if are_outputs else 'inputs'} of layers {ids}"
        if problem:
            first = -1 if are_outputs else 0
            raise ConfigError(
                f"{folder / 'config.json'}: {problem} ({num_layers} layers, {'by' if is_set else 'without'} {key}"
                f"); set that key to the layers the head was trained on, each from {first} to {first + num_layers}"
            )
        return tuple(layer if layer < num_layers else BEFORE_FINAL_NORM for layer in layers)

    def rope(self, head_dim: int) -> PretrainedConfig:
        """The settings `RotaryEmbedding` reads; without any in the file, transformers' defaults."""
        chosen = self.model_dump(include={"max_position_embeddings", "rope_theta", "rope_scaling"}, exclude_none=True)
        if self.rope_parameters is not None:
            # Of parameters by layer type, speculators uses those of sliding attention in all layers.
            chosen["rope_parameters"] = parameters = self.rope_parameters.get("sliding_attention", self.rope_parameters)
            if "full_attention" in parameters:
                raise ConfigError("rope_parameters has full_attention without sliding_attention")
        # transformers wants a hidden_size that the heads divide, which gpt-oss and its heads do not have.
        return LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, **chosen)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a checkpoint's tensors."""

    stored: frozenset[str]
    layer: str  # prefix of self_attn, mlp and the layer's norms
    kind: Kind

    @classmethod
    def of(cls, folder: Path, names: Collection[str]) -> "TensorNames":
        """ConfigError if the tensors in `folder` are not those of a draft head."""
        stored = frozenset(names)
        layers = [layer for layer in _spellings(*_LAYERS) if any(name.startswith(layer) for name in stored)]
        signs = [layer for layer in layers if f"{layer}hidden_norm.weight" in stored or "midlayer" in layer]
        is_third = bool(signs) or not stored.isdisjoint(("d2t", "t2d"))
        if len(layers) != 1 or not (is_third or stored & set(_spellings("fc.weight", "fusion_fc.weight"))):
            raise ConfigError(
                f"{folder} holds no draft head: expected fc.weight and one layer, midlayer.* or layers.0.*, "
                f"found {first_of(sorted(stored), 6)}; "
                "check speculative.draft_model_path"
            )
        if stored & set(_spellings("hidden_norm.weight")):
            return cls(stored, layers[0], "block")
        return cls(stored, layers[0], 3 if is_third else 2)

    @property
    def named(self) -> str:
        """The kind of the head, with an article."""
        return "a DFlash or DSpark head" if self.kind == "block" else f"an EAGLE-{self.kind} head"

    @classmethod
    def trained(cls, kind: Kind, num_layers: int) -> "TensorNames":
        """Those of a head that SpecRay trains. An EAGLE-3 layer has SafeAILab's name, which every engine reads."""
        return cls(frozenset(), "midlayer." if kind == 3 and num_layers == 1 else "layers.0.", kind)

    def of_plain(self, *plain: str) -> str:
        """The stored name of a tensor outside the layer, or the first of `plain` if it is not stored."""
        return next((name for name in _spellings(*plain) if name in self.stored), plain[0])

    def has(self, *plain: str) -> bool:
        return self.of_plain(*plain) in self.stored

    def layers(self, count: int) -> list[str]:
        """Prefixes of the layers. SafeAILab's `midlayer` is one layer, whatever config.json says."""
        first, is_numbered, _ = self.layer.partition("0.")
        return [f"{first}{index}." for index in range(count)] if is_numbered else [self.layer]

    def in_layer(self, name: str) -> bool:
        return self.layer + name in self.stored

    def fusion(self, config: HeadConfig) -> tuple[str, str | None]:
        """The weight and the bias of the linear `fc`.

        If config.json does not mention a bias, there is one if the checkpoint has it. For EAGLE-3 that holds for
        `bias: true` too, because SafeAILab's code ignores that setting there.
        """
        weight, bias = (self.of_plain(f"fc.{part}", f"fusion_fc.{part}") for part in ("weight", "bias"))
        stated = config.bias if config.fusion_bias is None else config.fusion_bias
        is_open = stated is None or (stated and self.kind == 3)
        has_bias = bias in self.stored if is_open else stated
        return weight, bias if has_bias else None


def head_shape(config: HeadConfig, folder: Path, names: TensorNames, group: RankGroup) -> LlamaShape:
    """Sizes of the head's layer, which the ranks of `group` share.

    Configs often repeat the target's `attention_bias`, which SafeAILab and SpecForge ignore, so that the tensors decide
    unless it is false. `qkv_bias` is read by the code that reads EAGLE-1 and -2 heads.
    """
    heads = config.num_attention_heads
    kv_heads, head_dim = config.num_key_value_heads or heads, config.head_dim or config.hidden_size // heads
    is_divided = config.head_dim is not None or config.hidden_size % heads == 0
    if heads % kv_heads or head_dim % 2 or not head_dim or not is_divided:
        raise ConfigError(
            f"{folder / 'config.json'}: {heads} heads, {kv_heads} KV heads, head_dim {config.head_dim} and hidden_size "
            f"{config.hidden_size} do not fit; heads must be a multiple of KV heads, head_dim even, and without "
            "head_dim hidden_size a multiple of heads"
        )
    local_heads, local_kv_heads = heads_of_rank(heads, kv_heads, group)
    found = [part for part in "qkvo" if names.in_layer(f"self_attn.{part}_proj.bias")]
    is_denied = config.attention_bias is False
    return LlamaShape(
        num_layers=len(names.layers(config.num_hidden_layers)),
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_local_heads=local_heads.stop - local_heads.start,
        num_local_kv_heads=local_kv_heads.stop - local_kv_heads.start,
        head_dim=head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        qkv_bias=bool(config.qkv_bias) or (bool(set(found) & set("qkv")) and not is_denied),
        output_bias="o" in found and not is_denied,
        qk_norm=names.in_layer("self_attn.q_norm.weight"),
        tied=False,
    )


def common_settings(shape: LlamaShape, target: PretrainedConfig) -> dict[str, Any]:
    """The settings in config.json of any head of this `shape` that SpecRay trains for `target`."""
    rope = dict(target.rope_parameters or {})
    theta = rope.pop("rope_theta", 10000.0)
    is_scaled = rope.get("rope_type", "default") != "default"
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "rope_theta": theta,  # under the names that public heads use
        "rope_scaling": rope if is_scaled else None,
        **{name: getattr(target, name) for name in ("bos_token_id", "eos_token_id")},
    }


def read_draft_vocabulary(loader: Loader, names: TensorNames, size: int, target_size: int) -> Tensor | None:
    """int64 [size]: the target id of each draft id, from the stored offsets `d2t`. None if the ids are the same.

    ConfigError if ids are missing, out of range, duplicated, or not those of the mask `t2d`.
    """
    if size == target_size and not names.has("d2t"):
        return None
    name = names.of_plain("d2t")
    ids = loader.stored(name, (size,)).to(torch.int64) + torch.arange(size)
    problem = None
    if int(ids.min()) < 0 or int(ids.max()) >= target_size or len(set(ids.tolist())) != size:
        problem = f"must give {size} different ids below {target_size}, but gives {int(ids.min())} … {int(ids.max())}"
    elif names.has("t2d"):
        stored = loader.stored(names.of_plain("t2d"), (target_size,)).to(torch.bool)
        mask = torch.zeros(target_size, dtype=torch.bool).index_fill_(0, ids, True)
        # SafeAILab's code creates an empty mask and fills it only for a smaller vocabulary.
        if not torch.equal(mask, stored) and (stored.any() or size < target_size):
            problem = "names other target ids than the mask t2d"
    if problem:
        raise ConfigError(
            f"{loader.path(name)}: tensor {name} (offsets from draft ids to target ids) {problem}; "
            "the file is damaged: fetch it again"
        )
    return None if torch.equal(ids, torch.arange(target_size)) else ids


def check_rest(loader: Loader, names: TensorNames, shape: LlamaShape) -> None:
    """ConfigError if the checkpoint holds a tensor that nothing has read, other than the mask of a full vocabulary."""
    mask = names.of_plain("t2d")
    if mask in loader.unused():
        loader.stored(mask, (shape.vocab_size,))
    # Tables of positions, and what speculators' trainer keeps of the target.
    extra = [n for n in loader.unused() if not (n.endswith("rotary_emb.inv_freq") or n.startswith("verifier_"))]
    if extra:
        raise ConfigError(
            f"{loader.path(extra[0])}: {len(extra)} tensors are not part of {names.named} with this "
            f"config.json: {first_of(extra, 4)}; "
            "the weights and the config do not belong together"
        )


_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYERS = ("midlayer.", "layers.0.", "transformer.")


def _spellings(*plain: str) -> Iterator[str]:
    for name in plain:
        yield name
        yield "model." + name


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """All settings in one dict. Those at top level take precedence; null counts as not set."""
    names = ("transformer_layer_config", "eagle_config", "dflash_config")
    parts = [*map(config.get, names), config]
    return {
        name: value for part in parts if isinstance(part, dict) for name, value in part.items() if value is not None
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); a draft head needs its config.json") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__} instead of an object; fetch it again")
    return content
