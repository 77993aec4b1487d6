"""Placement of ranks: strategy, resources, and invalid options."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from cluster.cli.plan import plan_text
from cluster.config import AppConfig
from cluster.engine import node_resources
from cluster.engine.placement import (
    bundles,
    decide_device,
    draft_bundles,
    draft_resources,
    rank_resources,
    strategy,
    uses_gpus,
)
from cluster.liveness.actors import see_own_gpus
from specray.errors import ConfigError
from tests.support.fake_mps import UUIDS, FakeMps

SPLIT = {"tp_size": 2, "placement": {"across_nodes": True}}


def test_ranks_share_a_node_unless_across_nodes_is_set() -> None:
    assert strategy(AppConfig(tp_size=2)) == "STRICT_PACK"
    assert strategy(AppConfig.model_validate(SPLIT)) == "PACK"


def test_every_rank_reserves_the_custom_resources() -> None:
    config = AppConfig.model_validate(SPLIT | {"placement": {"across_nodes": True, "rank_resources": {"seat": 1}}})
    assert [bundle["seat"] for bundle in bundles(config, with_gpus=False)] == [1, 1]


def test_a_drafter_reserves_no_custom_resource() -> None:
    options = {"placement": {"rank_resources": {"seat": 1}}, "speculative": {"algorithm": "NGRAM"}}
    assert [bundle["seat"] for bundle in bundles(AppConfig.model_validate(options), with_gpus=True)] == [1]


def separate(**options: object) -> AppConfig:
    draft = {"placement": "separate", "cpus": 0.5}
    return AppConfig.model_validate({"tp_size": 2, "speculative": {"algorithm": "NGRAM"}, "draft": draft} | options)


def test_a_separate_drafter_has_a_bundle_behind_those_of_the_ranks() -> None:
    config = separate()
    ranks = bundles(separate(speculative={}), with_gpus=True)
    assert bundles(config, with_gpus=True) == [*ranks, {"CPU": 0.5, "GPU": 1.0}]
    assert bundles(config, with_gpus=False)[-1] == {"CPU": 0.5}
    assert draft_bundles(config) == [2]
    assert draft_bundles(separate(draft={"placement": "colocated"})) == [0]
    assert [rank_resources(config, True, rank)["GPU"] for rank in (0, 1)] == [1.0, 1.0]
    assert draft_resources(config, with_gpus=True) == {"CPU": 0.5, "GPU": 1.0}
    assert "bundle 2: NGRAM drafter: 0.5 CPU" in plan_text(config)
    assert strategy(config) == "STRICT_PACK"  # they share memory


def test_a_draft_model_is_split_over_actors_beside_the_ranks() -> None:
    head = {"algorithm": "EAGLE3", "draft_model_path": "head"}
    config = separate(speculative=head, draft={"cpus": 0.5, "gpu_share": 0.25})
    without = bundles(separate(speculative={}), with_gpus=True)
    with_drafts = bundles(config, with_gpus=True)
    assert draft_bundles(config) == [0, 1]
    added = [each["CPU"] - plain["CPU"] for each, plain in zip(with_drafts, without, strict=True)]
    assert added == pytest.approx([0.5, 0.5])
    assert [rank_resources(config, True, rank)["GPU"] for rank in (0, 1)] == [0.75, 0.75]
    assert "bundle 1: rank 1 + EAGLE3 drafter: " in plan_text(config)
    assert draft_bundles(separate(speculative=head)) == [2]
    assert draft_bundles(separate(draft={}, server={"admin_key_file": "/keys"})) == [0, 1]  # the next one may have one
    inline = separate(speculative=head, draft={"placement": "inline"})
    assert draft_bundles(inline) == []
    assert [each.draft_ranks(each.speculative) for each in (config, inline, separate(speculative=head))] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cuda"}, "inline"),
        ({"device": "cuda", "server": {"admin_key_file": "/keys"}}, "colocated"),
        ({"device": "cuda", "draft": {"cuda_ipc": True}}, "colocated"),
        ({"device": "cpu"}, "colocated"),
        ({"device": "cuda", "draft": {"placement": "separate"}}, "separate"),
    ],
)
def test_a_drafter_runs_in_its_rank_on_a_gpu_unless_it_may_be_replaced(
    options: dict[str, object], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = AppConfig.model_validate({"speculative": {"algorithm": "NGRAM"}} | options)
    with caplog.at_level("INFO"):
        decided = decide_device(config)
    assert decided.draft.placement == decided.draft_placement == expected  # what /server_info shows
    assert config.has_draft_actor == decided.has_draft_actor == (expected != "inline")
    assert bool(caplog.records) == (config.draft.placement == "auto")


def test_two_separate_drafters_share_their_gpu_while_one_replaces_the_other() -> None:
    config = separate(server={"admin_key_file": "/keys"})
    assert draft_resources(config, with_gpus=True) == {"CPU": 0.25, "GPU": 0.5}


def test_a_separate_drafter_is_not_placed_without_speculation() -> None:
    config = separate(speculative={})
    assert len(bundles(config, with_gpus=True)) == 2


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"tp_size": 1, "placement": {"across_nodes": True}}, "raise tp_size"),
        ({"placement": {"rank_resources": {"GPU": 1, "seat": 1}}}, r"names GPU.*custom resources"),
        ({"placement": {"rank_resources": {"seat": 0}}}, "greater than 0"),
        ({"draft": {"placement": "separate", "cuda_ipc": True}}, "set draft.placement: colocated, or cuda_ipc: false"),
        ({"draft": {"cuda_ipc": True, "mps": "off"}}, "set mps: auto, or cuda_ipc: false"),
        (
            {"tp_size": 2, "draft": {"cuda_ipc": True}, "placement": {"across_nodes": True}},
            "set cuda_ipc: false, or across_nodes: false",
        ),
        ({"draft": {"cuda_ipc": True}}, "no effect without a drafter"),
        (
            {"draft": {"cuda_ipc": True}, "speculative": {"algorithm": "NGRAM", "budget": "auto"}}
            | {"disable_cuda_graph": True},
            "set budget: static",
        ),
        (SPLIT | {"draft": {"placement": "separate"}}, "on the same node.*set draft.placement: colocated"),
    ],
)
def test_invalid_placement_options_are_refused(options: dict[str, object], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        AppConfig.model_validate(options)


@pytest.mark.parametrize(("num_gpus", "device"), [(None, "cpu"), (0.0, "cpu"), (2.0, "cuda")])
def test_the_device_is_decided_once_for_bundles_and_ranks(
    num_gpus: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: num_gpus is not None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0} | ({"GPU": num_gpus} if num_gpus else {}))
    decided = decide_device(AppConfig(tp_size=2))
    assert decided.device == decided.engine.device == device
    assert uses_gpus(decided) == (device == "cuda")
    monkeypatch.setattr(ray, "cluster_resources", dict)  # a node was lost meanwhile
    assert decide_device(decided) is decided
    assert decide_device(AppConfig(device="cuda")).device == "cuda"


def test_an_engine_without_a_gpu_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(node_resources, "may_grow", lambda _: False)
    with pytest.raises(ConfigError, match="needs 1 GPU on one node, and there are 0; set device: cpu"):
        node_resources.check_node_resources([AppConfig(device="cuda")])


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "with_mps"),
    [
        ([1], "1", UUIDS[1]),
        (["1", "0"], "1,0", f"{UUIDS[1]},{UUIDS[0]}"),
        (["GPU-1f", "GPU-2f"], "GPU-1f,GPU-2f", "GPU-1f,GPU-2f"),
        ([], "", ""),
    ],
)
def test_an_actor_sees_the_gpus_that_ray_gave_it(
    gpu_ids: list[object], visible: str, with_mps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray is told not to hide the others (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: gpu_ids)
    see_own_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")  # its daemon renumbers GPUs
    monkeypatch.setenv("PATH", str(tmp_path))
    see_own_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible  # nothing has their UUIDs
    fake = FakeMps(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    program = fake.folder / "nvidia-smi"
    works = program.read_text()
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, because'\necho '0, [N/A]'\nexit 9\n")
    see_own_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    program.write_text(works)
    see_own_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == with_mps
