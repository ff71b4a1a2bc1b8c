"""For trainers that are made elsewhere, so that nobody can put a mixin before their class."""

from __future__ import annotations

from typing import TypeVar

import transformers

from thinwire.hugging_face.engine_training import ThinwireConfig
from thinwire.hugging_face.mixin import TrainerMixin

__all__ = ["adapt"]

AnyTrainer = TypeVar("AnyTrainer", bound=transformers.Trainer)


def adapt(trainer: AnyTrainer, thinwire_config: ThinwireConfig | None = None) -> AnyTrainer:
    """Have a trainer do all that TrainerMixin does, before its `train()`; returns it.

    `thinwire_config`: as TrainerMixin takes it. The trainer's class becomes a subclass of what it was. Raises TypeError
    for what is no transformers.Trainer, RuntimeError for one that has trained, as its model is wrapped already, and
    ValueError for arguments that TrainerMixin refuses.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"adapt() takes a transformers.Trainer, got a {type(trainer).__name__}")
    if isinstance(trainer, TrainerMixin):
        if thinwire_config is not None:
            raise TypeError(f"this {type(trainer).__name__} is adapted: pass thinwire_config where it is built")
        return trainer
    if trainer.model_wrapped is not trainer.model:
        raise RuntimeError(
            f"this {type(trainer).__name__} has wrapped its model already: call adapt() right after it is built"
        )
    whole = type(trainer)
    trainer.__class__ = type(whole.__name__, (TrainerMixin, whole), {"__module__": whole.__module__})
    TrainerMixin.adapt_accelerator(trainer, thinwire_config)  # type: ignore[arg-type]
    TrainerMixin.check_given(trainer)  # type: ignore[arg-type]
    return trainer
