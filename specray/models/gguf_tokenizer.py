"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, and the tokens that begin and end texts."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.models.gguf_reader import GgufFile, unusable

_MAX_CHARACTERS = 1024  # of a token; those of published vocabularies have some hundreds
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
# Texts of tokens that begin a text, or end one or a turn of a chat. llama.cpp finds them by these where the file does
# not name their ids, or not all of them.
_BEGINS: tuple[str, ...] = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>")
_BEGINS += ("<\uff5cbegin\u2581of\u2581sentence\uff5c>",)
_ENDS: tuple[str, ...] = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]")
_ENDS += ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
_ENDS += ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<EOT>", "_<EOT>", "<|EOT|>")
_ENDS += ("[EOT]", "<|eom_id|>", "<|return|>", "<|call|>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<turn|>")


def generation_config(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: all tokens that end a text or a turn."""
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    texts = set(_ENDS)
    if {"<|return|>", "<|call|>"} <= set(_tokens(file)):
        texts -= {"<|end|>"}  # ends a message in the harmony format, after which the turn goes on
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)  # SmolLM2's is the text of another model's end
    by_text = [token for token in _special(file, texts) if token != unknown]
    ends = {token for token in (*named, *by_text) if token is not None}
    return {"bos_token_id": token_id(file, "bos"), "eos_token_id": sorted(ends)}


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of token `name` ("bos", "eos", …), by its text if the file's is missing or wrong.

    ConfigError if it is outside of the vocabulary and there is none of a known text.
    """
    tokens, kinds = _tokens(file), file.entries("tokenizer.ggml.token_type", int)
    token: int | None = file.get(f"tokenizer.ggml.{name}_token_id", int)
    is_outside = token is not None and not 0 <= token < len(tokens)
    if token is not None and not is_outside and kinds[token : token + 1] != [_NORMAL]:
        return token
    if by_text := _special(file, {"bos": _BEGINS, "eos": _ENDS}.get(name, ())):
        return by_text[0]
    if not is_outside:
        return token
    raise unusable(file.path, f"its {name} token {token} is not in its vocabulary of {len(tokens)}")


def _special(file: GgufFile, texts: Collection[str]) -> list[int]:
    """Ids of the control and user-defined tokens with one of `texts`."""
    kinds = file.entries("tokenizer.ggml.token_type", int)
    marked = enumerate(zip(_tokens(file), kinds, strict=False))
    return [index for index, (token, kind) in marked if token in texts and kind in (_CONTROL, _USER_DEFINED)]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What byte-level BPE does to a text before its merges, by tokenizer.ggml.pre."""

    splits: tuple[str, ...]  # regular expressions, applied in order
    ignores_merges: bool = False  # a word of the vocabulary is one token, whatever the merges are
    adds_bos: bool = False  # if the file does not say


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}"
    for digits in ("{1,3}", "")
)
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "".join(
    rf"\s{{{size}}}(?!\S)|" for size in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)
_JAIS2 += r"\s{1}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN, _GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
    rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    for end, digits in (("", ""), (_CONTRACTIONS + "?", "{1,3}"))
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_END}",
)
_SPLITS: dict[PreTokenizer, str] = {
    PreTokenizer((_GPT2,)): "default gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion",
    PreTokenizer((r"\p{N}", _GPT2)): "smollm starcoder refact codeshell exaone command-r minerva-7b",
    PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_LLAMA3,), ignores_merges=True): "glm4",
    PreTokenizer((_LLAMA3,)): "smaug-bpe dbrx",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2 solar-open",
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_SEED,)): "seed-coder",
    PreTokenizer((_EXAONE_MOE,)): "exaone-moe",
    PreTokenizer((_JAIS2,)): "jais-2",
    PreTokenizer((_TEKKEN,), ignores_merges=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
}
PRE_TOKENIZERS = {name: pre for pre, names in _SPLITS.items() for name in names.split()}


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """ConfigError for a kind of tokenizer, or a way to split text, that is not known."""
    from tokenizers import processors

    _check_lengths(file)
    model = file.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        tokenizer = _byte_level(file)
    elif model == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise unusable(file.path, f"its tokenizer is {model!r}; supported are gpt2 (byte-level BPE) and llama")
    begin, end = ([] if token is None else [(_tokens(file)[token], token)] for token in _added(file))
    if begin or end:
        single, pair = ([*(t for t, _ in begin), *texts, *(t for t, _ in end)] for texts in (["$A"], ["$A", "$B"]))
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, begin + end)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    content = json.dumps(_tokenizer_config(file), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")


def _tokens(file: GgufFile) -> list[str]:
    return _texts(file, "tokenizer.ggml.tokens")


def _texts(file: GgufFile, key: str) -> list[str]:
    if not (texts := file.entries(key, str)):
        raise unusable(file.path, f"it has no {key}")
    return texts


def _check_lengths(file: GgufFile) -> None:
    """ConfigError for a token of which no tokenizer could be made in seconds: each is split at all its places."""
    longest = max(map(len, _tokens(file)), default=0)
    if longest > _MAX_CHARACTERS:
        raise unusable(file.path, f"it has a token of {longest} characters")


def _of_type(file: GgufFile, kind: int) -> list[str]:
    kinds = file.entries("tokenizer.ggml.token_type", int)
    return [token for token, token_kind in zip(_tokens(file), kinds, strict=False) if token_kind == kind]


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise unusable(file.path, f"tokenizer.ggml.pre={pre!r} is none of {len(PRE_TOKENIZERS)} known ones")
    return PRE_TOKENIZERS[pre]


def _byte_level(file: GgufFile) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(file)
    vocabulary = {token: index for index, token in enumerate(_tokens(file))}
    merges: Any = [tuple(merge.split(" ")) for merge in _texts(file, "tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignores_merges))
    except Exception as error:  # tokenizers raises bare Exception for a bad merge
        raise unusable(file.path, f"its merges do not fit its vocabulary ({error})") from error
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if file.metadata["general.architecture"].startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _of_type(file, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in _of_type(file, _USER_DEFINED)])
    return tokenizer


def _sentencepiece(file: GgufFile) -> Any:
    """Built by transformers, which derives the merges from the scores, or for Gemma from the order of tokens."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    keys = {"tokens": str, "scores": float, "token_type": int, "merges": str}
    content = {key: file.entries(f"tokenizer.ggml.{key}", kind) for key, kind in keys.items()}
    known = {key: entries for key, entries in content.items() if entries}
    try:
        tokenizer, _ = convert_gguf_tokenizer(
            file.metadata["general.architecture"], {"tokenizer_type": "llama", **known}
        )
    except (KeyError, ValueError, TypeError) as error:
        raise unusable(file.path, f"its tokenizer cannot be built ({error!r})") from error
    if not file.get("tokenizer.ggml.add_space_prefix", bool, True) and isinstance(
        tokenizer.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=tokenizer.pre_tokenizer.split)
    return tokenizer


def _added(file: GgufFile) -> tuple[int | None, int | None]:
    """The tokens that every text begins and ends with, if the file says so or, for the first, its kind of tokenizer."""
    has_usual_bos = file.get("tokenizer.ggml.model", str) == "llama" or _pre_tokenizer(file).adds_bos
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, has_usual_bos)
    adds_eos = file.get("tokenizer.ggml.add_eos_token", bool, False)
    return (token_id(file, "bos") if adds_bos else None), (token_id(file, "eos") if adds_eos else None)


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: token_id(file, name) for key, name in ids.items()}
    template, (bos, eos) = file.get("tokenizer.chat_template", str), _added(file)
    if template and bos is not None and _tokens(file)[bos] not in template and "bos_token" not in template:
        template = "{{- bos_token }}" + template  # as llama.cpp: a chat begins with it, too
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
        **{key: _tokens(file)[token] for key, token in special.items() if token is not None},
        **({"chat_template": template} if template is not None else {}),
    }
