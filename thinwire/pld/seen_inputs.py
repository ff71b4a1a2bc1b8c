"""Recognises a forward by its input, when activation checkpointing runs it again: the input was kept for that, so its
memory is still its own."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SeenInputs"]


class SeenInputs:
    """Which micro-step had which input. Keeps no input alive; copies begin empty."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, hidden: Tensor, micro_step: int) -> None:
        """Note that `micro_step` had this input."""
        self._at[hidden.data_ptr()] = (StorageWeakRef(hidden.untyped_storage()), micro_step)  # type: ignore[no-untyped-call]

    def find(self, hidden: Tensor) -> int | None:
        """The last micro-step that had this input, or None."""
        storage, micro_step = self._at.get(hidden.data_ptr(), (None, None))
        # A freed input's address may belong to another tensor by now.
        gone = storage is None or bool(storage.expired())  # type: ignore[no-untyped-call]
        return None if gone else micro_step

    def clear(self) -> None:
        """Forget all."""
        self._at.clear()

    def __getstate__(self) -> dict[str, object]:
        return {"_at": {}}
