"""Checks the files of a target and its drafter against each other, before any weight is loaded.

Only configurations, tokenizers and the headers of weight files are read. Loading checks the same and more; it takes a
process per rank and, for a large model, minutes.
"""

from specray.config import EngineConfig
from specray.layers.parallel import RankGroup
from specray.models.files import target_folder
from specray.models.registry import check_ranks, context_length, load_config, shape_of
from specray.models.tokenizer import eos_token_ids, load_tokenizer, sampling_defaults
from specray.models.weights import WeightReader
from specray.ops.inductor import check_inductor_if_used
from specray.spec_decode import method_of
from specray.spec_decode.corpus import open_corpora
from specray.spec_decode.drafter import TargetFiles
from specray.spec_decode.fr_spec import configured_token_map


def check_model_files(
    config: EngineConfig,
    *,
    progress: bool = False,
    uses_sampling_defaults: bool = False,
    has_draft_process: bool = False,
) -> None:
    """ConfigError if the target's files cannot be used as configured, or a drafter's do not fit the target.

    With `uses_sampling_defaults` also if its generation_config.json has options that no request could have, with
    `has_draft_process` if the drafter cannot run in a process of its own.

    Fetches or converts the models where necessary.
    """
    if config.enable_torch_compile:
        check_inductor_if_used(config.device)
    target = _read_target(config, progress, has_draft_process)
    if uses_sampling_defaults:
        sampling_defaults(target.folder)
    for member in config.speculative.members.values():
        assert member.algorithm is not None
        method_of(member.algorithm).check_files(member, target)
        configured_token_map(member, target)
        open_corpora(member, target.folder)


def _read_target(config: EngineConfig, progress: bool, has_draft_process: bool) -> TargetFiles:
    folder = target_folder(config, progress=progress)
    model_config = load_config(folder, config.model_impl)
    shape = shape_of(model_config, RankGroup())
    check_ranks(model_config, config.tp_size)
    context_length(model_config, config.context_length)
    eos_ids = eos_token_ids(folder, load_tokenizer(folder))
    WeightReader(folder, config.load_format).close()
    return TargetFiles(folder, config.load_format, shape, eos_ids, config.tp_size, has_draft_process)
