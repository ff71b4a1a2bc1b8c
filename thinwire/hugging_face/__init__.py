"""Floor 7, the optimizers where others own the training loop: Hugging Face's Trainer. Needs transformers and
accelerate, which `pip install thinwire[hf]` brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = ["Trainer", "TrainerMixin", "adapt"]

# Only who uses one of them needs transformers.
if TYPE_CHECKING:
    from thinwire.hugging_face.mixin import Trainer, TrainerMixin, adapt
else:
    __getattr__, __dir__ = lazy_exports(__name__)
