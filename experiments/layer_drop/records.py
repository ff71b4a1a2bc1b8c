"""What the JSON of `experiments.layer_drop` holds, as the objects that it was made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from experiments.layer_drop.findings import Finding, Run
from experiments.layer_drop.learning import Curve, KeepRates, Recipe
from experiments.layer_drop.step_time import Saving
from experiments.tasks.sizes import BertSize

__all__ = ["Record", "read"]


@dataclass(frozen=True)
class Record:
    """One run of the experiment.

    Attributes:
        found: its findings.
        runs: every training.
        savings: step times, by what was timed.
        keep_rates: of the deep stack, with θ settled.
        recipe: of the trainings.
        entropy: the loss of guessing by token frequency.
    """

    found: Finding
    runs: list[Run]
    savings: dict[str, Saving]
    keep_rates: KeepRates
    recipe: Recipe
    entropy: float


def read(content: Mapping[str, Any]) -> Record:
    """The objects again; null in a curve stands for a loss that was not finite."""
    settings = content["settings"]
    recipe = {field.name: settings[field.name] for field in fields(Recipe)}
    return Record(
        found=Finding(**content["finding"]),
        runs=[_run(record) for record in content["runs"]],
        savings={name: Saving(**one) for name, one in content["step_time"].items() if name != "workload"},
        keep_rates=_keep_rates(content["keep_rates"]),
        recipe=Recipe(**{**recipe, "size": BertSize(**settings["size"])}),
        entropy=content["unigram_entropy"],
    )


def _run(record: Mapping[str, Any]) -> Run:
    curve = record["curve"]
    losses = [math.nan if loss is None else loss for loss in curve["losses"]]
    rates = record["keep_rates"] and _keep_rates(record["keep_rates"])
    return Run(**{**record, "curve": Curve(**{**curve, "losses": losses}), "keep_rates": rates})


def _keep_rates(record: Mapping[str, Any]) -> KeepRates:
    return KeepRates(**{field.name: record[field.name] for field in fields(KeepRates)})
