"""Placement of ranks: strategy, resources, and invalid options."""

import pytest

from cluster.config import AppConfig
from cluster.engine.placement import bundles, strategy

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


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"tp_size": 1, "placement": {"across_nodes": True}}, "raise tp_size"),
        ({"placement": {"rank_resources": {"GPU": 1, "seat": 1}}}, r"names GPU.*custom resources"),
        ({"placement": {"rank_resources": {"seat": 0}}}, "greater than 0"),
    ],
)
def test_invalid_placement_options_are_refused(options: dict[str, object], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        AppConfig.model_validate(options)
