"""Configurations of every drafting method for tests. A new method is covered by an entry in `METHODS`.

Names are those of DRAFTERS, with a suffix for further configurations of a method; SEVERAL has several drafters.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specray.config import SpeculativeConfig
from tests.support.block_toy import block_toy
from tests.support.heads import write_random_head
from tests.support.mtp import write_deepseek, write_mimo_layers
from tests.support.published_mtp import write_published
from tests.support.toy import write_toy

# (target's folder, an empty folder to write heads to) -> the method's configuration
Make = Callable[[Path, Path], SpeculativeConfig]


def eagle(
    version: int,
    shape: tuple[int, int, int] | None = None,
    draft_vocab_size: int | None = None,
    token_map: range | None = None,
    window: int | None = None,
    is_parallel: bool = False,
    layers: list[int] | None = None,
) -> Make:
    """EAGLE-`version` or PARALLEL, with a random head, which reads the outputs of these layers.

    `shape` is (num_steps, eagle_topk, num_draft_tokens), None automatic.
    """

    def make(target: Path, folder: Path) -> SpeculativeConfig:
        head = write_random_head(folder / "head", target, version, draft_vocab_size, 0, window, is_parallel)
        if layers is not None:
            config = json.loads((head / "config.json").read_text())
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
            (head / "config.json").write_text(json.dumps(config))
        steps, topk, nodes = shape or (None, None, None)
        path = folder / "map.json"
        if token_map:
            path.write_text(json.dumps(list(token_map)))
        return SpeculativeConfig(
            algorithm="PARALLEL" if is_parallel else "EAGLE3" if version == 3 else "EAGLE",
            draft_model_path=str(head),
            num_steps=steps,
            eagle_topk=topk,
            num_draft_tokens=nodes,
            token_map=str(path) if token_map else None,
        )

    return make


def block(layout: str, shape: tuple[int, int, int] | None = None, nodes: int | None = None) -> Make:
    """DFLASH or DSPARK, with a random head of a layout of `block_toy`; `shape` as above, or a chain of `nodes`."""

    def make(target: Path, folder: Path) -> SpeculativeConfig:
        toy = block_toy(layout, target)
        steps, topk, most = shape or (None, None, nodes)
        return SpeculativeConfig(
            algorithm=toy.algorithm,
            draft_model_path=str(toy.write(folder / "head")),
            num_steps=steps,
            eagle_topk=topk,
            num_draft_tokens=most,
        )

    return make


def standalone(
    shape: tuple[int, int, int] | None = None, token_map: range | None = None, variant: str = "llama"
) -> Make:
    """A draft model with the toy target's vocabulary and other weights; `shape` as above."""

    def make(target: Path, folder: Path) -> SpeculativeConfig:  # noqa: ARG001
        model, path = folder / "draft", folder / "map.json"
        model.mkdir(exist_ok=True)
        write_toy(model, variant, seed=1)
        if token_map:
            path.write_text(json.dumps(list(token_map)))
        steps, topk, nodes = shape or (None, None, None)
        return SpeculativeConfig(
            algorithm="STANDALONE",
            draft_model_path=str(model),
            num_steps=steps,
            eagle_topk=topk,
            num_draft_tokens=nodes,
            token_map=str(path) if token_map else None,
        )

    return make


def mtp(
    num_layers: int = 1,
    shape: tuple[int, int, int] | None = None,
    algorithm: str = "MTP",
    token_map: range | None = None,
) -> Make:
    """MiMo's MTP layers with random weights; `shape` as above."""

    def make(target: Path, folder: Path) -> SpeculativeConfig:
        layers, path = write_mimo_layers(folder / "layers", target, num_layers), folder / "map.json"
        if token_map:
            path.write_text(json.dumps(list(token_map)))
        steps, topk, nodes = shape or (None, None, None)
        return SpeculativeConfig(
            algorithm=algorithm,
            draft_model_path=str(layers),
            num_steps=steps,
            eagle_topk=topk,
            num_draft_tokens=nodes,
            token_map=str(path) if token_map else None,
        )

    return make


def mtp_of_deepseek(num_layers: int, shape: tuple[int, int, int]) -> Make:
    """DeepSeek's MTP layers (latent attention and experts), which draft for any target of their width."""
    return _mtp_layers(lambda folder: write_deepseek(folder, num_layers), shape)


def published_mtp(name: str, shape: tuple[int, int, int]) -> Make:
    """MTP layers of a family that transformers' modules compute, which draft for any target of their width."""
    return _mtp_layers(lambda folder: write_published(name, folder), shape)


def _mtp_layers(write: Callable[[Path], object], shape: tuple[int, int, int]) -> Make:
    def make(target: Path, folder: Path) -> SpeculativeConfig:  # noqa: ARG001
        write(folder / "layers")
        steps, topk, nodes = shape
        return SpeculativeConfig(
            algorithm="MTP",
            draft_model_path=str(folder / "layers"),
            num_steps=steps,
            eagle_topk=topk,
            num_draft_tokens=nodes,
        )

    return make


def ngram(**options: Any) -> Make:
    return lambda target, folder: SpeculativeConfig(algorithm="NGRAM", **options)  # noqa: ARG005


def changed(make: Make, **options: Any) -> Make:
    """The method of `make` with other options."""
    return lambda target, folder: make(target, folder).model_copy(update=options)


def several(**makes: Make) -> Make:
    """Several drafters side by side, by name."""

    def make(target: Path, folder: Path) -> SpeculativeConfig:
        drafters = []
        for name, make_one in makes.items():
            own = folder / name
            own.mkdir(exist_ok=True)
            drafters.append({"name": name, **make_one(target, own).model_dump(exclude_defaults=True)})
        return SpeculativeConfig.model_validate({"drafters": drafters})

    return make


METHODS: dict[str, Make] = {
    "EAGLE3": eagle(3, draft_vocab_size=40),
    "EAGLE3-chain": eagle(3, shape=(4, 1, 5)),
    "EAGLE3-repeated": eagle(3, layers=[1, 1, 0]),  # as by default in targets of up to six layers
    "EAGLE3-wide": eagle(3, shape=(2, 8, 30), draft_vocab_size=16),
    "EAGLE": eagle(2),
    "EAGLE-chain": eagle(2, shape=(3, 1, 4)),
    "EAGLE-deep": eagle(2, shape=(6, 2, 23)),
    "EAGLE-map": eagle(2, shape=(3, 3, 10), token_map=range(2, 60, 3)),
    "PARALLEL": eagle(3, shape=(4, 3, 9), draft_vocab_size=40, is_parallel=True),
    "PARALLEL-chain": eagle(3, shape=(4, 1, 5), is_parallel=True),
    "DFLASH": block("z-lab", shape=(4, 3, 9)),
    "DFLASH-chain": block("speculators-dflash", nodes=5),
    "DFLASH-sliding": block("z-lab-not-causal", shape=(3, 2, 7)),
    "DFLASH-jetspec": block("jetspec", shape=(5, 2, 8)),
    "DSPARK": block("deepspec-vanilla", shape=(4, 3, 9)),
    "DSPARK-chain": block("speculators-dspark"),
    "DSPARK-rnn": block("deepspec-rnn", shape=(5, 3, 12)),
    "STANDALONE": standalone(),
    "STANDALONE-tree": standalone(shape=(3, 3, 10), token_map=range(2, 60, 3), variant="qwen3"),
    "MTP": mtp(),
    "MTP-stack": mtp(3, shape=(3, 3, 9)),
    "MTP-deepseek": mtp_of_deepseek(1, shape=(3, 2, 6)),
    "MTP-mimo-v2": published_mtp("mimo_v2_flash", shape=(3, 2, 7)),
    "NEXTN": mtp(shape=(1, 1, 2), algorithm="NEXTN", token_map=range(2, 60, 3)),
    "NGRAM": ngram(),
    "NGRAM-short": ngram(num_draft_tokens=5, ngram_capacity=1000),
    "NGRAM-prob": ngram(ngram_match_type="PROB", ngram_max_trie_depth=9, ngram_max_spec_factor=None),
    "NGRAM-suffix": ngram(ngram_match_type="SUFFIX"),
    "EAGLE3-merged": changed(eagle(3, draft_vocab_size=40), merged_draft_tokens=12),
    "DSPARK-merged": changed(block("speculators-dspark"), merged_draft_tokens=9, ngram_capacity=1000),
    "SEVERAL": several(head=eagle(3, draft_vocab_size=40), lookup=ngram(), layers=mtp(3, shape=(3, 3, 9))),
}
# One for each way to draft, trees and chains among them, for tests in which other shapes of trees run no other code.
KINDS = [
    *("EAGLE3", "EAGLE-map", "PARALLEL", "DFLASH", "DSPARK-rnn", "STANDALONE-tree", "MTP-stack", "MTP-deepseek"),
    *("NEXTN", "NGRAM", "EAGLE3-merged", "SEVERAL"),
]
# For tests in which further methods add time but little coverage.
SOME_METHODS = ["EAGLE3", "EAGLE-map", "MTP-stack", "NGRAM"]
