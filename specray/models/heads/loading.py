"""Loading an EAGLE head: the checkpoint's layout decides which network it is."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.files import resolve_draft
from specray.models.heads.eagle2 import Eagle2Head
from specray.models.heads.eagle3 import Eagle3Head
from specray.models.heads.eagle_files import HeadConfig, TensorNames, check_rest, head_shape
from specray.models.heads.served import EagleHead
from specray.models.llama_shape import LlamaShape, ranks_of_layers
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import ModelShape
from specray.models.weights import WeightReader

logger = logging.getLogger(__name__)

Eagle3Layout = TypeVar("Eagle3Layout", bound=Eagle3Head)

ALGORITHMS: dict[Literal[2, 3], str] = {2: "EAGLE", 3: "EAGLE3"}


def load_eagle_head(
    speculative: SpeculativeConfig, shared: TargetMatrices, version: Literal[2, 3], token_map: Tensor | None = None
) -> EagleHead:
    """Load the head at `speculative.draft_model_path`, split over the ranks of `shared`.

    ConfigError if it does not fit the target.

    `token_map` int64 [n] restricts an EAGLE-2 head to these ids of the target (FR-Spec).
    """
    if version == 3:
        return load_eagle3_head(speculative, shared, Eagle3Head, token_map)
    with _opened(speculative, shared, version) as (config, shape, loader, names):
        return Eagle2Head(config, shape, loader, names, shared, token_map)


def load_eagle3_head(
    speculative: SpeculativeConfig, shared: TargetMatrices, kind: type[Eagle3Layout], token_map: Tensor | None = None
) -> Eagle3Layout:
    """Load a head of EAGLE-3's layout as `kind`. `token_map` is ignored."""
    with _opened(speculative, shared, 3) as (config, shape, loader, names):
        _check_mask(loader.folder, config, names, kind.has_mask)
        if token_map is not None or speculative.token_map is not None:
            logger.warning("speculative.token_map is ignored: an EAGLE-3 head has a vocabulary of its own")
        return kind(config, shape, loader, names, shared)


@contextlib.contextmanager
def _opened(
    speculative: SpeculativeConfig, shared: TargetMatrices, version: Literal[2, 3]
) -> Iterator[tuple[HeadConfig, LlamaShape, Loader, TensorNames]]:
    """The checkpoint's settings, sizes and tensors, all of which must be read when the context ends."""
    folder = resolve_draft(speculative, progress=False)
    config = HeadConfig.read(folder)
    config.check_target(folder, shared.shape)
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
        names = TensorNames.of(folder, loader.names())
        _check_version(folder, names, version, speculative)
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
    config = HeadConfig.read(folder)
    config.check_target(folder, target)
    with WeightReader(folder, speculative.draft_load_format) as reader:
        names = TensorNames.of(folder, reader.names())
    _check_version(folder, names, version, speculative)
    _check_mask(folder, config, names, has_mask)


def _check_version(folder: Path, names: TensorNames, version: Literal[2, 3], speculative: SpeculativeConfig) -> None:
    if names.kind != version:
        raise ConfigError(
            f"{folder} holds an EAGLE-{names.kind} head, but speculative.algorithm={speculative.algorithm} expects an "
            f"EAGLE-{version} one; set speculative.algorithm: {ALGORITHMS[names.kind]} or choose another head"
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
