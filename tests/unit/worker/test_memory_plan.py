"""Memory is divided before the pool is allocated: what the drafter, steps and graphs take is not given to it."""

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specray.config import EngineConfig, SpeculativeConfig
from specray.layers.parallel import RankGroup, SilentRank
from specray.models.registry import expands, load_config, shape_of
from specray.models.transformers_skeleton import build_skeleton
from specray.models.transformers_states import state_layers, states_of_pass
from specray.models.weights import WeightReader
from specray.ops.states import StatePass, StateRows
from specray.worker import memory_plan
from specray.worker.buckets import MAX_TOKENS, Bucket, buckets, node_buckets, row_buckets
from specray.worker.memory_plan import (
    _STATE_INPUTS,
    CONTEXT_BYTES,
    NCCL_BYTES,
    Demand,
    count_stored_states,
    demand_of,
    pool_bytes,
)
from specray.worker.remote_drafter.handshake import DraftPlacement
from tests.support.decoders import SERVED, decoder_config, write_decoder
from tests.support.gpt_oss import write_gpt_oss
from tests.support.heads import write_random_head
from tests.support.mtp import write_deepseek, write_mimo_layers
from tests.support.published_mtp import FAMILIES, write_published
from tests.support.quantised import METHODS, quantise_model
from tests.support.toy import write_toy

GIB = 1 << 30
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SIZES = st.integers(0, 200 * GIB)


@given(SIZES, SIZES, st.floats(0.01, 0.99), st.builds(Demand, st.just(1), SIZES, SIZES, SIZES))
def test_everything_fits_beside_the_pool(total: int, used: int, fraction: float, demand: Demand) -> None:
    pool = pool_bytes(total, used, fraction, demand)
    used += demand.weights + demand.states
    assert used + pool <= total * fraction
    assert used + demand.dynamic + pool <= total


def test_the_pool_of_an_80_gib_gpu() -> None:
    """16 GiB of weights; a small demand is within the share that is not static, a large one is not."""
    total, used = 80 * GIB, 16 * GIB
    assert pool_bytes(total, used, 0.75, Demand(1)) == 44 * GIB
    assert pool_bytes(total, used, 0.75, Demand(1, weights=2 * GIB)) == 42 * GIB
    assert pool_bytes(total, used, 0.75, Demand(1, states=3 * GIB)) == 41 * GIB
    assert pool_bytes(total, used, 0.75, Demand(1, dynamic=20 * GIB)) == 44 * GIB
    assert pool_bytes(total, used, 0.75, Demand(1, dynamic=30 * GIB)) == 34 * GIB


def demand(toy: Path, device: torch.device = GPU, **options: object) -> Demand:
    placement = cast(DraftPlacement, options.pop("placement", "inline"))
    uses_cuda_ipc = bool(options.pop("uses_cuda_ipc", False))
    model_config, group = load_config(toy), cast(RankGroup, options.pop("group", RankGroup()))
    shape = shape_of(model_config, group)
    if not options.pop("has_states", True):
        shape = replace(shape, states=())
    config = EngineConfig(model=str(toy), **options)  # type: ignore[arg-type]
    return demand_of(config, model_config, shape, toy, torch.bfloat16, device, group, placement, uses_cuda_ipc)


def test_a_drafter_on_a_gpu_of_its_own_takes_nothing_of_the_targets(toy: Path, tmp_path: Path) -> None:
    head = write_random_head(tmp_path / "head", toy, 3)
    speculative = SpeculativeConfig(algorithm="EAGLE3", draft_model_path=str(head))
    beside, separate, inline = (
        demand(toy, speculative=speculative, placement=place) for place in ("colocated", "separate", "inline")
    )
    plain = demand(toy)
    assert (separate.weights, separate.token) == (plain.weights, plain.token)
    assert separate.dynamic < inline.dynamic < beside.dynamic  # inline it has graphs
    assert separate.weights < inline.weights == beside.weights
    assert demand(toy, CPU, speculative=speculative, placement="separate").weights == inline.weights


def test_ranks_on_gpus_count_the_buffers_of_their_sums(toy: Path) -> None:
    counted = demand(toy, group=SilentRank(2)).dynamic
    without = demand(toy, group=SilentRank(2), disable_custom_all_reduce=True).dynamic
    assert counted - without == 20 << 20


def test_graphs_and_activations_of_a_drafters_own_process_are_counted(toy: Path, tmp_path: Path) -> None:
    """Before the pool is sized, because the drafter captures its graphs after the target has taken its memory."""
    head = write_random_head(tmp_path / "head", toy, 3)
    one = SpeculativeConfig(
        algorithm="EAGLE3", draft_model_path=str(head), num_steps=3, eagle_topk=2, num_draft_tokens=6
    )
    members = [{"name": name, **one.model_dump(exclude_defaults=True)} for name in ("a", "b")]
    two = SpeculativeConfig.model_validate({"drafters": members})

    def beside(speculative: SpeculativeConfig, **options: object) -> int:
        places = ("colocated", "inline")
        colocated, inline = (demand(toy, speculative=speculative, placement=place, **options) for place in places)
        return colocated.dynamic - inline.dynamic

    ngrams = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)
    process = beside(ngrams)  # its context alone
    assert process == CONTEXT_BYTES
    without, few, many = (
        beside(one, **options) for options in ({"disable_cuda_graph": True}, {"cuda_graph_max_bs": 1}, {})
    )
    assert process < without < few < many
    for placement in ("colocated", "inline"):  # each of several drafters has graphs
        sizes = [demand(toy, speculative=each, placement=placement).dynamic for each in (one, two)]
        assert sizes[0] < sizes[1]
    in_memory = demand(toy, speculative=one, placement="colocated", uses_cuda_ipc=True).dynamic
    ring = 4 * (EngineConfig().max_prefill_tokens + EngineConfig().max_running_requests * 6) * 3 * 32 * 2
    trees = 4 * 2 * (1 + EngineConfig().max_running_requests) * (2 + 2 * 6) * 8
    assert in_memory - demand(toy, speculative=one, placement="colocated").dynamic == ring + trees


def test_kv_of_the_target_and_its_head_is_counted(toy: Path, tmp_path: Path) -> None:
    head = write_random_head(tmp_path / "head", toy, 3)
    speculative = SpeculativeConfig(algorithm="EAGLE3", draft_model_path=str(head))
    plain, drafted = (demand(toy, CPU, speculative=each) for each in (SpeculativeConfig(), speculative))
    assert plain == Demand(2 * 2 * 2 * 8 * 2)  # layers, K and V, KV heads, head dim, bytes
    assert drafted.token - plain.token == 1 * 2 * 1 * 16 * 2
    assert drafted.weights == 2 * sum(tensor.numel() for tensor in load_file(head / "model.safetensors").values())


@pytest.mark.parametrize("name", ["EAGLE3", "MTP"])
def test_each_rank_counts_its_part_of_an_inline_drafter(name: str, toy: Path, tmp_path: Path) -> None:
    """A KV head that there is once is on both ranks."""
    if name == "MTP":
        write_mimo_layers(tmp_path, toy)
    else:
        write_random_head(tmp_path / "head", toy, 3)
    folder, method = (tmp_path, {}) if name == "MTP" else (toy, {"draft_model_path": str(tmp_path / "head")})
    speculative = SpeculativeConfig(algorithm=name, **method)
    second = SilentRank(2)
    second.leads = False
    plain, drafted, whole = (
        demand(folder, CPU, speculative=each, group=group)
        for each, group in ((SpeculativeConfig(), second), (speculative, second), (speculative, RankGroup()))
    )
    assert drafted.weights == whole.weights // 2 > 0
    assert drafted.token - plain.token == 2 * 2 * (16 if name == "EAGLE3" else 8)  # K and V, bytes
    assert demand(folder, CPU, speculative=speculative, group=second, placement="colocated") == drafted
    if name == "EAGLE3":  # four ranks cannot share its two heads
        assert demand(folder, CPU, speculative=speculative, group=SilentRank(4)).weights == whole.weights


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "mimo_v2_flash", "ernie4_5_moe", "step3p7"])
def test_layers_of_the_targets_own_checkpoint_are_counted_like_its_others(name: str, tmp_path: Path) -> None:
    """Not by config.json, which need not say how many there are."""
    write_published(name, tmp_path)
    shape, count = shape_of(load_config(tmp_path), RankGroup()), FAMILIES[name].num_layers
    plain, seen = (demand(tmp_path, CPU, speculative=SpeculativeConfig(algorithm=each)) for each in (None, "MTP"))
    outputs = count * shape.hidden_size if count > 1 else 0  # which several layers keep
    assert seen.token - plain.token == 2 * (count * 2 * shape.num_local_kv_heads * shape.head_dim + outputs)
    weights = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    own = 0 if FAMILIES[name].output is None else shape.vocab_size * shape.hidden_size  # output matrix of each
    assert seen.weights == count * (2 * (weights - count * own) // (shape.num_layers + count) + 2 * own)


def test_a_quantised_draft_model_is_counted_as_it_is_held(toy: Path, tmp_path: Path) -> None:
    draft = write_gpt_oss(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = sum(part.nbytes for name, part in stored.items() if name.endswith(("_blocks", "_scales")))
    plain = 2 * sum(part.numel() for name, part in stored.items() if not name.endswith(("_blocks", "_scales")))
    for quantization, expected in (
        (None, plain + experts),
        ("unquant", plain + experts),
        ("int8", 2 * sum(parameter.numel() for parameter in draft.parameters())),
    ):
        speculative = SpeculativeConfig(
            algorithm="STANDALONE", draft_model_path=str(tmp_path), draft_model_quantization=quantization
        )
        assert demand(toy, CPU, speculative=speculative).weights == pytest.approx(expected, rel=0.02), quantization


def test_matrices_that_are_expanded_are_counted_so(tmp_path: Path) -> None:
    """GPTQ's with desc_act, whose groups are not of neighbours, and DeepSeek's of each head."""
    sizes = []
    for write, name in ((write_deepseek, "fp8 of a tensor"), (write_toy, "gptq by activation")):
        plain = tmp_path / write.__name__
        plain.mkdir()
        write(plain)
        folder = quantise_model(plain, tmp_path / name, METHODS[name])
        with WeightReader(folder) as reader:
            ways = (
                expands(load_config(folder), None),
                lambda name: "kv_b_proj" in name,
                lambda _: True,
                lambda _: False,
            )
            sizes.append([reader.num_bytes(2, way) for way in ways])
    (fp8, but_kv_b, everything, nothing), (desc_act, *others) = sizes
    assert nothing < fp8 == but_kv_b < everything
    assert [desc_act] * 3 == others


def test_mtp_layers_of_a_quantised_checkpoint_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    quantised = quantise_model(tmp_path, tmp_path / "quantised", METHODS["fp8 of a tensor"])
    speculative = SpeculativeConfig(algorithm="MTP")
    plain, kept, rounded = (
        demand(folder, CPU, speculative=speculative, **options).weights
        for folder, options in ((tmp_path, {}), (quantised, {}), (quantised, {"quantization": "int8"}))
    )
    assert plain == rounded
    assert 0.4 * plain < kept < 0.8 * plain, "most weights take one byte instead of two"


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_kv_take_no_memory_for_it(name: str, tmp_path: Path) -> None:
    write_decoder(name, tmp_path)
    seen = demand(tmp_path)
    widest = 16 if name == "gemma4" else 8
    assert seen.token == 3 * 2 * 2 * widest * 2  # layers with KV, K and V, KV heads, head dim, bytes
    assert seen.dynamic > 0


@pytest.mark.parametrize("wrong", [None, "many", [1], {}, -3, 2.5])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"])
def test_a_draft_models_config_may_say_anything(toy: Path, tmp_path: Path, name: str, wrong: object) -> None:
    """Found by fuzzing config.json. Loading the draft model refuses it later."""
    head = write_random_head(tmp_path / "head", toy, 3)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {name: wrong}))
    speculative = SpeculativeConfig(algorithm="EAGLE3", draft_model_path=str(head))
    assert demand(toy, CPU, speculative=speculative).token >= demand(toy, CPU).token


def test_methods_without_a_model_and_ranks_without_a_drafter_need_no_draft_memory(toy: Path) -> None:
    assert demand(toy, speculative=SpeculativeConfig(algorithm="NGRAM")).weights == 0
    assert demand(toy, speculative=SpeculativeConfig(algorithm="NGRAM")).token == demand(toy).token


def test_steps_graphs_and_processes_are_counted_on_a_gpu(toy: Path) -> None:
    plain = demand(toy)
    assert 0 < demand(toy, disable_cuda_graph=True).dynamic < plain.dynamic
    assert demand(toy, max_running_requests=200).dynamic > plain.dynamic
    assert demand(toy, max_prefill_tokens=8192).dynamic > plain.dynamic
    assert demand(toy, cuda_graph_max_bs=1).dynamic < plain.dynamic
    assert demand(toy, placement="colocated").dynamic > plain.dynamic
    assert demand(toy, group=SilentRank(2)).dynamic > plain.dynamic + NCCL_BYTES // 2  # a rank's layers are narrower
    assert demand(toy, CPU).dynamic == 0


@pytest.mark.parametrize("name", SERVED)
def test_a_layer_is_as_wide_as_its_matrices(name: str, tmp_path: Path) -> None:
    """Also where the configuration has no `intermediate_size`, which the small ones are given."""
    config = decoder_config(name, intermediate_size=...)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(tmp_path)
    fewer, more = (demand(tmp_path, disable_cuda_graph=True, max_prefill_tokens=count) for count in (2048, 2049))
    matrices = [
        tensor
        for key, tensor in build_skeleton(config, torch.float32).named_parameters()
        if re.search(r"\.\d+\.", key) and tensor.dim() > 1
    ]
    assert (more.dynamic - fewer.dynamic) // 2 >= max(max(tensor.shape[-2:]) for tensor in matrices)


def test_what_layers_with_states_keep_of_drafts_is_counted_on_a_gpu(tmp_path: Path) -> None:
    write_published("qwen3_5", tmp_path)
    channels, values, rows = 2 * 2 * 8 + 4 * 12, 4 * 12, EngineConfig().max_running_requests
    inputs = 2 * channels + 2 * 4 + values  # of the convolution and the delta net
    shape = shape_of(load_config(tmp_path), RankGroup())
    layers = sum(kind == "linear_attention" for kind in load_config(tmp_path).layer_types)
    for num_drafts in (0, 5):
        options = {"algorithm": "NGRAM", "num_draft_tokens": num_drafts + 1} if num_drafts else {}
        speculative = SpeculativeConfig.model_validate(options)
        kept = memory_plan._draft_inputs(EngineConfig(speculative=speculative), shape, torch.bfloat16)
        assert kept == rows * (num_drafts + 1) * layers * inputs * 2
        plain, seen = (demand(tmp_path, speculative=speculative, has_states=has) for has in (False, True))
        assert seen.dynamic > plain.dynamic + kept, "their layers are wider than the others"


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "lfm2"])
def test_a_layer_with_states_holds_no_more_than_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of a GPU, by what torch allocates and frees."""
    monkeypatch.setenv("SPECRAY_KERNELS", "triton")
    model = build_skeleton(decoder_config(name), torch.float32)
    layer = state_layers(model)[0].to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer.pack()
    shapes, num_tokens, hidden_size = [operation.shape for operation in layer.operations], 64, model.config.hidden_size
    pools = [torch.zeros(1, *shape.shape) for shape in shapes]
    states = StatePass(pools, StateRows.of([0], [num_tokens], [num_tokens], [True]))
    x = torch.randn(1, num_tokens, hidden_size)
    token = states_of_pass.set(states)
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
        layer(x)
    states_of_pass.reset(token)
    events = profile.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    planned = 4 * hidden_size + _STATE_INPUTS * max(shape.num_inputs for shape in shapes)
    assert planned / 3 < peak / num_tokens / 4 <= planned


def test_stored_states_take_a_bounded_part_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_published("qwen3_5", tmp_path)
    shape, states = shape_of(load_config(tmp_path), RankGroup()), Demand(1, states=GIB)

    def count(memory: int, **options: Any) -> int:
        monkeypatch.setattr(memory_plan, "device_memory", lambda _: (memory, 0))
        config = EngineConfig(mem_fraction_static=0.5, **options)
        return count_stored_states(config, shape, states, CPU)

    assert count(100 * GIB) == 2 * EngineConfig().max_running_requests
    assert count(2 * (GIB + 40 * shape.state_bytes)) == 10, "a quarter of what running requests' states leave"
    assert count(GIB) == 0
    assert count(GIB, max_total_tokens=40 * shape.state_bytes) == 10, "a quarter of a pool of one byte a token"
    assert count(GIB, max_mamba_cache_size=50) == 2
    assert count(100 * GIB, disable_radix_cache=True) == 0


@given(st.integers(1, 300), st.integers(1, 128))
def test_buckets_are_few_and_cover_small_steps(rows: int, nodes: int) -> None:
    for sizes, most in ((row_buckets(rows), rows), (node_buckets(nodes), nodes)):
        assert sizes == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, most)
    assert all(after <= max(2 * before, before + 8) for before, after in pairwise(row_buckets(rows)))
    assert len(node_buckets(nodes)) <= 5
    every = buckets(rows, nodes)
    assert Bucket(1, nodes, nodes) in every
    assert max(bucket.tokens for bucket in every) <= MAX_TOKENS
