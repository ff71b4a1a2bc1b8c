"""Hugging Face encoders at the machine's limit: batches without padding, and only labelled tokens through the output
head. `accelerate(model)` changes a model in place, `undo(model)` gives the plain one back."""

from __future__ import annotations

from thinwire.transformers.fast_encoder import accelerate, undo

__all__ = ["accelerate", "undo"]
