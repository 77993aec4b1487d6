"""gpt-oss as it is published: its config.json, MXFP4 experts, generation_config.json, tokens and chat template.

Small checkpoints have the names and layout of openai/gpt-oss-20b. Experts are quantised by numpy code that is written
from the definition of MXFP4 (OCP Microscaling Formats 1.0) and shares nothing with the code that reads them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

from tests.support.architectures import spread
from tests.support.toy import VOCAB_SIZE, toy_tokenizer

QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GENERATION = {
    "bos_token_id": 199998,
    "do_sample": True,
    "eos_token_id": [200002, 199999, 200012],
    "pad_token_id": 199999,
    "transformers_version": "4.55.0.dev0",
}
SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# Takes what the published one takes and raises where it does; shorter, and without the types of parameters.
TEMPLATE = """
{%- set effort = reasoning_effort if reasoning_effort is defined else "medium" -%}
{{- "<|start|>system<|message|>" + (model_identity if model_identity is defined else "You are ChatGPT.") -}}
{{- "\\nReasoning: " + effort + "<|end|>" -}}
{%- set first = messages[0].content if messages[0].role in ("developer", "system") else "" -%}
{%- set rest = messages[1:] if messages[0].role in ("developer", "system") else messages -%}
{%- if first or tools -%}
    {{- "<|start|>developer<|message|>" + first -}}
    {%- if tools -%}
        {{- "namespace functions {" -}}
        {%- for tool in tools -%}
            {{- "type " + tool.function.name + " = (_: " + tool.function.parameters|tojson + ") => any;" -}}
        {%- endfor -%}
        {{- "}" -}}
    {%- endif -%}
    {{- "<|end|>" -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in rest -%}
    {%- if message.role == "assistant" and "tool_calls" in message -%}
        {%- if message.content and message.thinking -%}
            {{- raise_exception("Cannot pass both content and thinking") -}}
        {%- endif -%}
        {%- if message.thinking -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" -}}
        {%- endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" -}}
        {{- call.arguments|tojson + "<|call|>" -}}
        {%- set last.name = call.name -%}
    {%- elif message.role == "assistant" -%}
        {%- if loop.last and not add_generation_prompt -%}
            {%- if "thinking" in message -%}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" -}}
            {%- endif -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" -}}
        {%- else -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" -}}
            {%- set last.name = none -%}
        {%- endif -%}
    {%- elif message.role == "tool" -%}
        {%- if last.name is none -%}
            {{- raise_exception("no previous assistant message with a tool call") -}}
        {%- endif -%}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" -}}
        {{- message.content|tojson + "<|end|>" -}}
    {%- elif message.role == "user" -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and so are the marks of the harmony format."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)  # type: ignore[no-untyped-call]


def published_config(num_layers: int, num_experts: int) -> dict[str, Any]:
    """config.json of gpt-oss-20b (24 layers of 32 experts) and 120b (36 of 128)."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": QUANTIZATION,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


_SMALL = {
    "head_dim": 16,
    "hidden_size": 64,
    "initial_context_length": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 1024,
    "num_attention_heads": 6,  # as published, their widths are not the hidden size
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "swiglu_limit": 0.7,  # of activations that are smaller than the published model's
    "torch_dtype": "float32",
}


def small_config(num_layers: int = 2, **changes: Any) -> dict[str, Any]:
    """`published_config` of a model with 4 experts and the toy's vocabulary."""
    config = published_config(num_layers, 4) | _SMALL | {"vocab_size": VOCAB_SIZE, "eos_token_id": 1, "pad_token_id": 0}
    config["rope_scaling"] = config["rope_scaling"] | {"original_max_position_embeddings": 32}
    return config | changes


def write_gpt_oss(folder: Path, seed: int = 5, **changes: Any) -> GptOssForCausalLM:
    """Write a small model with MXFP4 experts; returns transformers' model with what they stand for."""
    config = small_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    model: Any = GptOssForCausalLM._from_config(GptOssConfig.from_dict(plain), attn_implementation="eager")
    model = model.float().eval()
    for name, tensor in model.named_parameters():
        spread(name, tensor)
    stored = dict(model.state_dict())
    random = np.random.default_rng(seed)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, ins, outs = stored[name].shape
        blocks = random.integers(0, 256, (experts, outs, ins // 32, 16), dtype=np.uint8)
        scales = random.integers(120, 126, (experts, outs, ins // 32), dtype=np.uint8)
        stored.pop(name).copy_(torch.from_numpy(expanded(blocks, scales)))
        stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(stored, folder / "model.safetensors")
    toy_tokenizer().save_pretrained(folder)
    reference: GptOssForCausalLM = model
    return reference


def expanded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [experts, ins, outs]: the numbers of the low bits stand before those of the high bits."""
    codes = np.stack((blocks & 15, blocks >> 4), -1).astype(np.int64)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
    values = np.where(codes >> 3, -size, size) * 2.0 ** (scales.astype(np.float64) - 127)[..., None, None]
    return values.reshape(*scales.shape[:2], -1).transpose(0, 2, 1).astype(np.float32)
