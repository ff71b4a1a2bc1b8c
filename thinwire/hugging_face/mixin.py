"""What a Trainer leaves to a thinwire optimizer: synchronising gradients, clipping them, and saving every rank's
state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from thinwire.hugging_face.acceleration import adapt_accelerator
from thinwire.hugging_face.checks import check_arguments, check_optimizer, synchronized
from thinwire.hugging_face.optimizer_files import load_optimizer, save_optimizer
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

__all__ = ["TrainerMixin"]

_SCHEDULE = "scheduler.pt"  # as transformers calls it


class TrainerMixin(_Trainer):
    """Put before any subclass of transformers.Trainer: `class MyTrainer(TrainerMixin, SFTTrainer)`.

    The optimizer comes from `optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {...})` or from `optimizers=(optimizer,
    schedule)`. It sends gradients during backward, so that the model is not wrapped in DistributedDataParallel; clips
    to `args.max_grad_norm` by the averaged gradient's norm; and its state, every rank's residuals included, lies beside
    what the Trainer saves in each checkpoint. `grad_norm` in logs is of the averaged gradient.

    Raises, on every rank: TypeError for an optimizer that is not thinwire's, or a class that puts the mixin after the
    Trainer, ValueError for arguments that do not go together.
    """

    # What thinwire.zero looks for, to tell this from a Trainer that clips each rank's own gradients.
    clips_averaged_gradients = True

    model: Any
    lr_scheduler: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError where a Trainer comes before the mixin, whose methods then never run."""
        super().__init_subclass__(**options)
        bases = cls.__mro__[1:]
        trainers = [one for one in bases if (one.__module__, one.__name__) == ("transformers.trainer", "Trainer")]
        if trainers and bases.index(trainers[0]) < bases.index(TrainerMixin):
            raise TypeError(
                f"{cls.__name__} names TrainerMixin after a Trainer: write class {cls.__name__}"
                "(TrainerMixin, ...), or nothing of it would be used"
            )

    # Setting up

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, and have it leave gradients alone."""
        super().create_accelerator_and_postprocess()
        self.adapt_accelerator()

    def adapt_accelerator(self) -> None:
        """Have the Trainer's accelerator leave gradients alone; raise ValueError for arguments that cannot be kept."""
        check_arguments(self.args)
        adapt_accelerator(self.accelerator, lambda optimizer: check_optimizer(optimizer, self.args))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer where none was given, with `args.learning_rate` and `args.max_grad_norm`."""
        if self.is_distributed_loading_by_transformers:
            raise ValueError(
                "the model was loaded in shards, and a thinwire optimizer needs it whole on every rank: load it "
                "without a distributed configuration; stage=1 or stage=2 of OneBitAdam shards the optimizer's state"
            )
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            self.optimizer_cls_and_kwargs = self._with_arguments(given)
        try:
            optimizer = super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        synchronized(optimizer).attach(self.model)
        return optimizer

    def _with_arguments(self, given: tuple[Any, Mapping[str, Any]] | None) -> tuple[Any, dict[str, Any]]:
        kind, options = given or (None, {})
        if not (isinstance(kind, type) and issubclass(kind, SynchronizedOptimizer)):
            found = self.args.optim if kind is None else getattr(kind, "__name__", kind)
            raise TypeError(
                f"TrainerMixin trains with a thinwire optimizer, and was given {found!s}: pass "
                "optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {}), or optimizers=(optimizer, schedule)"
            )
        of_arguments = {
            "lr": self.args.learning_rate,
            "max_norm": self.args.max_grad_norm,
            "named_parameters": list(self.model.named_parameters()),
        }
        return kind, of_arguments | dict(options)

    # Logging

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, with the norm of the averaged gradient, which nobody knows before the step."""
        if "grad_norm" in logs:
            logs["grad_norm"] = self._synchronized.last_step.grad_norm
        super().log(logs, *args, **options)

    # Weights: those that all ranks have in common, where ranks' own differ between syncs

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; afterwards all ranks hold the same weights."""
        output = super().train(*args, **options)
        self._synchronized.synchronize_weights()
        return output

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the weights that all ranks have in common."""
        with self._common_weights():
            super().save_model(*args, **options)

    def _load_best_model(self) -> None:
        self._synchronized.synchronize_weights()  # else a sync would come later, and undo what is loaded
        super()._load_best_model()

    @contextmanager
    def _common_weights(self) -> Iterator[None]:
        if self.optimizer is None:
            yield
            return
        self._synchronized.eval()
        try:
            yield
        finally:
            self._synchronized.train()

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self._synchronized, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_optimizer(self._synchronized, checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULE), weights_only=True))

    @property
    def _synchronized(self) -> SynchronizedOptimizer:
        return synchronized(self.optimizer)
