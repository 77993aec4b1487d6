"""The assistant of a Gemma 4 checkpoint: a small decoder with queries only, over keys and values of the target.

Its layers read the KV of the target's last layer of their type, at the committed positions, so it has no KV and never
reads a prompt. All of its steps are computed at the root's position; the state that one step hands to the next is as
wide as the target's hidden states. transformers' modules compute it, and its
`SinglePositionMultiTokenCandidateGenerator` is the reference of how they are called.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, VocabHead
from specray.layers.parallel import RankGroup
from specray.models.loading import Loader
from specray.models.registry import load_config
from specray.models.target_model import ModelShape, TargetModel
from specray.models.transformers_model import decode, pooled
from specray.models.transformers_parallel import Split
from specray.models.transformers_skeleton import AttentionCall, attention_calls, build_skeleton, decoder_of
from specray.models.transformers_weights import load_weights
from specray.ops.attention import Attend
from specray.ops.cpu.trees import TreeNetwork
from specray.ops.layer_attention import LayerAttention

_OWN_KV = ("k_proj", "v_proj", "k_norm", "v_norm")  # which transformers' layers have and an assistant's have not


def check_gemma_assistant(folder: Path, target_folder: Path, target: ModelShape) -> Any:
    """The assistant's configuration. ConfigError if it was not made for this target. Reads no weights."""
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not wrap its own exceptions
        raise ConfigError(f"{folder / 'config.json'} cannot be used: {' '.join(str(error).split())}") from error
    text, ours = config.text_config, load_config(target_folder)
    owners = list(getattr(ours, "layer_types", None) or ())[: target.num_kv_layers]  # of KV
    pairs = {
        "backbone_hidden_size": (config.backbone_hidden_size, target.hidden_size),
        "text_config.vocab_size": (text.vocab_size, target.vocab_size),
        "text_config.layer_types": (sorted(set(text.layer_types)), sorted(set(owners))),
    }
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            raise ConfigError(
                f"{folder / 'config.json'}: {name}={own}, but the target has {wanted}; an assistant works with the "
                "Gemma 4 checkpoint it was trained with: set speculative.draft_model_path to that of this target, or "
                "speculative.algorithm to EAGLE3 or NGRAM"
            )
    return config


class GemmaAssistant:
    """Implements TreeModel; a state is [backbone_hidden_size]."""

    draft_token_ids: Tensor | None = None
    network: TreeNetwork | None = None
    vocab_head: VocabHead | None = None

    def __init__(self, folder: Path, config: Any, loader: Loader, target: TargetModel, target_config: Any) -> None:
        """`config` is that of `check_gemma_assistant`. ConfigError if the target's KV is not what it reads."""
        text = deepcopy(config.text_config)
        text.num_kv_shared_layers, text.tie_word_embeddings = 0, config.tie_word_embeddings
        model = build_skeleton(text, loader.dtype)
        calls = attention_calls(model)
        self._body = decoder_of(model)
        for layer in list[Any](self._body.get_submodule("layers").children()):
            layer.self_attn.is_kv_shared_layer = True
            for name in _OWN_KV:
                delattr(layer.self_attn, name)
        stored = load_weights(model, loader, Split({}, set()), calls)
        size, width, self.vocab_size = config.backbone_hidden_size, text.hidden_size, text.vocab_size
        self._pre = _linear(loader, "pre_projection.weight", (width, 2 * size))
        self._post = _linear(loader, "post_projection.weight", (size, width))
        output = loader.tensor(stored.output or stored.embedding or "lm_head.weight", (self.vocab_size, width))
        self._logits: VocabHead | ClusteredHead
        if config.use_ordered_embeddings:
            self._logits = ClusteredHead(config, output, loader)
        else:
            self._logits = VocabHead(output, self.vocab_size, RankGroup(), loader.quantization)
        self._embedding = target.embedding
        self._scale = torch.tensor(size**0.5, dtype=loader.dtype, device=loader.device)
        owners = target_config.layer_types[: target.shape.num_kv_layers]
        self._reads = [len(owners) - 1 - owners[::-1].index(kind) for kind in text.layer_types]
        self._keys = {  # transformers asks for their sizes only
            kind: (torch.empty(1, call.num_kv_heads, 0, call.qk_dim, dtype=loader.dtype, device=loader.device),) * 2
            for kind, call in zip(text.layer_types, calls.values(), strict=True)
        }
        ways = dict(zip(text.layer_types, calls.values(), strict=True))
        self.layer_attention = _over_pool(folder, target, [ways[kind] for kind in owners])
        self.num_heads = text.num_attention_heads

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See TreeModel. `attend` only reads: the target's KV."""
        inputs = self._pre(torch.cat((self._embedding(token_ids) * self._scale, states), -1))
        layers = iter(self._reads)

        def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:  # noqa: ARG001
            rows = q[0].transpose(0, 1).contiguous()
            return attend(next(layers), rows, None).view(1, *rows.shape)

        return decode(self._body, positions, attention, inputs_embeds=inputs[None], shared_kv_states=self._keys)

    def recur(self, output: Tensor) -> Tensor:
        """See TreeModel."""
        return self._post(output)

    def logits(self, output: Tensor) -> Tensor:
        """See TreeModel."""
        return self._logits(output)


class ClusteredHead:
    """Logits of the tokens in the clusters whose centroids are most likely; those of the others are lower."""

    def __init__(self, config: Any, output: Tensor, loader: Loader) -> None:
        """`output` [vocab, hidden] is the output matrix."""
        vocab_size, width = output.shape
        self._output, self._num_chosen = output, config.centroid_intermediate_top_k
        self._centroids = _linear(loader, "masked_embedding.centroids.weight", (config.num_centroids, width))
        ordering = loader.stored("masked_embedding.token_ordering", (vocab_size,))
        self._clusters = ordering.to(loader.device, torch.int64).view(config.num_centroids, -1)  # their tokens

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab]"""
        chosen = self._centroids(hidden_states).topk(self._num_chosen, -1).indices
        tokens = self._clusters[chosen].flatten(1)
        logits = (self._output[tokens] @ hidden_states[:, :, None])[..., 0].float()
        others = (logits.amin(-1, keepdim=True) - 1.0).expand(-1, len(self._output))
        return others.scatter(1, tokens, logits)


def _linear(loader: Loader, name: str, shape: tuple[int, int]) -> ColumnParallelLinear:
    return ColumnParallelLinear(loader.weight(name, shape), None, loader.quantization)


def _over_pool(folder: Path, target: TargetModel, calls: Sequence[AttentionCall]) -> list[LayerAttention]:
    """How an assistant would attend to each layer of the target's pool, `calls` of layers of the same types."""
    layers = [pooled(call, None, target.max_positions) for call in calls]
    # As in transformers, where a query sees keys up to `sliding_window` before the last one, which counts as its own.
    layers = [layer if layer.window is None else replace(layer, window=layer.window + 1) for layer in layers]
    own = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
    if own != [(layer.num_kv_heads, layer.head_dim) for layer in target.layer_attention or ()]:
        raise ConfigError(
            f"{folder}: the assistant's KV heads are not those of the target's KV on this rank; set tp_size: 1, and "
            "speculative.draft_model_path to the assistant of this target"
        )
    return layers
