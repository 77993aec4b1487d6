"""Loading a draft head: the checkpoint's layout decides which network it is."""

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft
from specray.models.heads.block import BlockHead
from specray.models.heads.block_files import BlockConfig
from specray.models.heads.eagle2 import Eagle2Head
from specray.models.heads.eagle3 import Eagle3Head
from specray.models.heads.eagle_files import HeadConfig, Kind, TensorNames, check_rest, head_shape
from specray.models.heads.served import EagleHead
from specray.models.llama_shape import LlamaShape, ranks_of_layers
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import ModelShape
from specray.models.weights import WeightReader

logger = logging.getLogger(__name__)

Eagle3Layout = TypeVar("Eagle3Layout", bound=Eagle3Head)
Settings = TypeVar("Settings", bound=HeadConfig)

ALGORITHMS: dict[Kind, str] = {2: "EAGLE", 3: "EAGLE3", "block": "DFLASH or DSPARK"}


def load_eagle_head(
    speculative: SpeculativeConfig, shared: TargetMatrices, version: Literal[2, 3], token_map: Tensor | None = None
) -> EagleHead:
    """Load the head at `speculative.draft_model_path`, split over the ranks of `shared`.

    ConfigError if it does not fit the target.

    `token_map` int64 [n] restricts an EAGLE-2 head to these ids of the target (FR-Spec).
    """
    if version == 3:
        return load_eagle3_head(speculative, shared, Eagle3Head, token_map)
    with _opened(speculative, shared, version, HeadConfig) as (config, shape, loader, names):
        return Eagle2Head(config, shape, loader, names, shared, token_map)


def load_eagle3_head(
    speculative: SpeculativeConfig, shared: TargetMatrices, kind: type[Eagle3Layout], token_map: Tensor | None = None
) -> Eagle3Layout:
    """Load a head of EAGLE-3's layout as `kind`. `token_map` is ignored."""
    with _opened(speculative, shared, 3, HeadConfig) as (config, shape, loader, names):
        _check_mask(loader.folder, config, names, kind.has_mask)
        if token_map is not None or speculative.token_map is not None:
            logger.warning("speculative.token_map is ignored: an EAGLE-3 head has a vocabulary of its own")
        return kind(config, shape, loader, names, shared)


def load_block_head(speculative: SpeculativeConfig, shared: TargetMatrices) -> BlockHead:
    """Load the head at `speculative.draft_model_path`, not sharded. ConfigError if it does not fit the target."""
    with _opened(speculative, shared, "block", BlockConfig) as (config, shape, loader, names):
        _check_markov(loader.folder, config, speculative)
        return BlockHead(config, shape, loader, names, shared)


@contextlib.contextmanager
def _opened(
    speculative: SpeculativeConfig, shared: TargetMatrices, kind: Kind, settings: type[Settings]
) -> Iterator[tuple[Settings, LlamaShape, Loader, TensorNames]]:
    """The checkpoint's settings, sizes and tensors, all of which must be read when the context ends."""
    folder = resolve_draft(speculative, progress=False)
    config, names = _checked(folder, _stored(folder, speculative), speculative, shared.shape, kind, settings)
    heads = config.num_attention_heads
    group = ranks_of_layers(heads, config.num_key_value_heads or heads, shared.group, folder)
    loader = Loader(
        folder,
        speculative.draft_load_format,
        shared.dtype,
        shared.device,
        quantization=shared.quantization,
        group=group,
    )
    try:
        shape = head_shape(config, folder, names, group)
        yield config, shape, loader, names
        check_rest(loader, names, shape)
    finally:
        loader.close()


def check_head_files(
    speculative: SpeculativeConfig, target: ModelShape, version: Literal[2, 3], has_mask: bool = False
) -> None:
    """ConfigError if `speculative.draft_model_path` is not a head of this version for the target. Reads no weights.

    `has_mask`: a P-EAGLE head, which has EAGLE-3's layout.
    """
    folder = resolve_draft(speculative, progress=False)
    config, names = _checked(folder, _stored(folder, speculative), speculative, target, version, HeadConfig)
    _check_mask(folder, config, names, has_mask)


def check_block_files(speculative: SpeculativeConfig, target: ModelShape) -> BlockConfig:
    """The settings of a head that drafts a block. ConfigError as above; reads no weights."""
    folder = resolve_draft(speculative, progress=False)
    config, _ = _checked(folder, _stored(folder, speculative), speculative, target, "block", BlockConfig)
    config.aux_hidden_state_layers(folder, target.num_layers)
    _check_markov(folder, config, speculative)
    return config


def _stored(folder: Path, speculative: SpeculativeConfig) -> Collection[str]:
    """The names of the tensors in `folder`."""
    with WeightReader(folder, speculative.draft_load_format) as reader:
        return reader.names()


def _checked(
    folder: Path,
    stored: Collection[str],
    speculative: SpeculativeConfig,
    target: ModelShape,
    kind: Kind,
    settings: type[Settings],
) -> tuple[Settings, TensorNames]:
    """The settings in `folder` and the names of its tensors. ConfigError if the head is not of this kind, or fits not.

    The kind is compared first: settings of another kind would be described wrongly.
    """
    names = TensorNames.of(folder, stored)
    if names.kind != kind:
        wanted = "a DFlash or DSpark" if kind == "block" else f"an EAGLE-{kind}"
        raise ConfigError(
            f"{folder} holds {names.named}, but speculative.algorithm={speculative.algorithm} expects {wanted} one; "
            f"set speculative.algorithm: {ALGORITHMS[names.kind]} or choose another head"
        )
    config = settings.read(folder)
    config.check_target(folder, target)
    return config, names


def _check_markov(folder: Path, config: BlockConfig, speculative: SpeculativeConfig) -> None:
    """ConfigError if the algorithm's name is not that of the head."""
    found = "DSPARK" if config.has_markov_rows or config.enable_confidence_head else "DFLASH"
    if speculative.algorithm != found:
        has = "Markov rows or a confidence" if found == "DSPARK" else "no Markov rows and no confidence"
        raise ConfigError(
            f"{folder / 'config.json'}: the head has {has} (markov_rank={config.markov_rank}), but "
            f"speculative.algorithm={speculative.algorithm}; set speculative.algorithm: {found}"
        )


def _check_mask(folder: Path, config: HeadConfig, names: TensorNames, wanted: bool) -> None:
    """ConfigError if a head has no mask although one is `wanted`, or the other way round."""
    if not wanted and names.has("mask_hidden"):
        raise ConfigError(
            f"{folder} holds a P-EAGLE head (a tensor mask_hidden); set speculative.algorithm: PARALLEL or choose "
            "another head"
        )
    token, size = config.ptd_token_id, config.vocab_size
    if wanted and (token is None or token >= size or not names.has("mask_hidden")):
        raise ConfigError(
            f"{folder} is not a P-EAGLE head: it needs a tensor mask_hidden and a ptd_token_id below {size} in "
            f"config.json (found {token}); choose another head, or set speculative.algorithm: EAGLE3"
        )
