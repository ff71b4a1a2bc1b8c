"""Trained models that answer: `prepare` a model for inference, in 8 bits where asked, and `queue` requests of any
lengths into batches without padding."""

from __future__ import annotations

from thinwire.inference.preparation import Prepared, prepare
from thinwire.inference.requests import QueueClosedError, QueueFullError, RequestQueue

__all__ = ["Prepared", "QueueClosedError", "QueueFullError", "RequestQueue", "prepare"]
