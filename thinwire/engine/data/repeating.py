"""A loader without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["RepeatingLoader"]

_END = object()


class RepeatingLoader:
    """Batches of `loader` without end: where it is through, it begins again, with its next epoch.

    A ResumableLoader knows its epoch by itself; a torch DataLoader's DistributedSampler is told. `loader` is what was
    given, `len` its length.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = 0
        self._batches = iter(loader)

    def __len__(self) -> int:
        """Batches of one epoch. Raises TypeError where the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises ValueError for a loader that gives none in a whole epoch."""
        if (batch := next(self._batches, _END)) is not _END:
            return batch
        self._epoch += 1
        begin_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if begin_epoch is not None:
            begin_epoch(self._epoch)
        self._batches = iter(self.loader)
        if (batch := next(self._batches, _END)) is not _END:
            return batch
        raise ValueError(
            f"{type(self.loader).__name__} gave no batch in a whole epoch, so it would be repeated for ever: give a "
            "loader with data, and no iterator, which begins only once"
        )
