"""Every option of SGLang's reference on speculative decoding either works or is refused with the reason."""

import argparse
from typing import Any

import pytest

from cluster.cli.flags import add_flags, given, overridden
from cluster.config import AppConfig
from specray.config import EngineConfig, SpeculativeConfig
from tests.support.methods import METHODS

HEAD = "EAGLE3 --speculative-draft-model-path head"
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
# flag and value -> other flags that it requires
WORKING = {
    "--speculative-algorithm NEXTN": "",
    "--speculative-algorithm STANDALONE": "--speculative-draft-model-path model",
    "--speculative-draft-model-path head": "--speculative-algorithm EAGLE",
    "--speculative-draft-model-revision main": f"--speculative-algorithm {HEAD}",
    "--speculative-draft-load-format safetensors": f"--speculative-algorithm {HEAD}",
    "--speculative-num-steps 3": f"--speculative-algorithm {HEAD} {CHAIN}",
    "--speculative-eagle-topk 1": f"--speculative-algorithm {HEAD} {CHAIN}",
    "--speculative-num-draft-tokens 4": f"--speculative-algorithm {HEAD} {CHAIN}",
    "--speculative-accept-threshold-single 0.9": "--speculative-algorithm NGRAM",
    "--speculative-accept-threshold-acc 0.9": "--speculative-algorithm NGRAM",
    "--speculative-token-map map.json": "--speculative-algorithm EAGLE --speculative-draft-model-path head",
    "--speculative-draft-attention-backend torch": f"--speculative-algorithm {HEAD}",
    "--speculative-draft-attention-backend flashinfer": f"--speculative-algorithm {HEAD}",
    "--speculative-attention-mode decode": "--speculative-algorithm NGRAM",
    "--speculative-moe-runner-backend triton": "--speculative-algorithm MTP",
    "--attention-backend fa": "",
    "--moe-runner-backend torch": "",
    "--speculative-draft-model-quantization unquant": f"--speculative-algorithm {HEAD}",
    "--speculative-ngram-min-match-window-size 2": "--speculative-algorithm NGRAM",
    "--speculative-ngram-max-match-window-size 9": "--speculative-algorithm NGRAM",
    "--speculative-ngram-min-bfs-breadth 2": "--speculative-algorithm NGRAM",
    "--speculative-ngram-max-bfs-breadth 4": "--speculative-algorithm NGRAM",
    "--speculative-ngram-match-type PROB": "--speculative-algorithm NGRAM",
    "--speculative-ngram-branch-length 20": "--speculative-algorithm NGRAM",
    "--speculative-ngram-max-trie-depth 18": "--speculative-algorithm NGRAM",
    "--speculative-ngram-capacity 5000": "--speculative-algorithm NGRAM",
    "--mem-fraction-static 0.5": "",
    "--max-running-requests 4": "",
    "--torch-compile-max-bs 8": "",
    "--cuda-graph-max-bs 4": "",
}
# flag -> (a value that describes what is done anyway, a value that is refused)
REFUSED: dict[str, tuple[str | None, str]] = {
    "--speculative-attention-mode": ("prefill", "both"),
    "--moe-runner-backend": ("auto", "deep_gemm"),
    "--speculative-moe-runner-backend": (None, "flashinfer_trtllm"),
    "--speculative-moe-a2a-backend": ("none", "deepep"),
    "--speculative-ngram-force-greedy-verify": ("false", "true"),  # SGLANG_NGRAM_FORCE_GREEDY_VERIFY
    "--enable-multi-layer-eagle": ("true", "false"),
    "--enable-dp-attention": ("false", "true"),
    "--attention-backend": ("auto", "fa3"),
    "--speculative-draft-attention-backend": (None, "flashmla"),
}


def configured(line: str) -> AppConfig:
    """The configuration that `specray serve` makes from a command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser, AppConfig)
    return AppConfig.model_validate(overridden({}, given(parser.parse_args(line.split()), AppConfig)))


@pytest.mark.parametrize(("option", "others"), WORKING.items())
def test_supported_options_are_in_the_configuration(option: str, others: str) -> None:
    flag, value = option.split()
    config: Any = configured(f"{others} {option}")
    name = flag.removeprefix("--").replace("-", "_")
    group = config.speculative if name.startswith("speculative_") else config
    assert str(getattr(group, name.removeprefix("speculative_"))) == value


@pytest.mark.parametrize(("flag", "values"), REFUSED.items())
def test_unsupported_options_are_refused_with_the_reason(flag: str, values: tuple[str | None, str]) -> None:
    harmless, impossible = (value if value is None else _argument(flag, value) for value in values)
    if harmless is not None:
        assert configured(harmless) == AppConfig()
    # The reason, or where some of SGLang's values are supported, these.
    with pytest.raises(ValueError, match=r"is not supported: .{20}|Input should be '(auto', 'torch'|prefill' or ')"):
        configured(str(impossible))


def _argument(flag: str, value: str) -> str:
    """The flag with its value; the name alone for a switch."""
    switch = {"true": flag, "false": flag.replace("--", "--no-", 1)}
    return switch.get(value, f"{flag} {value}")


def test_the_draft_model_can_have_another_attention_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, toy: Any
) -> None:
    from specray import spec_decode

    seen = []
    method = spec_decode.DRAFTERS["EAGLE3"]

    def make(config: SpeculativeConfig, target: Any) -> Any:
        seen.append(target.attention_backend)
        return method.make(config, target)

    monkeypatch.setitem(spec_decode.DRAFTERS, "EAGLE3", method._replace(make=make))
    from tests.support.engine import make_llm

    for backend in (None, "torch"):
        options = METHODS["EAGLE3"](toy, tmp_path).model_dump() | {"draft_attention_backend": backend}
        make_llm(toy, speculative=SpeculativeConfig(**options)).close()
    assert seen == [EngineConfig().attention_backend, "torch"]
