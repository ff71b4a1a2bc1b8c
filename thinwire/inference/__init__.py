"""Trained models that answer: `prepare` a model for inference, in 8 bits where asked, and `queue` requests of any
lengths into batches without padding; `prepare_qat` trains for it, and `convert` prepares what was trained so."""

from __future__ import annotations

from thinwire.inference.preparation import Prepared, prepare
from thinwire.inference.requests import QueueClosedError, QueueFullError, RequestQueue
from thinwire.inference.rounding_in_training import convert, prepare_qat

__all__ = ["Prepared", "QueueClosedError", "QueueFullError", "RequestQueue", "convert", "prepare", "prepare_qat"]
