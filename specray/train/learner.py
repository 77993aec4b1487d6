"""One training step: from a batch of answers to moved parameters."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specray.train.batches import Collate
from specray.train.draft_model import TrainedModel
from specray.train.loss import soft_cross_entropy, soft_labels
from specray.train.optimizer import Optimizer
from specray.train.settings import TrainSettings
from specray.train.shards import Answer
from specray.train.target import Target
from specray.train.unroll import StepOutput, lessons, unroll


class Learner:
    """A head or draft model and its optimizer. The target's part in it is fixed: its embeddings and its output rows."""

    def __init__(self, head: TrainedModel, target: Target, settings: TrainSettings, collate: Collate) -> None:
        self.head = head
        self.optimizer = Optimizer(head, settings.optimizer, settings.weight_decay)
        self._target = target
        self._settings = settings
        self._collate = collate
        self._label_rows = target.head[head.draft_ids]
        self._usable_ids = torch.zeros(len(target.head), dtype=torch.bool, device=target.device)
        self._usable_ids[head.draft_ids] = True

    def learn(self, answers: Sequence[Answer], rate: float) -> tuple[int, Tensor]:
        """(positions that taught, [loss, share of agreement at step 0, 1, …]) of one step of the optimizer."""
        batch = self._collate(answers)
        taught = lessons(batch, self._usable_ids)
        with torch.no_grad():
            labels = soft_labels(taught.final, self._label_rows)
        with autocast(self._collate):
            steps = list(unroll(self.head, self._target, batch, taught, self._settings.unroll))
            loss, agrees = self._loss(steps, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(rate, self._settings.clip)
        shares = [part.sum() / max(len(part), 1) for part in torch.split(agrees, [len(step.lessons) for step in steps])]
        return len(taught.final), torch.stack((loss.detach(), *shares)).cpu()

    def _loss(self, steps: Sequence[StepOutput], labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each step's rows, weighted by step; all rows go through the output matrix at once."""
        weights = [self._settings.step_decay**depth for depth in range(len(steps))]
        importance = [
            torch.full((len(step.lessons),), weight / sum(weights) / max(len(step.lessons), 1), device=labels.device)
            for weight, step in zip(weights, steps, strict=True)
        ]
        dtype = labels.dtype
        return soft_cross_entropy(
            torch.cat([step.outputs for step in steps]).to(dtype),
            self.head.output_weight.to(dtype),
            labels,
            torch.cat([step.lessons for step in steps]),
            torch.cat(importance),
        )


def autocast(collate: Collate) -> AbstractContextManager[object]:
    """Products in bfloat16 where batches are; parameters stay float32."""
    return torch.autocast(collate.device.type, torch.bfloat16, enabled=collate.dtype is torch.bfloat16)
