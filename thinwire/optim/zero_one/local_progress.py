"""How far local steps have carried the ranks since they last met: plain numbers that follow from the learning rates
alone, so that every rank has the same without a message."""

from __future__ import annotations

from thinwire.optim.formulas import AdamSettings

__all__ = ["LocalProgress"]


class LocalProgress:
    """Σγ of the steps since the last sync, by the parameter group's number, where γₜ = lr / (1 - β₁ᵗ).

    A weight decay that has struck since shrinks what an earlier step counts, as it shrinks how far that step moved the
    weights. 0 stands for ranks that hold the same weights.
    """

    def __init__(self) -> None:
        self._distances: dict[int, float] = {}

    def __bool__(self) -> bool:
        return any(self._distances.values())

    def distance(self, group: int) -> float:
        """Σγ of the group."""
        return self._distances.get(group, 0.0)

    def share(self, group: int, settings: AdamSettings, step: int) -> float:
        """The weight of step `step` in the mean of the steps since the last sync; 1 where nothing has moved, whatever
        the learning rate."""
        distance = self._after(group, settings, step)
        return _rate(settings, step) / distance if distance else 1.0

    def advance(self, group: int, settings: AdamSettings, step: int) -> None:
        """Count step `step`."""
        self._distances[group] = self._after(group, settings, step)

    def reset(self) -> None:
        """Begin at 0, as after a sync."""
        self._distances = {}

    def state(self) -> dict[int, float]:
        """What a checkpoint must hold."""
        return dict(self._distances)

    def load(self, state: dict[int, float]) -> None:
        """Take over what `state` returned."""
        self._distances = {int(group): distance for group, distance in state.items()}

    def _after(self, group: int, settings: AdamSettings, step: int) -> float:
        return (1 - settings.lr * settings.weight_decay) * self.distance(group) + _rate(settings, step)


def _rate(settings: AdamSettings, step: int) -> float:
    return settings.lr / settings.first_correction(step)
