"""Drafters named by their import path."""

from pathlib import Path

import pytest

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.sampling_params import SamplingParams
from specray.spec_decode import check_speculative
from tests.support.colocated import Colocated
from tests.support.engine import make_llm

MODULE = '''
from specray.spec_decode.draft_tree import DraftTree


class Base:
    def __init__(self, config, target):
        self.max_draft_tokens = (config.num_draft_tokens or 3) - 1

    aux_hidden_state_layers = ()
    reads_next_token = False

    def propose(self, context):
        return DraftTree.roots(context.roots())

    def release(self, slots):
        pass


class Repeat(Base):
    """Drafts the last token again."""

    def propose(self, context):
        return DraftTree.chains(context.roots()[:, None].expand(-1, self.max_draft_tokens + 1))


class NoMethods:
    pass


class NoAttributes(Base):
    def __init__(self, config, target):
        pass


class NoDrafts(Base):
    def __init__(self, config, target):
        self.max_draft_tokens = 0


class Layers(Base):
    aux_hidden_state_layers = (0, 3)


class Flag(Base):
    reads_next_token = 1


number = 3
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_drafters.py").write_text(MODULE)
    (tmp_path / "broken_drafters.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_custom_drafter_is_made_with_the_configuration(toy: Path) -> None:
    speculative = SpeculativeConfig(algorithm="own_drafters:Repeat", num_draft_tokens=5)
    with make_llm(toy, speculative=speculative) as llm:
        assert llm.engine.capacity.max_draft_tokens == 4
        [choice] = llm.generate([[0, 5]], SamplingParams(max_tokens=8, ignore_eos=True))[0].choices
    assert choice.usage is not None
    assert choice.usage.num_draft_tokens > 4


def test_a_custom_drafter_runs_in_a_colocated_process(toy: Path, tmp_path: Path) -> None:
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    with make_llm(toy) as llm:
        expected = llm.generate([[0, 5]], params)[0].choices[0].token_ids
    with make_llm(toy, speculative={"algorithm": "own_drafters:Repeat"}) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        [choice] = llm.generate([[0, 5]], params)[0].choices
        colocated.close()
    assert choice.token_ids == expected
    assert choice.usage is not None
    assert choice.usage.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("own_drafters:", ["not an import path", "package.module:Class"]),
        ("own_drafters:Base.x", ["not an import path"]),
        (":Base", ["not an import path"]),
        ("no_such.module:Base", ["ModuleNotFoundError", "PYTHONPATH"]),
        ("broken_drafters:Base", ["ZeroDivisionError", "division by zero"]),
        ("own_drafters:Bse", ["does not exist", "own_drafters.py has no Bse", "correct the name"]),
        ("own_drafters:number", ["is of type int"]),
        ("own_drafters:NoMethods", ["lacks propose, release"]),
    ],
)
def test_a_path_without_a_drafter_is_refused(path: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_speculative(SpeculativeConfig(algorithm=path))
    assert all(part in str(caught.value) for part in [repr(path), *parts])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("NoAttributes", ["lacks max_draft_tokens"]),
        ("NoDrafts", ["max_draft_tokens=0", "from 1 to 127"]),
        ("Layers", ["aux_hidden_state_layers=(0, 3)", "from -1 to 2"]),
        ("Flag", ["reads_next_token=1"]),
    ],
)
def test_a_drafter_with_invalid_attributes_is_refused(name: str, parts: list[str], toy: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(toy, speculative={"algorithm": f"own_drafters:{name}"})
    assert all(part in str(caught.value) for part in parts)


def test_a_running_server_imports_no_code() -> None:
    own = SpeculativeConfig(algorithm="own_drafters:Repeat")
    ngram = SpeculativeConfig(algorithm="NGRAM")
    own.check_successor(ngram)
    own.check_successor(SpeculativeConfig(algorithm="own_drafters:Repeat", num_draft_tokens=4))
    for started_with in (ngram, SpeculativeConfig(), SpeculativeConfig(algorithm="own_drafters:Base")):
        with pytest.raises(ConfigError, match=r"own_drafters:Repeat.*imports no code"):
            started_with.check_successor(own)
