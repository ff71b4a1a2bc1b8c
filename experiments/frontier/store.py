"""Runs that are never lost: each finished one is an entry of a JSON file, and is not trained again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import machine
from experiments.common.errors import InputError
from experiments.common.results import read_json, write_json
from experiments.training.trainer import Outcome

__all__ = ["Run", "RunStore", "runs_of"]


@dataclass(frozen=True)
class Run:
    """A finished training.

    Attributes:
        workers: that trained together.
        contender: its name.
        rate: peak learning rate.
        step_cpu_seconds: processor time of a step, one worker's, validation left out.
        outcome: losses and bytes; its `seconds` are of a machine that did other things too.
    """

    workers: int
    contender: str
    rate: float
    step_cpu_seconds: float
    outcome: Outcome

    @property
    def name(self) -> str:
        """What tells it from the others in the file."""
        return name_of(self.workers, self.contender, self.rate, self.outcome.seed)


def name_of(workers: int, contender: str, rate: float, seed: int) -> str:
    """The name of such a run."""
    return f"{contender}, {workers} workers, rate {rate:g}, seed {seed}"


def runs_of(content: Mapping[str, Any]) -> list[Run]:
    """The runs that a file holds."""
    return [Run(**{**record, "outcome": Outcome.of_record(record["outcome"])}) for record in content["runs"].values()]


class RunStore:
    """The runs of one subject under one set of settings, in one file, which is whole at every moment."""

    def __init__(self, path: Path, settings: Mapping[str, Any], summary: Callable[[list[Run]], dict[str, Any]]) -> None:
        """Takes over what is in the file.

        Args:
            path: of the file; it need not exist.
            settings: plain values, all that runs depend on beside their names.
            summary: what the file says about its runs besides.

        Raises:
            InputError: the file holds runs of other settings.
        """
        self._path = path
        self._summary = summary
        # As a file has them: tuples are lists there.
        self._content: dict[str, Any] = {"machine": machine.describe(), "settings": dict(settings), "runs": {}}
        if path.exists():
            recorded = read_json(path)
            if recorded.get("settings") != dict(settings):
                raise InputError(
                    f"{path} holds runs of other settings (another text, length or grid): they cannot stand beside "
                    "new ones; give another --output, or move that file away"
                )
            self._content["runs"] = recorded["runs"]
            self._content["machine"] = recorded["machine"]

    @property
    def content(self) -> Mapping[str, Any]:
        """What the file holds."""
        return self._content

    def outcome(self, workers: int, contender: str, rate: float, seed: int, train: Callable[[], Run]) -> Outcome:
        """The outcome in the file, or else that of `train()`, which then is in the file."""
        name = name_of(workers, contender, rate, seed)
        if name not in self._content["runs"]:
            self._content["runs"][name] = asdict(train())
            self.write()
        return Outcome.of_record(self._content["runs"][name]["outcome"])

    def write(self) -> None:
        """Writes the file, its summary too."""
        self._content |= self._summary(runs_of(self._content))
        write_json(self._path, self._content)
