"""Request fields that an endpoint does not read: refused with a 400, or accepted because they change no answer.

An endpoint honours the fields that its body declares. Every other field of the OpenAI and Anthropic SDKs and of vLLM's
and SGLang's request models stands in one of the tables here; a test compares them with the published models. A field
that is in no table belongs to no known API; it is accepted and named in a response header.
"""

from collections.abc import Mapping
from typing import NamedTuple

from specray.errors import InvalidRequestError
from specray.server.errors import short_repr


class FieldRefusal(NamedTuple):
    """`accepted` values turn the field off, as null always does; other values get a 400 that ends with `advice`."""

    accepted: tuple[object, ...] = ()
    advice: str = "leave it out"


Refusals = dict[str, FieldRefusal]


def _refusals(names: str, *accepted: object, advice: str = "leave it out") -> Refusals:
    return dict.fromkeys(names.split(), FieldRefusal(accepted, advice))


# Fields that no endpoint implements, and fields that only some endpoints put into the prompt.
REFUSED: Refusals = {
    **_refusals("tools functions tool_calls documents input_embeds prompt_embeds", []),
    **_refusals("image image_data audio_data video_data", [], "", advice="this server takes text only"),
    **_refusals("audio web_search_options"),
    **_refusals("container mcp_servers", [], {}),
    **_refusals("tool_choice function_call", "none", "auto"),
    **_refusals("modalities", ["text"], []),
    **_refusals("verbosity", "medium"),
    **_refusals("context_management compaction thread fallbacks", [], {}),
    **_refusals("previous_response_id conversation previous_input_messages moderation", []),
    **_refusals("background enable_response_messages", False),
    **_refusals("truncation", "disabled"),
    **_refusals("add_generation_prompt", True),
    **_refusals("add_special_tokens continue_final_message", False),
    **_refusals("chat_template suffix grammar task", ""),
    **_refusals("chat_template_kwargs", {}),
    **_refusals("reasoning_effort"),
    **_refusals("enable_thinking", advice='send chat_template_kwargs={"enable_thinking": …}'),
    **_refusals("thinking_budget thinking_token_budget max_thinking_tokens", -1),
    **_refusals("echo use_beam_search early_stopping require_reasoning ebnf_full_assistant", False),
    **_refusals("best_of beam_width length_penalty", 1),
    **_refusals("guided_whitespace_pattern output_format watermark watermarking", "", {}, False),
    **_refusals("prompt_logprobs sampling_logprobs_mode"),
    **_refusals("logprob_start_len", -1),
    **_refusals("bad_words logits_processors token_ids_logprob logprob_token_ids", []),
    **_refusals("custom_logit_processor stop_regex stop_regex_strs", [], ""),
    **_refusals("stop_strs", [], "", advice="send stop"),
    **_refusals("lora_path lora_id", "", []),
    **_refusals("return_hidden_states return_routed_experts return_indexer_topk return_weight_versions", False),
    **_refusals("return_token_ids return_tokens_as_token_ids return_prompt_token_ids return_prompt_text", False),
    **_refusals("return_token_offsets return_entropy return_sampling_mask return_meta_info return_bytes", False),
    **_refusals("return_input_ids_in_sglext return_output_ids_in_sglext return_flat_raw_top_logprobs", False),
    **_refusals("return_flat_raw_output_top_logprobs continuous_usage_stats", False),
    **_refusals("repetition_detection mm_processor_kwargs vllm_xargs custom_params session_params", {}),
    **_refusals("kv_transfer_params ec_transfer_params", {}, advice="prompts are computed where they are decoded"),
    **_refusals(
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key disagg_prefill_dp_rank decode_tp_size"
    ),
    **_refusals("multi_item_delimiter_indices token_indices_to_pool positional_embed_overrides", []),
    # Sampling options of llama.cpp's server.
    **_refusals("repeat_penalty typical_p", 1, advice="send repetition_penalty, top_p or min_p"),
    **_refusals("dry_multiplier xtc_probability mirostat dynatemp_range", 0),
    **_refusals("top_n_sigma n_predict", -1),
    **_refusals("samplers", []),
}

# Options of generation. An endpoint that only counts or tokenizes has no use for them and accepts them.
GENERATION: Refusals = {
    **_refusals("messages prompt input text input_ids tokens system instructions", "", [], {}),
    **_refusals("temperature top_p repetition_penalty n", 1),
    **_refusals("min_p presence_penalty frequency_penalty min_tokens min_new_tokens", 0),
    **_refusals("top_k", -1, 0),
    **_refusals("max_tokens max_completion_tokens max_output_tokens max_new_tokens seed sampling_seed timeout"),
    **_refusals("stop stop_sequences stop_token_ids include", [], ""),
    **_refusals("truncation_side", "left"),
    **_refusals("ignore_eos include_stop_str_in_output no_stop_trim", False),
    **_refusals("skip_special_tokens separate_reasoning include_reasoning parallel_tool_calls", True),
    **_refusals("logit_bias sampling_params speculative thinking reasoning output_config stream_options", {}),
    **_refusals("allowed_token_ids truncate_prompt_tokens cache_salt", ""),
    **_refusals("logprobs top_logprobs return_logprob top_logprobs_num", False),
    **_refusals("return_token_strs", False),
    **_refusals("response_format", {"type": "text"}),
    **_refusals("structured_outputs json_schema regex ebnf structural_tag", ""),
    **_refusals("guided_json guided_regex guided_choice guided_grammar", ""),
}

_CLIENT = "an API key names its client"
_SPEED = "it changes the speed and never the text"
_MEDIA = "it describes images, audio and video, which no message may have"
_INTERNAL = "SGLang's processes send it to each other"
_REFUSED_DATA = "it describes what another field asks for, and that field is refused"

# Field without effect on an answer -> why it has none here.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("user", "safety_identifier", "user_profile_id", "workspace_id", "access_programs"), _CLIENT),
    **dict.fromkeys(("metadata", "store"), "only `/v1/responses` can store replies, see `server.response_store_mib`"),
    **dict.fromkeys(("service_tier", "speed", "inference_geo", "billing_policy"), "there is one tier"),
    **dict.fromkeys(("prompt_cache_key", "prediction", "kv_hints"), _SPEED),
    **dict.fromkeys(
        ("prompt_cache_retention", "prompt_cache_options", "cache_control"),
        "cached prefixes stay until their memory is needed",
    ),
    "priority": "requests start in the order of their age; chat and completions have vLLM's priorities",
    **dict.fromkeys(("request_id", "rid"), "the server makes its own IDs"),
    **dict.fromkeys(("session_id", "conversation_id", "routing_key"), "`prompt_cache_key` chooses the engine"),
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank"), "the ingress chooses the engine"),
    "extra_key": "`cache_salt` separates prefix caches",
    "spaces_between_special_tokens": "fast tokenizers have no such option",
    "guided_decoding_backend": "the grammar is the same with any",
    **dict.fromkeys(("log_metrics", "custom_labels"), "all requests are counted, by client"),
    **dict.fromkeys(("no_logs", "diagnostics"), "the operator chooses the tenants whose requests are logged"),
    **dict.fromkeys(("stream_interval", "stream_reasoning", "include_obfuscation"), "it only divides a stream"),
    **dict.fromkeys(
        ("return_cached_tokens_details", "return_spec_tokens_details"), "usage always has what the server knows"
    ),
    "return_text_in_logprobs": "log probabilities that have texts always have them",
    "max_tool_calls": "it limits tools that OpenAI runs; none are run here",
    "betas": "each field of a beta is supported or refused by itself",
    "fallback_credit_token": "there is one model",
    **dict.fromkeys(
        (
            *("mm_hashes", "mm_content_hashes", "mm_payload", "return_mm_kwargs", "media_io_kwargs", "images_config"),
            *("video_config", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
            *("video_max_dynamic_patch", "use_audio_in_video", "encoder_urls", "num_items_assigned"),
            "need_wait_for_mm_inputs",
        ),
        _MEDIA,
    ),
    **dict.fromkeys(
        ("routed_experts_start_len", "routed_experts_prompt_start", "return_flat_raw_top_logprobs_b64"), _REFUSED_DATA
    ),
    **dict.fromkeys(
        ("http_worker_ipc", "received_time", "external_trace_header", "is_normalized", "stop_str_max_len"), _INTERNAL
    ),
    **dict.fromkeys(("stop_regex_max_len", "abort_message", "finished_reason", "weight_versions"), _INTERNAL),
}


def check_refused(body: Mapping[str, object], refusals: Refusals, synonyms: Mapping[str, str]) -> None:
    """InvalidRequestError for the first field of a body that is refused. `synonyms` names what to send instead."""
    for name in body:
        refusal = refusals.get(name)
        if refusal is None or body[name] is None or body[name] in refusal.accepted:
            continue
        advice = f"send {synonyms[name]}" if name in synonyms else refusal.advice
        raise InvalidRequestError(
            f"{name}={short_repr(body[name])}: this endpoint does not support {name}; {advice}", name
        )
