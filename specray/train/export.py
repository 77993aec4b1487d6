"""Exports trained heads: model.safetensors and config.json in the layout of public heads, and a model card.

Matrices may be stored in int8, in compressed-tensors' layout (`pack-quantized`, groups of 32 inputs). A drafter's
weights need less precision than the target's, because the target checks each draft. Served in int8, as the CPU kernels
do by default, a head keeps these very integers and scales; only an output matrix of its own is rounded again, to 4 bits
(see CoarseOutput).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.models.heads.eagle3 import MASK
from specray.models.heads.eagle_files import HeadConfig
from specray.models.weights import WeightReader
from specray.ops.grouped_weight import GROUP, to_int8
from specray.train.batches import AnswerFolder
from specray.train.card import model_card
from specray.train.draft_model import TrainedDraftModel, copy_side_files
from specray.train.heads import (
    OwnVocabularyHead,
    TrainedEagle2Head,
    TrainedEagle3Head,
    TrainedHead,
    TrainedParallelHead,
)
from specray.train.run_files import LOG, replace_tensors, replace_text
from specray.train.settings import Counters, TrainSettings
from specray.train.target import Target

WEIGHTS = "model.safetensors"
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
    "ignore": [],
}


def export_head(
    folder: Path,
    head: TrainedHead | TrainedDraftModel,
    target: Target,
    settings: TrainSettings,
    answers: AnswerFolder,
    counters: Counters,
    validation: dict[str, Any] | None,
) -> None:
    """Write the folder of a head or draft model. The weights are replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head.tensors(target) if isinstance(head, TrainedDraftModel) else head.state_dict()
    stored = {name: _stored(tensor) for name, tensor in tensors.items()}
    replace_tensors(folder / WEIGHTS, packed(stored) if settings.weights == "int8" else stored)
    if isinstance(head, TrainedDraftModel):
        config = head.config(target)
        copy_side_files(target, folder)
    else:
        config = head.config | ({"quantization_config": QUANTIZATION_CONFIG} if settings.weights == "int8" else {})
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    card = model_card(config, settings, answers.description | answers.size(), counters, validation)
    (folder / "README.md").write_text(card, encoding="utf-8")
    if (folder.parent / LOG).is_file():  # a run that starts from this head continues the log
        shutil.copyfile(folder.parent / LOG, folder / LOG)


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head with each matrix `*.weight` [outs, ins] as `*.weight_packed`, `_scale` and `_shape`.

    A matrix whose inputs do not fill groups and other tensors stay as they are.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.shape[1] % GROUP == 0:
            rounded = to_int8(tensor)
            stored[f"{name}_packed"] = rounded.ints.view(torch.int32)
            stored[f"{name}_scale"] = rounded.scales.half() if rounded.is_exact_in_half else rounded.scales
            stored[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            stored[name] = tensor
    return stored


def init_head_width(settings: TrainSettings) -> int | None:
    """The width of the feed-forward of --init-head. ConfigError if it is no head, or --intermediate-size differs."""
    if settings.init_head is None or settings.kind == "draft":
        return None
    folder = Path(settings.init_head)
    if not (folder / WEIGHTS).is_file() or not (folder / "config.json").is_file():
        raise ConfigError(
            f"--init-head {folder} has no {WEIGHTS} and config.json; give a folder that this trainer wrote"
        )
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width = content.get("transformer_layer_config", content)["intermediate_size"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not a head's configuration ({error!r})") from None
    if settings.intermediate_size not in (None, width):
        raise ConfigError(
            f"--intermediate-size {settings.intermediate_size}: the feed-forward of --init-head {folder} is {width} "
            "wide; leave the option out"
        )
    return int(width)


def load_exported(head: TrainedHead | TrainedDraftModel, folder: Path) -> bool:
    """Load an exported head into `head`, which keeps its draft vocabulary: output rows are matched by target id.

    Returns whether the folder has a mask, which only P-EAGLE heads have.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"--init-head {folder} has no {WEIGHTS}; give a folder that this trainer wrote")
    with WeightReader(folder, "safetensors") as reader:
        tensors = {name: reader.get(name) for name in reader.names()}
    if isinstance(head, TrainedEagle3Head | TrainedEagle2Head):
        _check_trainable(folder)
    if isinstance(head, OwnVocabularyHead):
        _move_output_rows(head, tensors, path)
    if isinstance(head, TrainedEagle3Head):
        _match_layers(head, tensors, folder)
    has_mask = MASK in tensors
    if isinstance(head, TrainedParallelHead):
        tensors.setdefault(MASK, head.mask_hidden.detach())
    expected = head.state_dict()
    for name, tensor in expected.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            seen = list(tensors[name].shape) if name in tensors else "missing"
            raise ConfigError(f"{path}: tensor {name} is {seen}, the head to train has {list(tensor.shape)}")
    head.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in expected.items()})
    return has_mask


def init_head_ids(settings: TrainSettings) -> Tensor | None:
    """int64, the ids of the draft vocabulary of --init-head; None if there is no such head, or it has the target's."""
    if settings.init_head is None:
        return None
    with WeightReader(Path(settings.init_head), "safetensors") as reader:
        offsets = reader.get("d2t") if "d2t" in reader.names() else None
    return None if offsets is None else torch.arange(len(offsets)) + offsets


def _check_trainable(folder: Path) -> None:
    """ConfigError if a published head has settings that the trained modules do not implement."""
    config = HeadConfig.read(folder)
    names = ("norm_before_fc", "norm_before_residual", "norm_output")
    found = [name for name in names if getattr(config, name)] + ["layer_types"] * (config.window is not None)
    if found:
        raise ConfigError(
            f"--init-head {folder}: config.json sets {', '.join(found)}, which the trainer does not implement; give a "
            "folder that this trainer wrote"
        )


def _match_layers(head: TrainedEagle3Head, tensors: dict[str, Tensor], folder: Path) -> None:
    """Fit the stored layers to a head that may have more: those on top keep their initialization."""
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")} or {0}
    num_stored, num_layers = max(numbers) + 1, head.shape.num_layers
    if num_stored > num_layers:
        raise ConfigError(
            f"--init-head {folder} has {num_stored} layers, more than --num-layers {num_layers}; set --num-layers "
            f"{num_stored} or more"
        )
    first = "midlayer." if num_layers == 1 else "layers.0."
    for name in list(tensors):
        if name.startswith(("midlayer.", "layers.0.")):
            tensors[first + name.removeprefix("midlayer.").removeprefix("layers.0.")] = tensors.pop(name)
    added = tuple(f"layers.{layer}." for layer in range(num_stored, num_layers))
    tensors.update({name: tensor for name, tensor in head.state_dict().items() if name.startswith(added)})


def _move_output_rows(head: OwnVocabularyHead, tensors: dict[str, Tensor], path: Path) -> None:
    """Replace the stored output rows by rows for this head's draft vocabulary.

    Rows of new ids are the target's rows after the linear map that fits the stored ids. The target's rows themselves
    have another scale than trained ones and would get higher logits.
    """
    if "d2t" not in tensors or "lm_head.weight" not in tensors:
        raise ConfigError(f"{path} has no d2t and lm_head.weight; give an EAGLE-3 head with a draft vocabulary")
    stored_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    place = {int(token): index for index, token in enumerate(stored_ids)}
    kept = [row for row, token in enumerate(head.draft_ids.tolist()) if token in place]
    rows = head.lm_head.weight.detach().float().cpu()  # as `start_from` left them: the target's
    trained = tensors["lm_head.weight"].float()[[place[int(head.draft_ids[row])] for row in kept]]
    guessed = rows @ torch.linalg.lstsq(rows[kept], trained, driver="gelsd").solution if kept else rows
    guessed[kept] = trained
    tensors.update({"lm_head.weight": guessed, "d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()})


def _stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
