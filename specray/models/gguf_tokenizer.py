"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, and the tokens that begin and end texts."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specray.models.gguf_reader import GgufFile, unusable

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Texts of tokens that end a turn of a chat. llama.cpp finds them by text where the file does not name their ids.
_END_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<EOT>", "_<EOT>", "<|EOT|>"}
_END_OF_TURN |= {"<end_of_utterance>", "<|eom_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>"}


def generation_config(file: GgufFile) -> dict[str, Any]:
    ends = [token_id(file, name) for name in ("eos", "eot", "eom")]
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    by_text = [
        index
        for index, (token, kind) in enumerate(zip(_tokens(file), kinds, strict=False))
        if token in _END_OF_TURN and kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": sorted({token for token in (*ends, *by_text) if token is not None}),
    }


def token_id(file: GgufFile, name: str) -> int | None:
    token: int | None = file.get(f"tokenizer.ggml.{name}_token_id", int)
    if token is not None and not 0 <= token < len(_tokens(file)):
        raise unusable(file.path, f"its {name} token {token} is not in its vocabulary of {len(_tokens(file))}")
    return token


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _CL100K % "{1,3}", _CL100K % ""
# tokenizer.ggml.pre: regexes that split text, applied in order before the merges.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
}


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    model = file.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        _write_byte_level(file, folder)
    elif model == "llama":
        _write_sentencepiece(file, folder)
    else:
        raise unusable(file.path, f"its tokenizer is {model!r}; supported are gpt2 (byte-level BPE) and llama")


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    return tokens


def _write_byte_level(file: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise unusable(file.path, f"tokenizer.ggml.pre={pre!r} is unknown; known are {', '.join(_PRE_TOKENIZERS)}")
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _PRE_TOKENIZERS[pre]]
    tokenizer = Tokenizer(_bpe(file, models.BPE, ignore_merges=_PRE_TOKENIZERS[pre] == (_LLAMA3,)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if file.metadata["general.architecture"].startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _of_type(file, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in _of_type(file, _USER_DEFINED)])
    if (bos := _added_bos(file)) is not None:
        ids = [(bos, token_id(file, "bos"))]
        tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], [bos, "$A", "$B"], ids)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(_tokenizer_config(file), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def _bpe(file: GgufFile, bpe: Callable[..., Any], *, ignore_merges: bool) -> Any:
    vocabulary = {token: index for index, token in enumerate(_tokens(file))}
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges", list)]
    try:
        return bpe(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception for a bad merge
        raise unusable(file.path, f"its merges do not fit its vocabulary ({error})") from error


def _of_type(file: GgufFile, kind: int) -> list[str]:
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    return [token for token, token_kind in zip(_tokens(file), kinds, strict=False) if token_kind == kind]


def _added_bos(file: GgufFile) -> str | None:
    """The token that begins every text, if the file says so; if it says nothing, Llama 3's tokenizers have one."""
    is_llama3 = _PRE_TOKENIZERS.get(file.get("tokenizer.ggml.pre", str, "default")) == (_LLAMA3,)
    token = token_id(file, "bos")
    return (
        _tokens(file)[token]
        if file.get("tokenizer.ggml.add_bos_token", bool, is_llama3) and token is not None
        else None
    )


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: token_id(file, name) for key, name in ids.items()}
    template, bos = file.get("tokenizer.chat_template", str), _added_bos(file)
    if template and bos is not None and bos not in template and "bos_token" not in template:
        template = "{{- bos_token }}" + template  # as llama.cpp: a chat begins with it, too
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos is not None,
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        **{key: _tokens(file)[token] for key, token in special.items() if token is not None},
        **({"chat_template": template} if template is not None else {}),
    }


def _write_sentencepiece(file: GgufFile, folder: Path) -> None:
    # transformers derives the merges from the scores. Imported here because the import takes seconds.
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(folder / "config.json", Path(scratch) / "config.json")
        (Path(scratch) / "model.gguf").symlink_to(file.path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(
            scratch, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
        )
    tokenizer.save_pretrained(folder)
