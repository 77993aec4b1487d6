"""Which of several desired drafters an engine takes."""

from types import SimpleNamespace
from typing import Any, cast

from cluster.engine.reconciler import DrafterReconciler
from specray.config import SpeculativeConfig
from specray.server.routing.messages import DesiredDrafter


def group(*names: str) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"drafters": [{"name": name, "algorithm": "NGRAM"} for name in names]})


def make_reconciler() -> DrafterReconciler:
    supervisor = SimpleNamespace(replace=lambda _: SimpleNamespace(max_draft_tokens=5), keep=lambda _: None)
    planner = SimpleNamespace(draft_with=lambda *_: None)
    return DrafterReconciler(group("a"), 5, cast(Any, supervisor), cast(Any, planner))


def test_the_one_set_last_wins() -> None:
    reconciler = make_reconciler()
    assert reconciler.apply(DesiredDrafter(20, group("b"))) is None
    assert reconciler.apply(DesiredDrafter(10, group("c"))) is None
    assert list(reconciler.desired.speculative.members) == ["b"]


def test_of_two_changes_of_the_same_drafters_the_second_is_refused() -> None:
    """Two ingresses were asked to add one each. The one that came last used to remove what the first had added."""
    reconciler = make_reconciler()
    first = DesiredDrafter(10, group("a", "x"), made_from=0)
    assert reconciler.apply(first) is None
    refusal = reconciler.apply(DesiredDrafter(11, group("a", "y"), made_from=0))
    assert refusal is not None
    assert refusal.status == 409
    assert list(reconciler.desired.speculative.members) == ["a", "x"]
    assert reconciler.apply(first) is None, "it is sent again to engines that may not have it"
    assert reconciler.apply(DesiredDrafter(12, group("a", "x", "y"), made_from=10)) is None


def test_an_engine_that_is_behind_takes_a_change_of_what_it_never_had() -> None:
    reconciler = make_reconciler()
    assert reconciler.apply(DesiredDrafter(12, group("a", "x", "y"), made_from=10)) is None
    assert list(reconciler.desired.speculative.members) == ["a", "x", "y"]
