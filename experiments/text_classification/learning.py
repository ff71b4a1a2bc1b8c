"""One training by a Trainer: the unchanged one with AdamW, under DDP, or thinwire's with a 1-bit optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import thinwire
from experiments.common import loopback
from experiments.tasks.passages import Passages
from experiments.tasks.sizes import BertSize
from experiments.training.optimizers import COMPRESSED
from thinwire import hugging_face

__all__ = ["Classifier", "Outcome", "Recipe", "resumes_bit_for_bit"]


@dataclass(frozen=True)
class Recipe:
    """What all methods share.

    Attributes:
        size: of the BERT.
        steps: of every run.
        warmup_steps: in which the rate rises, before it falls linearly to zero.
        freeze_step: after which 1-bit optimizers send one bit an element.
        block_size: elements of a 1-bit optimizer's message that share a scale.
        batch_size: passages a rank and step.
        weight_decay: of matrices.
        max_norm: gradients are clipped to it.
    """

    size: BertSize
    steps: int
    warmup_steps: int
    freeze_step: int
    block_size: int
    batch_size: int
    weight_decay: float
    max_norm: float


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        method: a name in `experiments.training.optimizers`.
        learning_rate: its peak.
        seed: of weights, dropout and order.
        validation: accuracy, percent, on passages held out to choose the rate by.
        test: accuracy, percent, on passages held out for nothing else.
        interface: bytes through the loopback interface of each step, divided by the ranks.
    """

    method: str
    learning_rate: float
    seed: int
    validation: float
    test: float
    interface: list[float]


class Classifier:
    """Trains BERT to say which text a passage is from. Collective throughout."""

    def __init__(self, passages: Passages, recipe: Recipe, folder: Path) -> None:
        """`folder`: for checkpoints, where all ranks see it."""
        transformers.utils.logging.disable_progress_bar()
        self._recipe = recipe
        self._folder = folder
        self._passages = passages
        self._training, self._validation, self._test = (passages.of_part(part) for part in range(3))

    def run(self, method: str, learning_rate: float, seed: int) -> Outcome:
        """Train with one method, and evaluate in the end."""
        trainer = self.trainer(method, learning_rate, seed)
        meter = _Meter(trainer.args.world_size)
        trainer.add_callback(meter)
        trainer.train()
        return Outcome(
            method,
            learning_rate,
            seed,
            validation=self._accuracy(trainer, self._validation),
            test=self._accuracy(trainer, self._test),
            interface=meter.bytes_a_step,
        )

    def trainer(
        self, method: str, learning_rate: float, seed: int, *, save_at: int | None = None, build_seed: int | None = None
    ) -> transformers.Trainer:
        """A Trainer that has not trained yet.

        `save_at`: step of a checkpoint. `build_seed`: of the first weights, where they are not the seed's.
        """
        recipe = self._recipe
        arguments = TrainingArguments(
            output_dir=str(self._folder),
            use_cpu=True,
            max_steps=recipe.steps,
            warmup_steps=recipe.warmup_steps,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_norm,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=16 * recipe.batch_size,
            seed=seed,
            logging_strategy="no",
            save_strategy="steps" if save_at else "no",
            save_steps=save_at or recipe.steps,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            average_tokens_across_devices=False,  # BERT's loss is a mean by itself
        )
        options: dict[str, Any] = {}
        kind: Callable[..., transformers.Trainer] = transformers.Trainer
        if method in COMPRESSED:
            one = COMPRESSED[method]
            kind = hugging_face.Trainer
            chosen: dict[str, Any] = {"block_size": recipe.block_size}
            if one.freeze_option is not None:
                chosen[one.freeze_option] = recipe.freeze_step
            options["optimizer_cls_and_kwargs"] = (getattr(thinwire, one.class_name), chosen)
        model = self._model(seed if build_seed is None else build_seed)
        trainer = kind(model, arguments, train_dataset=self._training, compute_metrics=_percent_right, **options)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def checkpoint(self, step: int) -> Path:
        """Where a Trainer with `save_at` leaves its checkpoint."""
        return self._folder / f"checkpoint-{step}"

    def _model(self, seed: int) -> nn.Module:
        size = self._recipe.size
        torch.manual_seed(seed)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=self._passages.vocabulary,
                max_position_embeddings=self._passages.tokens.shape[1],
                num_labels=len(self._passages.classes),
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=4 * size.width,
            )
        )

    def _accuracy(self, trainer: transformers.Trainer, samples: list[dict[str, Tensor]]) -> float:
        return float(trainer.evaluate(samples)["eval_accuracy"])


def resumes_bit_for_bit(classifier: Classifier, method: str, learning_rate: float, seed: int, save_at: int) -> bool:
    """Whether a run that goes on from a checkpoint, with other weights before it, ends with the same ones, bit for bit.

    On this rank.
    """
    whole = classifier.trainer(method, learning_rate, seed, save_at=save_at)
    whole.train()
    resumed = classifier.trainer(method, learning_rate, seed, save_at=save_at, build_seed=seed + 1000)
    resumed.train(resume_from_checkpoint=str(classifier.checkpoint(save_at)))
    return all(
        torch.equal(one, other) for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )


class _Meter(transformers.TrainerCallback):
    """Reads the interface after every step; one step's edge is another rank's, so that only sums are exact."""

    def __init__(self, ranks: int) -> None:
        self.bytes_a_step: list[float] = []
        self._ranks = ranks
        self._before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._before = loopback.bytes_sent()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = loopback.bytes_sent()
        self.bytes_a_step.append((now - self._before) / self._ranks)
        self._before = now


def _percent_right(found: transformers.EvalPrediction) -> dict[str, float]:
    right = found.predictions.argmax(-1) == found.label_ids
    return {"accuracy": 100 * float(right.mean())}
