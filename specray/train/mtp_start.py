"""Initialization of an MTP layer from an EAGLE-2 head.

Both read the target's final hidden state and the next token, but an MTP layer norms its inputs, what its attention
reads and its output. With the usual sizes of these as the norms' weights, it computes nearly what the head does.
"""

from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from specray.models.weights import WeightReader
from specray.train.batches import AnswerFolder, Collate
from specray.train.export import load_exported
from specray.train.heads import TrainedDecoderLayer, TrainedEagle2Head, TrainedMtpHead
from specray.train.start import training_answers
from specray.train.target import Target

_ANSWERS = 40


def is_eagle2(folder: Path) -> bool:
    """Whether the weights in a folder are those of an EAGLE-2 head."""
    with WeightReader(folder, "safetensors") as reader:
        return "fc.weight" in reader.names() and "d2t" not in reader.names()


@torch.no_grad()
def start_from_eagle2(
    layer: TrainedMtpHead, source: Path, target: Target, answers: AnswerFolder, collate: Collate
) -> None:
    """Copy the matrices of the head in `source`, and measure the sizes on a few answers."""
    head = TrainedEagle2Head(layer.shape, layer.draft_ids.cpu())
    load_exported(head, source)
    head.to(target.device)
    batches = [collate([answer]) for answer in islice(training_answers(answers), _ANSWERS)]
    states = torch.cat([batch.aux_hidden_states[0, :-1].float() for batch in batches])
    embeds = torch.cat([target.embed(batch.token_ids[0, 1:]).float() for batch in batches])
    of_embeds, of_states = head.fc.weight.chunk(2, 1)
    layer.input_proj.weight.copy_(torch.cat((of_states, of_embeds), 1))
    layer.token_layernorm.weight.fill_(_size(embeds))
    layer.hidden_layernorm.weight.fill_(_size(states))
    layer.input_layernorm.weight.fill_(_size(head.fc(torch.cat((embeds, states), -1))))
    layer.final_layernorm.weight.fill_(_size(states))  # the head predicts the next one
    decoder = head.layers[0]
    assert isinstance(decoder, TrainedDecoderLayer)
    for name, part in (("self_attn", layer.self_attn), ("mlp", layer.mlp)):
        part.load_state_dict(getattr(decoder, name).state_dict(), strict=False)  # the head has no biases
    layer.post_attention_layernorm.weight.copy_(decoder.post_attention_layernorm.weight)


def _size(rows: Tensor) -> float:
    """The mean of the rows' root mean squares."""
    return float(rows.square().mean(-1).sqrt().mean())
