"""Small random assistants of Gemma 4, in the published layout, and transformers' own drafting with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.architectures import spread
from tests.support.decoders import SMALL, decoder_config
from tests.support.toy import VOCAB_SIZE


def write_assistant(folder: Path, target: str, clusters: int | None, seed: int = 3) -> Any:
    """An assistant of the decoder `target` of the tests' table; with `clusters`, it has centroids of its vocabulary.

    Returns transformers' model. Its configuration class (5.23) refuses layers that all share KV, as an assistant's do.
    """
    config: Any = decoder_config(target)
    family = "Gemma4Unified" if config.model_type == "gemma4_unified_text" else "Gemma4"
    text_class: Any = getattr(transformers, f"{family}TextConfig")
    has_equal_kv = config.attention_k_eq_v
    text = text_class(
        vocab_size=config.vocab_size,
        sliding_window=config.sliding_window,
        attention_k_eq_v=has_equal_kv,
        num_global_key_value_heads=1 if has_equal_kv else None,
        head_dim=SMALL["head_dim"],
        num_key_value_heads=SMALL["num_key_value_heads"],
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=4,
        global_head_dim=16,
        **{} if family == "Gemma4Unified" else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        max_position_embeddings=config.max_position_embeddings,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    whole = getattr(transformers, f"{family}AssistantConfig")(
        text_config=text,
        backbone_hidden_size=config.hidden_size,
        use_ordered_embeddings=clusters is not None,
        num_centroids=clusters or 8,
        centroid_intermediate_top_k=3,
        architectures=[f"{family}AssistantForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_class, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers))
        model = (
            getattr(transformers, f"{family}AssistantForCausalLM")
            ._from_config(whole, attn_implementation="eager")
            .float()
            .eval()
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
            spread(name, tensor)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(assistant: Any, target: Any, known: list[int], drafted: list[int]) -> Tensor:
    """[1 + len(drafted), vocab]: logits of the tokens after `known` and after each of `drafted`, in one draft.

    `target` must have layers that share KV, because transformers hands on no other.
    """
    inputs = torch.tensor([known[:-1]])
    out = target(inputs, output_hidden_states=True, return_shared_kv_states=True)
    state, results = out.hidden_states[-1][:, -1:], []
    for token in (known[-1], *drafted):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        result = assistant(
            inputs_embeds=torch.cat((embedded, state), -1),
            position_ids=torch.tensor([[len(known) - 1]]),
            shared_kv_states=dict(out.shared_kv_states),
        )
        state = result.last_hidden_state
        results.append(result.logits[0, 0])
    return torch.stack(results)
