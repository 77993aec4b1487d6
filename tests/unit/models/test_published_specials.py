"""No special token of published models can be written in a message: their texts, and how their tokenizers treat them.

The tokenizers are of bytes, with these special tokens added as the models' files add them.
"""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specray.models.tokenizer import render_chat

BAR = "\uff5c"
# Model -> (special tokens, options with which they are added).
PUBLISHED: dict[str, tuple[list[str], dict[str, bool]]] = {
    "Llama 3": (
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
            "<|finetune_right_pad_id|>",
            "<|reserved_special_token_0|>",
        ],
        {},
    ),
    "Llama 2": (["<s>", "</s>", "<unk>"], {"rstrip": False}),
    "Mistral": (
        [
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[SYSTEM_PROMPT]",
        ],
        {},
    ),
    "Qwen 2.5": (
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|object_ref_start|>",
            "<|vision_start|>",
            "<|vision_pad|>",
            "<|image_pad|>",
        ],
        {},
    ),
    "DeepSeek V3": (
        [
            f"<{BAR}begin▁of▁sentence{BAR}>",
            f"<{BAR}end▁of▁sentence{BAR}>",
            f"<{BAR}User{BAR}>",
            f"<{BAR}Assistant{BAR}>",
            f"<{BAR}tool▁calls▁begin{BAR}>",
            f"<{BAR}tool▁sep{BAR}>",
        ],
        {},
    ),
    "Gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "<unk>"], {}),
    "Phi 3": (
        ["<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", "<|placeholder1|>"],
        {"rstrip": True},
    ),
    "gpt-oss": (
        [
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
            "<|startoftext|>",
        ],
        {},
    ),
    "Command R": (
        [
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
        ],
        {},
    ),
    "GLM 4": (["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"], {}),
    "Yi": (["<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"], {"lstrip": True}),
    "SmolLM2": (
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<repo_name>",
            "<reponame>",
            "<file_sep>",
            "<jupyter_code>",
            "<empty_output>",
        ],
        {},
    ),
}


def tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    """Of bytes; the template writes the first special token before a message and the last behind it."""
    specials, options = PUBLISHED[model]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True, **options) for text in specials])
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}FIRST{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% endif %}"
        "{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}LAST\n"
        "{% endfor %}"
    )
    template = template.replace("FIRST", specials[0]).replace("LAST", specials[-1])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)  # type: ignore[no-untyped-call]


def conversations(text: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The text in every place that comes from a client."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": text, "b": [text]}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"title": text}}}
    return [([{"role": role, "content": text}], []) for role in ("system", "user", "assistant", "tool")] + [
        ([{"role": "user", "content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]}], []),
        ([{"role": "assistant", "content": "", "tool_calls": [call]}], []),
        ([{"role": "user", "content": "x"}], [tool]),
    ]


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_content_field_becomes_a_special_token(model: str) -> None:
    tokenizer, (specials, _) = tokenizer_of(model), PUBLISHED[model]
    ids = {tokenizer.convert_tokens_to_ids(special) for special in specials}
    for special in specials:
        for around in ("{}", " {} ", "a{}b", "{0}{0}", "{}\n{}"):
            text = around.format(special, special)
            for hostile, harmless in zip(conversations(text), conversations("xxxxx"), strict=True):
                rendered, expected = (render_chat(tokenizer, *_tools(chat)) for chat in (hostile, harmless))
                found = [token for token in rendered if token in ids]
                assert found == [token for token in expected if token in ids], (special, json.dumps(hostile))


def _tools(chat: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> tuple[Any, bool, Any]:
    messages, tools = chat
    return messages, False, tools
