"""transformers' own Trainer with a thinwire optimizer."""

from __future__ import annotations

import transformers

from thinwire.hugging_face.mixin import TrainerMixin

__all__ = ["Trainer"]


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer, whose gradients a thinwire optimizer synchronises: see TrainerMixin."""
