"""Placement of ranks: strategy, resources, and invalid options."""

import pytest

from cluster.cli.plan import plan_text
from cluster.config import AppConfig
from cluster.engine.placement import bundles, draft_bundles, draft_resources, rank_resources, strategy

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
        (SPLIT | {"draft": {"placement": "separate"}}, "on the same node.*set draft.placement: colocated"),
    ],
)
def test_invalid_placement_options_are_refused(options: dict[str, object], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        AppConfig.model_validate(options)
