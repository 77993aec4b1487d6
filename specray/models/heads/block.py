"""Heads that draft a block of tokens in one pass: DFlash (arXiv:2602.06036), JetSpec and DSpark.

The rows of a block are the last known token and masks. They attend to the context, the committed tokens before the
block, and to rows of the block: all of them, or earlier ones only (`BlockMask`). Of the context, layers have keys and
values alone, projected from one state a position (`fuse` of the target's hidden states): a committed token costs no
attention and no feed-forward. A head has no embedding of its own, and mostly no output matrix.

DSpark adds to the logits of a row a bias that depends on the token before it (`MarkovRows`), and a confidence: the
chance that a token drafted there is accepted. Its rows, and those of DeepSpec's DFlash heads, predict the token behind
their own position; other rows predict their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specray.models.heads.block_files import BlockConfig
from specray.models.heads.eagle_files import TensorNames, read_draft_vocabulary
from specray.models.heads.parts import Parts
from specray.models.heads.served import DraftHead, ServedParts, load_embedding, load_rotary, output_matrix
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import Attend


def trained_settings(
    num_draft_ids: int, aux_hidden_state_layers: Sequence[int], mask_token_id: int, num_predicted: int, markov_rank: int
) -> dict[str, Any]:
    """The settings in config.json, beside `transformer_layer_config`, of a head that SpecRay trains.

    It has speculators' layout. With a `markov_rank` it is a DSpark head.
    """
    kind = "dspark" if markov_rank else "dflash"
    own = {
        "speculators_model_type": kind,
        "draft_vocab_size": num_draft_ids,
        "block_size": num_predicted + (not markov_rank),
        "aux_hidden_state_layer_ids": list(aux_hidden_state_layers),
        "mask_token_id": mask_token_id,
        "sample_from_anchor": bool(markov_rank),
    }
    if not markov_rank:
        return {"architectures": ["DFlashDraftModel"], **own}
    rows = {"markov_rank": markov_rank, "markov_head_type": "vanilla"}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return {"architectures": ["DSparkDraftModel"], **own, **rows, **confidence}


class MarkovRows:
    """The bias of a row's logits by the token before it, as a matrix of low rank.

    `gated`: the row's output scales the token's embedding. `rnn`: a state of the same size runs along the path.
    """

    def __init__(self, config: BlockConfig, size: int, parts: Parts) -> None:
        """`size` columns of the network's output."""
        rank, name = config.markov_rank, "markov_head."
        self.embed = parts.embedding(f"{name}markov_w1.weight", (config.vocab_size, rank))
        self.project = parts.linear(f"{name}markov_w2.weight", (config.num_draft_ids, rank))
        self._gate: Callable[[Tensor], Tensor] | None = None
        self._joint: Callable[[Tensor], Tensor] | None = None
        if config.markov_head_type == "gated":
            self._gate = parts.linear(f"{name}gate_proj.weight", (rank, size + rank), f"{name}gate_proj.bias")
        if config.markov_head_type == "rnn":
            shape = 3 * rank, 2 * rank + size
            self._joint = parts.linear(f"{name}joint_proj.weight", shape, f"{name}joint_proj.bias")

    def __call__(self, embeds: Tensor, output: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(input of `project`, the next state), each [n, rank].

        `embeds` [n, rank] are those of the tokens before the rows with `output` [n, H], `state` is that of the rows
        before, None at the first row.
        """
        if self._gate is not None:
            return torch.sigmoid(self._gate(torch.cat((output, embeds), -1))) * embeds, None
        if self._joint is None:
            return embeds, None
        state = torch.zeros_like(embeds) if state is None else state
        gate, candidate, result = self._joint(torch.cat((state, embeds, output), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return result.tanh(), gate * state + (1 - gate) * candidate.tanh()


class Block:
    """The network."""

    def __init__(self, config: BlockConfig, names: TensorNames, parts: Parts, num_columns: int) -> None:
        """`num_columns` of the target's hidden states."""
        size = parts.shape.hidden_size
        self.fc = parts.linear(names.of_plain("fc.weight"), (size, num_columns))
        self.hidden_norm = parts.norm(names.of_plain("hidden_norm.weight"), size)
        prefixes = names.layers(parts.shape.num_layers)
        self.layers = parts.layers(prefixes, size, norms_input=True)
        self.context_kv = parts.context_kv([f"{prefix}self_attn." for prefix in prefixes])
        self.norm = parts.norm(names.of_plain("norm.weight"), size)
        self.markov = MarkovRows(config, size, parts) if config.has_markov_rows else None
        self.confidence: Callable[[Tensor], Tensor] | None = None
        self._confidence_reads_token = config.confidence_head_with_markov
        if config.enable_confidence_head:
            width, name = size + config.markov_rank * config.confidence_head_with_markov, "confidence_head.proj."
            self.confidence = parts.linear(f"{name}weight", (1, width), f"{name}bias")

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """The states [..., H] of the context, from aux hidden states [..., num_columns]."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def __call__(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [..., T, H] of rows with `embeds` at positions int64 [T], to multiply with the output matrix."""
        return self.norm(self.layers(embeds, embeds, positions, attend))

    def confidence_logits(self, output: Tensor, embeds: Tensor | None) -> Tensor | None:
        """[n, 1] of rows with `output` [n, H] and MarkovRows' `embeds`; None: the head has no confidence."""
        if self.confidence is None:
            return None
        if self._confidence_reads_token:
            assert embeds is not None
            output = torch.cat((output, embeds), -1)
        return self.confidence(output)


class BlockHead(DraftHead):
    """The network, served."""

    def __init__(
        self, config: BlockConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        layers = config.aux_hidden_state_layers(loader.folder, shared.shape.num_layers)
        ids = read_draft_vocabulary(loader, names, config.num_draft_ids, shape.vocab_size)
        embedding = load_embedding(shape, loader, names, shared)
        output, _ = output_matrix(config.num_draft_ids, ids, shape, loader, names, shared)
        super().__init__(shape, shared, layers, ids, embedding, output)
        assert config.mask_token_id is not None, "BlockConfig.check"
        self.config, self.mask_token_id = config, config.mask_token_id
        parts = ServedParts(shape, load_rotary(config, shape, loader, shared.max_positions), loader)
        self._net = Block(config, names, parts, len(layers) * shared.shape.hidden_size)

    @property
    def looks_at_tokens(self) -> bool:
        """Whether `after_tokens` has parts; a confidence that only reads the output is one, too."""
        return self._net.markov is not None or self._net.confidence is not None

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self._net.fuse(aux_hidden_states.to(self.dtype))

    def context_kv(self, states: Tensor, positions: Tensor) -> Tensor:
        """[layers, T, 2, kv_heads, dim] of states [T, H] at positions int64 [T]."""
        return self._net.context_kv(states, positions)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the rows of blocks; token_ids (of the target) and positions are int64 [T]."""
        return self._net(self._embedding(token_ids) * self.config.input_embedding_scale, positions, attend)

    def logits(self, output: Tensor) -> Tensor:
        logits, cap = super().logits(output).to(torch.float32), self.config.final_logit_softcapping
        logits = logits * self.config.output_multiplier
        return cap * torch.tanh(logits / cap) if cap else logits

    def after_tokens(
        self, token_ids: Tensor, output: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(bias of the logits [n, vocab_size], confidence [n, 1], the next state) of rows behind tokens int64 [n].

        `output` is [n, H]; `state` [n, any] is that of the rows before, None at a block's first row. None where the
        head has no such part.
        """
        embeds = bias = None
        if (markov := self._net.markov) is not None:
            embeds = markov.embed(token_ids)
            features, state = markov(embeds, output, state)
            bias = markov.project(features).float()
        confidence = self._net.confidence_logits(output, embeds)
        return bias, None if confidence is None else confidence.float().sigmoid(), state
