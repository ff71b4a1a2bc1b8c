"""What the losses of `experiments.stages` say: figures for the JSON, sentences for the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from experiments.training.findings import deviation
from experiments.training.optimizers import OPTIMIZERS

__all__ = ["EXACT_ON", "RESUMED", "RESUME_ON", "SAVE_ON", "SHARDED_ON", "SYSTEMS", "Finding", "final_losses", "find"]

SAVE_ON = 4
EXACT_ON = (1, 2, 3, 4)
RESUME_ON = (1, 2, 3, 8)
SHARDED_ON = 2
"""Numbers of ranks: that save, that compare stages, that take up what was saved, that train 1-bit Adam sharded."""

RESUMED = ("adamw", "onebit-adam")
"""What is saved and taken up: an exact optimizer, and one with residuals."""

SYSTEMS: dict[str, int | None] = {"unsharded": None, "ZeRO-1": 1, "ZeRO-2": 2}
"""1-bit Adam, and the ZeRO stage of the engine that shards it."""


@dataclass(frozen=True)
class Finding:
    """What was found; differences are relative, of training losses at the same step, and the largest of a run.

    Attributes:
        stages: AdamW in fp32 at stages 1, 2 and 3 from stage 0, by ranks and stage.
        resumed: runs taken up from a checkpoint of four ranks from those that went on, by optimizer and ranks.
        final_loss: mean validation loss of 1-bit Adam over the seeds, in nats, by sharding.
        deviation: standard deviation of it.
        final_difference: of the means of the sharded from the unsharded.
    """

    stages: dict[str, dict[str, float]]
    resumed: dict[str, dict[str, float]]
    final_loss: dict[str, float]
    deviation: dict[str, float]
    final_difference: dict[str, float]

    @property
    def sentences(self) -> list[str]:
        """The findings, one a line."""
        largest = max(difference for by_stage in self.stages.values() for difference in by_stage.values())
        sharded = ", ".join(f"{name} {100 * value:+.2f}%" for name, value in self.final_difference.items())
        return [
            f"Sharded 1-bit Adam ends at the unsharded loss: {sharded}",
            f"AdamW's losses at stages 1, 2 and 3 are stage 0's to {_power(largest)}",
            "Saved on 4 ranks, resumed on others: "
            + ", ".join(
                f"{OPTIMIZERS[name].label} within {_power(max(by_ranks.values()))}"
                for name, by_ranks in self.resumed.items()
            ),
        ]


def find(small: Mapping[int, Mapping[str, Any]], sharded: Mapping[str, Any]) -> Finding:
    """Computes the figures from losses by run, of small jobs by ranks and of the sharded job."""
    stages = {
        str(ranks): {
            str(stage): _difference(small[ranks][f"adamw, stage {stage}"], small[ranks]["adamw, stage 0"])
            for stage in (1, 2, 3)
        }
        for ranks in EXACT_ON
    }
    resumed = {
        optimizer: {
            str(ranks): _difference(small[ranks][f"{optimizer}, resumed"], small[SAVE_ON][f"{optimizer}, saved"])
            for ranks in RESUME_ON
        }
        for optimizer in RESUMED
    }
    finals = {system: final_losses(sharded, system) for system in SYSTEMS}
    means = {system: mean(losses) for system, losses in finals.items()}
    return Finding(
        stages=stages,
        resumed=resumed,
        final_loss=means,
        deviation={system: deviation(losses) for system, losses in finals.items()},
        final_difference={
            system: means[system] / means["unsharded"] - 1 for system in SYSTEMS if system != "unsharded"
        },
    )


def final_losses(losses: Mapping[str, Any], system: str) -> Sequence[float]:
    """Last validation losses of a system, one a seed."""
    return [run["validation"][-1] for name, run in losses.items() if name.startswith(f"{system}, seed")]


def _difference(run: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The largest relative difference of training losses, over the steps of `run`."""
    others = reference["training"][run["first_step"] - reference["first_step"] :]
    return max(abs(loss / other - 1) for loss, other in zip(run["training"], others, strict=True))


def _power(value: float) -> str:
    if value == 0:
        return "the same bits"
    return f"{100 * value:.2f}%" if value > 1e-4 else f"{value:.0e}"
