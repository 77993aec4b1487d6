"""Every file in configs/ is valid, listens on loopback and refuses unknown options."""

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen3Config

from cluster.cli.check import check_file
from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.files import embedded_heads, resolve_draft, resolve_token_map
from specray.models.heads.block_files import BlockConfig
from specray.models.heads.eagle_files import HeadConfig
from specray.models.heads.mtp import check_mtp_files
from specray.models.llama_shape import LlamaShape
from specray.models.registry import MODELS
from specray.spec_decode.fr_spec import load_token_map
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import block_shape, configured_shape

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
NEEDS_TRAINING = ("standalone", "parallel")  # need `make draft` or `make parallel` first
# Need nothing but packages.
EMBEDDED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in NEEDS_TRAINING)

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
)
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


def test_every_method_has_a_config_for_the_embedded_model() -> None:
    names = {path.stem for path in EMBEDDED}
    assert {"plain", "ngram", "eagle3", "eagle2", "eagle2-frspec", "eagle3-ngram", "mtp", "several-drafters"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_valid(path: Path) -> None:
    assert check_file(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_listens_on_loopback(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_with_a_typo_is_refused(path: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["args"]["modle"] = "x"
    broken = tmp_path / path.name
    broken.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"modle.*did you mean model"):
        check_file(broken)


@pytest.mark.parametrize(
    "name", ["ngram", "eagle3", "eagle2", "eagle2-frspec", "eagle3-ngram", "several-drafters", *NEEDS_TRAINING]
)
def test_embedded_configs_differ_only_in_speculation(name: str) -> None:
    plain, drafted = (engine_of(ROOT / "configs" / f"{stem}.yaml") for stem in ("plain", name))
    assert drafted.speculative.has_drafter
    assert plain == drafted.model_copy(update={"speculative": plain.speculative})


def test_fr_spec_differs_from_eagle2_only_in_its_token_map() -> None:
    full, mapped = (engine_of(ROOT / "configs" / f"{name}.yaml").speculative for name in ("eagle2", "eagle2-frspec"))
    assert mapped.token_map is not None
    assert full == mapped.model_copy(update={"token_map": None})


def test_eagle3_ngram_differs_from_eagle3_only_in_merging() -> None:
    alone, combined = (engine_of(ROOT / "configs" / f"{name}.yaml").speculative for name in ("eagle3", "eagle3-ngram"))
    assert combined.merged_draft_tokens is not None
    sizes = {"merged_draft_tokens": None, "max_step_draft_tokens": 8, "num_draft_tokens": 8}
    assert alone == combined.model_copy(update=sizes)


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda path: path.name)
def test_files_of_embedded_configs_are_in_the_package(path: Path) -> None:
    for drafter in engine_of(path).speculative.members.values():
        if drafter.draft_model_path is not None:
            assert drafter.draft_model_path in embedded_heads()
            head = resolve_draft(drafter, progress=False)
            if drafter.algorithm == "MTP":
                check_mtp_files(head, "auto", shape_of(SMOLLM2))
            else:
                HeadConfig.read(head).check_target(path, shape_of(SMOLLM2))
        if drafter.token_map is not None:
            ids = load_token_map(resolve_token_map(drafter.token_map), 49152, [2])
            assert len(ids) == 8192


def test_several_drafters_are_those_of_the_other_configs() -> None:
    eagle3, ngram, both = (
        engine_of(ROOT / "configs" / f"{name}.yaml").speculative for name in ("eagle3", "ngram", "several-drafters")
    )
    members = {"eagle3": eagle3, "ngram": ngram}
    limited = {name: each.model_copy(update={"max_step_draft_tokens": 16}) for name, each in members.items()}
    assert both.members == limited


def test_the_llama_config_fits_its_target(tmp_path: Path) -> None:
    """With the real sizes but without weights."""
    speculative = engine_of(ROOT / "configs/llama-3.1-8b/eagle3.yaml").speculative
    target = LlamaConfig(**LLAMA_8B, num_hidden_layers=32)
    head = {**LLAMA_8B, "num_hidden_layers": 1, "draft_vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(head))
    config = HeadConfig.read(tmp_path)
    config.check_target(tmp_path, shape_of(target))
    assert config.aux_hidden_state_layers(tmp_path, 32) == (2, 16, 29)
    assert configured_shape(speculative, "LlamaForCausalLM") == TreeShape(num_steps=7, topk=1, num_draft_tokens=8)


def test_the_mimo_config_fits_its_target() -> None:
    """The layer is in the target's checkpoint, so only the tree is checked."""
    speculative = engine_of(ROOT / "configs/mimo-7b/mtp.yaml").speculative
    assert speculative.draft_model_path is None
    assert configured_shape(speculative, "MiMoForCausalLM") == TreeShape(num_steps=1, topk=1, num_draft_tokens=2)


def test_the_qwen_config_fits_its_target(tmp_path: Path) -> None:
    """With the sizes of both, but without weights."""
    path = ROOT / "configs/qwen3-32b-tp4/eagle3.yaml"
    engine = engine_of(path)
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    target = Qwen3Config(**sizes, num_hidden_layers=64, architectures=["Qwen3ForCausalLM"])
    head = {**sizes, "num_hidden_layers": 1, "draft_vocab_size": 32000, "architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(head))
    config = HeadConfig.read(tmp_path)
    config.check_target(tmp_path, shape_of(target))
    assert config.aux_hidden_state_layers(tmp_path, 64) == (2, 32, 61)
    shape = LlamaShape.of(target, rank(0, engine.tp_size))
    assert (shape.num_local_heads, shape.num_local_kv_heads) == (16, 2)
    bytes_per_token = shape.num_layers * 2 * shape.num_local_kv_heads * shape.head_dim * 2
    assert f"{bytes_per_token // 1024} KB per token" in path.read_text()
    assert engine.context_length is not None
    assert engine.context_length <= sizes["max_position_embeddings"]
    assert configured_shape(engine.speculative, "Qwen3ForCausalLM") == TreeShape(7, 1, 8)


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("dflash", {"block_size": 16, "dflash_config": {"mask_token_id": 151669}}, 15),
        ("dspark", {"block_size": 7, "mask_token_id": 151669, "num_anchors": 512, "markov_rank": 256}, 7),
    ],
)
def test_the_configs_of_blocks_fit_their_target(
    name: str, settings: dict[str, object], most: int, tmp_path: Path
) -> None:
    """With the sizes of both, but without weights."""
    path = ROOT / f"configs/qwen3-8b/{name}.yaml"
    sizes = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128}
    target = shape_of(Qwen3Config(**sizes, num_hidden_layers=36, architectures=["Qwen3ForCausalLM"]))
    head = BlockConfig.of({**sizes, "num_hidden_layers": 5, **settings}, tmp_path)
    head.check_target(tmp_path, target)
    assert head.aux_hidden_state_layers(tmp_path, 36) == (2, 10, 18, 26, 34)
    assert head.num_predicted == most
    assert block_shape(engine_of(path).speculative, most).num_draft_tokens == 24
    per_layer = 2 * target.num_local_kv_heads * target.head_dim * 2 // 1024
    assert f"{36 * per_layer} KB per token and {5 * per_layer} KB for the head" in path.read_text()


def test_the_deepseek_v3_config_fits_its_target() -> None:
    path = ROOT / "configs/deepseek-v3/mtp.yaml"
    engine = engine_of(path)
    target = DeepseekV3Config()  # its defaults are DeepSeek-V3's sizes
    shape = MODELS["DeepseekV3ForCausalLM"].shape_of(target, rank(0, engine.tp_size))
    assert shape.num_local_heads * engine.tp_size == target.num_attention_heads == 128
    bytes_per_token = shape.num_layers * 2 * shape.num_local_kv_heads * shape.head_dim * 2
    assert f"{bytes_per_token / 1024:.0f} KB per token" in path.read_text()
    expert = 3 * target.hidden_size * target.moe_intermediate_size
    experts = (target.num_hidden_layers - target.first_k_dense_replace) * target.n_routed_experts * expert
    scales = 4 / 128  # bytes of a weight
    assert 84e9 < experts * (1 + scales) / engine.tp_size < 88e9, "the experts alone, in fp8"
    assert engine.speculative.draft_model_path is None
    assert configured_shape(engine.speculative, "DeepseekV3ForCausalLM") == TreeShape(2, 1, 3)


def test_the_cuda_image_installs_exactly_what_the_configs_for_gpus_need() -> None:
    """Triton's kernels come with torch; another attention backend is an extra of the same name."""
    engines = [engine_of(path) for path in (*CONFIGS, ROOT / "deploy/docker/serve-cuda.yaml")]
    names = {engine.attention_backend for engine in engines if engine.device == "cuda"}
    names |= {engine.speculative.draft_attention_backend or "auto" for engine in engines if engine.device == "cuda"}
    needed = names - {"auto", "triton", "torch"}
    dockerfile = (ROOT / "deploy/docker/Dockerfile.cuda").read_text()
    [installed] = re.findall(
        r"^RUN pip install --no-deps --no-build-isolation '?\.(?:\[([\w,-]+)\])?'?(?: &&.*)?$", dockerfile, re.M
    )
    assert set(filter(None, installed.split(","))) == needed
    assert re.search(r"^RUN apt-get .* gcc ", dockerfile, re.M | re.S), "Triton starts kernels by compiled C code"


def test_the_deepseek_config_states_the_size_of_its_kv_cache() -> None:
    """The latent twice, in 27 layers of bfloat16."""
    target = DeepseekV2Config(
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    shape = MODELS["DeepseekV2ForCausalLM"].shape_of(target, RankGroup())
    bytes_per_token = shape.num_layers * 2 * shape.num_local_kv_heads * shape.head_dim * 2
    path = ROOT / "configs/deepseek-v2-lite/ngram.yaml"
    assert f"{bytes_per_token / 1024:.0f} KB per token" in path.read_text()
    assert engine_of(path).speculative.algorithm == "NGRAM"


def engine_of(path: Path) -> EngineConfig:
    return next(iter(check_file(path).values())).engine


def rank(place: int, size: int) -> RankGroup:
    """A rank that talks to nobody."""
    group = RankGroup()
    group.rank, group.size = place, size
    return group


def shape_of(config: PretrainedConfig) -> LlamaShape:
    return LlamaShape.of(config, RankGroup())
