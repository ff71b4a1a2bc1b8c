"""What a harness has found: how many trials, how many of them bad, and what a few of these looked like.

Bad is a wrong result, an exception that does not come from a check of thinwire's own, and a trial without an end.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import thinwire
from thinwire.engine.errors import CheckpointError, UsageError

# Trials take milliseconds; only one that hangs takes so long, however slow the machine.
LONGEST_TRIAL_SECONDS = 300.0
MOST_EXAMPLES = 5
PACKAGE = str(Path(thinwire.__file__).parent)


@dataclass
class Outcome:
    """`examples`: what was wrong with the first bad trials, each with the seed and the trial to repeat it by."""

    tried: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, faults: Iterable[str]) -> None:
        """Count another trial, with what was wrong in it."""
        self.tried += 1
        found = list(faults)
        self.bad += bool(found)
        self.examples = (self.examples + found)[:MOST_EXAMPLES]

    def attempt(self, label: str, trial: Callable[[], str | None]) -> bool:
        """Run a trial that returns what was wrong, or None; whether it came to an end."""
        faults: list[str | None] = []

        def watched() -> None:
            try:
                faults.append(trial())
            except BaseException as error:
                faults.append("".join(traceback.format_exception(error)[-4:]))

        thread = threading.Thread(target=watched, daemon=True)
        thread.start()
        thread.join(LONGEST_TRIAL_SECONDS)
        fault = "it hangs" if thread.is_alive() else faults[0]
        self.tried += 1
        if fault is not None:
            self.bad += 1
            self.examples += [f"{label}: {fault}"] if len(self.examples) < MOST_EXAMPLES else []
        return not thread.is_alive()


def over_seeds(one: Callable[[str], Iterable[str]], count: int, seed: int) -> Outcome:
    """What `one` finds wrong with so many trials, each of a seed of its own; RuntimeWarnings are no fault."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(count):
            outcome.note(one(f"{seed}-{number}"))
    return outcome


def is_documented(error: BaseException) -> bool:
    """Whether an error is one that a check of thinwire's own has raised, and not a library or the language."""
    if isinstance(error, CheckpointError | UsageError):
        return True
    if not isinstance(error, ValueError | TypeError) or error.__traceback__ is None:
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith(PACKAGE) and (frame.line or "").startswith("raise")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every name below a folder, and the content of its files: to see whether anything was written there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }
