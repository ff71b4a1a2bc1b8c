"""deepspeed.runtime.dataloader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from thinwire.engine import ResumableLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

_Batch = TypeVar("_Batch")


class RepeatingLoader(Generic[_Batch]):
    """Batches of `loader` without end: it begins again when it is through.

    Raises StopIteration only where `loader` has no batch at all.
    """

    def __init__(self, loader: Iterable[_Batch]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
