"""Exports trained heads: model.safetensors and config.json in the layout of public heads, and a model card."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.models.eagle_files import HeadConfig
from specray.models.weights import WeightReader
from specray.train.batches import AnswerFolder
from specray.train.card import model_card
from specray.train.checkpoint import LOG
from specray.train.draft_export import copy_side_files, draft_config, draft_tensors
from specray.train.draft_model import TrainedDraftModel, TrainedModel
from specray.train.files import replace_tensors, replace_text
from specray.train.heads import TrainedEagle2Head, TrainedEagle3Head, TrainedHead, TrainedMtpHead, TrainedParallelHead
from specray.train.int8_weights import QUANTIZATION_CONFIG, packed
from specray.train.settings import Counters, TrainSettings
from specray.train.target import Target

WEIGHTS = "model.safetensors"
_MTP_PREFIX = "model.mtp_layers.0."


def export_head(
    folder: Path,
    head: TrainedModel,
    target: Target,
    settings: TrainSettings,
    answers: AnswerFolder,
    counters: Counters,
    validation: dict[str, Any] | None,
) -> None:
    """Write the folder of a head or draft model. The weights are replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = draft_tensors(head, target) if isinstance(head, TrainedDraftModel) else head.state_dict()
    prefix = _MTP_PREFIX if isinstance(head, TrainedMtpHead) else ""
    stored = {prefix + name: _stored(tensor) for name, tensor in tensors.items()}
    replace_tensors(folder / WEIGHTS, packed(stored) if settings.weights == "int8" else stored)
    if isinstance(head, TrainedDraftModel):
        config = draft_config(head, target)
        copy_side_files(target, folder)
    else:
        config = head_config(head, target, answers.aux_hidden_state_layers[:-1])
        if settings.weights == "int8":
            config["quantization_config"] = QUANTIZATION_CONFIG
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    card = model_card(config, settings, answers.description | answers.size(), counters, validation)
    (folder / "README.md").write_text(card, encoding="utf-8")
    if (folder.parent / LOG).is_file():  # a run that starts from this head continues the log
        shutil.copyfile(folder.parent / LOG, folder / LOG)


def head_config(head: TrainedHead, target: Target, aux_hidden_state_layers: list[int]) -> dict[str, Any]:
    """config.json of the head."""
    shape, config = target.shape, target.config
    common = {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": head.shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": head.shape.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **_rope(config.rope_parameters),
        **{name: getattr(config, name) for name in ("bos_token_id", "eos_token_id")},
    }
    if isinstance(head, TrainedMtpHead):
        mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
        return {**common, **mimo, "num_hidden_layers": shape.num_layers, "num_nextn_predict_layers": 1}
    if isinstance(head, TrainedEagle2Head):
        return {"architectures": ["LlamaForCausalLMEagle"], "bias": head.fc.bias is not None, **common}
    mask = (
        {"parallel_drafting": True, "ptd_token_id": head.mask_token_id} if isinstance(head, TrainedParallelHead) else {}
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **common,
        **mask,
        "draft_vocab_size": len(head.draft_ids),
        "fc_norm": True,
        # Public heads list layer outputs: the input of layer l is the output of layer l - 1.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_hidden_state_layers],
            "use_aux_hidden_state": True,
        },
    }


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
        width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["intermediate_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not a head's configuration ({error!r})") from None
    if settings.intermediate_size not in (None, width):
        raise ConfigError(
            f"--intermediate-size {settings.intermediate_size}: the feed-forward of --init-head {folder} is {width} "
            "wide; leave the option out"
        )
    return int(width)


def load_exported(head: TrainedModel, folder: Path) -> bool:
    """Load an exported head into `head`, which keeps its draft vocabulary: output rows are matched by target id.

    Returns whether the folder has a mask, which only P-EAGLE heads have.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"--init-head {folder} has no {WEIGHTS}; give a folder that this trainer wrote")
    with WeightReader(folder, "safetensors") as reader:
        tensors = {name.removeprefix(_MTP_PREFIX): reader.get(name) for name in reader.names()}
    if isinstance(head, TrainedEagle3Head | TrainedEagle2Head):
        _check_trainable(folder)
    if isinstance(head, TrainedEagle3Head):
        _move_output_rows(head, tensors, path)
        _match_layers(head, tensors, folder)
    has_mask = "mask_hidden" in tensors
    if isinstance(head, TrainedParallelHead):
        tensors.setdefault("mask_hidden", head.mask_hidden.detach())
    own = head.state_dict()
    for name, tensor in own.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            seen = list(tensors[name].shape) if name in tensors else "missing"
            raise ConfigError(f"{path}: tensor {name} is {seen}, the head to train has {list(tensor.shape)}")
    head.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in own.items()})
    return has_mask


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


def _move_output_rows(head: TrainedEagle3Head, tensors: dict[str, Tensor], path: Path) -> None:
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


def _rope(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The target's RoPE settings under the names that public heads use."""
    rope = dict(parameters or {})
    theta = rope.pop("rope_theta", 10000.0)
    scaled = rope.get("rope_type", "default") != "default"
    return {"rope_theta": theta, "rope_scaling": rope if scaled else None}
