"""One training step: forward, loss, backward and optimizer step for a batch of answers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specray.train.batches import Collate
from specray.train.loss import Labels, soft_labels, soft_loss
from specray.train.optimizer import Optimizer
from specray.train.settings import TrainSettings
from specray.train.shards import Answer
from specray.train.target import Target
from specray.train.unroll import TrainedModel, UnrolledStep, labeled_positions, unroll


class Learner:
    """Trains a head or draft model. The target's embeddings and output matrix are frozen."""

    def __init__(self, head: TrainedModel, target: Target, settings: TrainSettings, collate: Collate) -> None:
        self.head = head
        self.optimizer = Optimizer(head, settings.optimizer, settings.weight_decay, collate.dtype)
        self._target = target
        self._settings = settings
        self._collate = collate
        self._label_rows = target.head[head.draft_ids]
        self._usable_ids = torch.zeros(len(target.head), dtype=torch.bool, device=target.device)
        self._usable_ids[head.draft_ids] = True

    def learn(self, answers: Sequence[Answer], rate: float) -> tuple[int, Tensor]:
        """One optimizer step. Returns (number of labels, [loss, share of agreement at step 0, 1, …])."""
        batch = self._collate(answers)
        labeled = labeled_positions(batch, self._usable_ids)
        with torch.no_grad():
            labels = soft_labels(labeled.final, self._label_rows)
        with autocast(self._collate):
            steps = list(unroll(self.head, self._target, batch, labeled, self._settings.unroll))
            loss, agrees = self._loss(steps, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(rate, self._settings.clip)
        shares = [part.sum() / max(len(part), 1) for part in torch.split(agrees, [len(step.labels) for step in steps])]
        return len(labeled.final), torch.stack((loss.detach(), *shares)).cpu()

    def _loss(self, steps: Sequence[UnrolledStep], labels: Labels) -> tuple[Tensor, Tensor]:
        """The mean over each step's rows, weighted by step. All rows are multiplied with the output matrix at once."""
        weights = [self._settings.step_decay**depth for depth in range(len(steps))]
        importance = [
            torch.full(
                (len(step.labels),), weight / sum(weights) / max(len(step.labels), 1), device=labels.probs.device
            )
            for weight, step in zip(weights, steps, strict=True)
        ]
        dtype = labels.probs.dtype
        outputs, label_of = torch.cat([step.outputs for step in steps]).to(dtype), torch.cat([s.labels for s in steps])
        weight = self.head.output_weight.to(dtype)
        variation = self._settings.total_variation
        loss, agrees = soft_loss(outputs, weight, labels, label_of, torch.cat(importance), variation)
        return loss + self.head.extra_loss(outputs.detach(), weight.detach(), labels.probs, label_of), agrees


def autocast(collate: Collate) -> AbstractContextManager[object]:
    """Matrix products in bfloat16 if batches are; parameters stay float32."""
    return torch.autocast(collate.device.type, torch.bfloat16, enabled=collate.dtype is torch.bfloat16)
