"""Chaos: thousands of seeded faults, each of which must end in the right result or in an error that says what to do.

A harness is a function of a module, `run(count, seed) -> Outcome`, named in `HARNESSES` with how much `make chaos` does
of it, and how much the tests.
"""

from importlib import import_module
from typing import Any, NamedTuple


class Harness(NamedTuple):
    """Where it is, how many trials the whole is, and how many a slice; 0 for what has a test of its own. Kills and
    drift are for each form of training, drift counts iterations, and many_parameters parameters."""

    function: str
    whole: int
    slice: int


HARNESSES = {
    "damage": Harness("checkpoints.damage", 1000, 20),
    "manifests": Harness("checkpoints.manifests", 400, 12),
    "imports": Harness("imports.run", 400, 8),
    "folders": Harness("checkpoints.folders", 600, 12),
    "state_dicts": Harness("states.run", 500, 12),
    "packets": Harness("packets.run", 12_000, 300),
    "configs": Harness("configs.run", 2000, 200),
    "config_texts": Harness("configs.texts", 1000, 60),
    "mismatches": Harness("mismatches.run", 750, 12),
    "gradients": Harness("training.gradients", 400, 10),
    "drift": Harness("training.drift", 5000, 20),
    "kills": Harness("kills.run", 40, 0),
    "launched": Harness("launched.run", 40, 0),
    "meshes": Harness("meshes.run", 24, 0),
    "edits": Harness("edits.run", 2000, 8),
    "threads": Harness("turns.threads", 150, 0),
    "interrupts": Harness("turns.interrupts", 220, 6),
    "forks": Harness("forks.run", 70, 0),
    "elastic": Harness("elastic.run", 50, 0),
    "heal": Harness("heal.run", 200, 0),
    "garbage": Harness("elastic.garbage", 50, 0),
    "many_parameters": Harness("training.many_parameters", 10_000, 8),
}


def run(name: str, count: int, seed: int) -> Any:
    """The outcome of so many trials of a harness."""
    module, function = HARNESSES[name].function.split(".")
    return getattr(import_module(f"tests.chaos.{module}"), function)(count, seed)
