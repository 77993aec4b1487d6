"""A model's folder with parts of it replaced: keys of config.json (`hf_overrides`), and the chat template.

All readers of the model then see the same files. Everything else in the folder is linked.
"""

import json
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from specray.caches import cache_root
from specray.errors import ConfigError, did_you_mean

TEMPLATE_FILE = "chat_template.jinja"  # takes precedence over tokenizer_config.json
MAX_TEMPLATE_BYTES = 2**20


def overridden_folder(folder: Path, hf_overrides: Mapping[str, Any], chat_template: str | None) -> Path:
    """The folder itself without overrides; else one in the cache, made on first use."""
    replaced: dict[str, str] = {}
    if hf_overrides:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _refuse_unknown(config, hf_overrides)
        replaced["config.json"] = json.dumps(_merged(config, hf_overrides), indent=2)
    if chat_template is not None:
        replaced[TEMPLATE_FILE] = _read_template(chat_template)
    if not replaced:
        return folder
    names = sorted(entry.name for entry in folder.iterdir())
    key = sha256(json.dumps([str(folder.resolve()), names, replaced]).encode()).hexdigest()
    target = cache_root() / "overrides" / key
    if not target.is_dir():
        _write(folder.resolve(), replaced, target)
    return target


def _refuse_unknown(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """ConfigError for a key that neither the model's config.json nor its class has: it would change nothing."""
    from transformers import AutoConfig  # takes a second

    try:
        known = {"rope_theta", "rope_scaling", *config, *AutoConfig.for_model(str(config.get("model_type"))).to_dict()}
    except ValueError:  # a type that only the checkpoint's own code knows
        return
    if unknown := [key for key in overrides if key not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"hf_overrides.{unknown[0]} is no key of a {config.get('model_type')} model{hint}")


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Older keys of rotary embeddings also replace their part of `rope_parameters`, which would win over them."""
    merged = dict(config) | dict(overrides)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        scaling = overrides.get("rope_scaling", rope) or {"rope_type": "default"}
        theta = overrides.get("rope_theta", rope.get("rope_theta"))
        merged["rope_parameters"] = dict(scaling) | ({} if theta is None else {"rope_theta": theta})
    return merged


def _read_template(name: str) -> str:
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template={name!r}: cannot be read: {reason}; name a file with a Jinja template"
        ) from None
    if not text.strip() or len(text) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"chat_template={name!r} has {len(text)} characters; name a file with a Jinja template of 1 to "
            f"{MAX_TEMPLATE_BYTES} characters"
        )
    return text


def _write(folder: Path, replaced: Mapping[str, str], target: Path) -> None:
    """Make the folder at once, for processes that make it at the same time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".linking-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            for entry in folder.iterdir():
                if entry.name not in replaced:
                    (made / entry.name).symlink_to(entry)
            for name, text in replaced.items():
                (made / name).write_text(text, encoding="utf-8")
            made.replace(target)
    except OSError as error:
        if not target.is_dir():  # no other process has made it either
            raise ConfigError(
                f"cannot write to {target.parent}: {error}; set SPECRAY_CACHE to another folder"
            ) from error
