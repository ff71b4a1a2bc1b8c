"""What the runs and step times of `experiments.layer_drop` say: figures for the JSON, sentences for the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from experiments.layer_drop.learning import DROPPING, POST_LN, PRE_LN, Curve, KeepRates
from experiments.layer_drop.step_time import Saving
from experiments.training.findings import deviation

__all__ = ["Finding", "Run", "find", "largest_error"]


@dataclass(frozen=True)
class Run:
    """A finished run: what it was, its validation losses, and how often it kept each layer, if it dropped any."""

    system: str
    learning_rate: float
    seed: int
    parameters: int
    curve: Curve
    keep_rates: KeepRates | None


@dataclass(frozen=True)
class Finding:
    """What was found. Losses are validation losses at the end, in nats a masked token.

    Attributes:
        learning_rate: at which runs have several seeds.
        final_loss: at that rate, mean over the seeds, by system.
        deviation: standard deviation of it.
        loss_difference: of layer drop from pre-LN, relative, of those means.
        time_ratio: training time of as many steps with drop over without, at that rate, all seeds together.
        stack: step time of the stack with drop over without, and `stack_floor`, the fraction of layers that is kept.
        whole_step: the same of the whole step.
        keep_rate_error: of the layers' measured keep-rates from the formula, the largest, in standard errors.
        loss_by_rate: of the first seed, by system and learning rate; None where training broke down.
        sooner: time that a baseline took to its final loss over the time until layer drop had that loss, at layer
            drop's quickest rate; None where it never had. By baseline: pre-LN and post-LN at `learning_rate`, and each
            at the rate where it ends lowest.
        quickest_rate: that rate of layer drop, for pre-LN at `learning_rate`.
    """

    learning_rate: float
    final_loss: dict[str, float]
    deviation: dict[str, float]
    loss_difference: float
    time_ratio: float
    stack: float
    stack_floor: float
    whole_step: float
    keep_rate_error: float
    loss_by_rate: dict[str, dict[str, float | None]]
    sooner: dict[str, float | None]
    quickest_rate: float

    @property
    def sentences(self) -> list[str]:
        """The findings, one a line."""
        again = self.sooner[f"{PRE_LN}, the same rate"]
        best = self.sooner[f"{PRE_LN}, its best rate"]
        return [
            f"Layer drop takes {self.stack:.2f} of the layers' time, {self.whole_step:.2f} of the step's; at equal "
            f"samples its loss is {100 * self.loss_difference:+.1f}%",
            f"At rate {self.quickest_rate:g} the baseline's final loss (rate {self.learning_rate:g}) is "
            f"{_arrival(again)}; that of its own best rate is {_arrival(best)}",
        ]


def find(runs: Sequence[Run], learning_rate: float, savings: Mapping[str, Saving], keep_rates: KeepRates) -> Finding:
    """Computes the figures; `learning_rate` is the one at which runs have several seeds."""
    usual = {
        system: [run for run in runs if run.system == system and run.learning_rate == learning_rate]
        for system in (PRE_LN, DROPPING)
    }
    final = {system: [run.curve.losses[-1] for run in of_system] for system, of_system in usual.items()}
    seconds = {system: sum(run.curve.seconds[-1] for run in of_system) for system, of_system in usual.items()}
    first = [run for run in runs if run.seed == min(run.seed for run in runs)]
    dropping = [run for run in first if run.system == DROPPING]
    baselines = {}
    for system in (PRE_LN, POST_LN):
        of_system = [run for run in first if run.system == system]
        baselines[f"{system}, the same rate"] = next(run for run in of_system if run.learning_rate == learning_rate)
        baselines[f"{system}, its best rate"] = min(of_system, key=_final_or_infinite)
    quickest = {name: _quickest(dropping, baseline) for name, baseline in baselines.items()}
    return Finding(
        learning_rate=learning_rate,
        final_loss={system: mean(losses) for system, losses in final.items()},
        deviation={system: deviation(losses) for system, losses in final.items()},
        loss_difference=mean(final[DROPPING]) / mean(final[PRE_LN]) - 1,
        time_ratio=seconds[DROPPING] / seconds[PRE_LN],
        stack=savings["the stack"].ratio,
        stack_floor=savings["the stack"].expected,
        whole_step=savings["the whole step"].ratio,
        keep_rate_error=largest_error(keep_rates),
        loss_by_rate={
            system: {
                f"{run.learning_rate:g}": _finite(run.curve.losses[-1])
                for run in sorted(first, key=lambda run: run.learning_rate)
                if run.system == system
            }
            for system in (POST_LN, PRE_LN, DROPPING)
        },
        sooner={name: factor for name, (factor, _) in quickest.items()},
        quickest_rate=quickest[f"{PRE_LN}, the same rate"][1],
    )


def largest_error(rates: KeepRates) -> float:
    """Of measured keep-rates from the formula, in standard errors; layers that are always kept have none."""
    return max(
        (
            abs(measured - formula) / error
            for measured, formula, error in zip(rates.measured, rates.formula, rates.standard_error, strict=True)
            if error
        ),
        default=0.0,
    )


def _quickest(dropping: Sequence[Run], baseline: Run) -> tuple[float | None, float]:
    """By which factor sooner some run had the baseline's final loss, and that run's rate; or the lowest run's rate."""
    target, whole = baseline.curve.losses[-1], baseline.curve.seconds[-1]
    times = {run.learning_rate: run.curve.seconds_to(target) for run in dropping}
    reached = {rate: seconds for rate, seconds in times.items() if seconds}
    if not reached:
        return None, min(dropping, key=_final_or_infinite).learning_rate
    rate = min(reached, key=reached.__getitem__)
    return whole / reached[rate], rate


def _final_or_infinite(run: Run) -> float:
    return run.curve.losses[-1] if math.isfinite(run.curve.losses[-1]) else math.inf


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _arrival(sooner: float | None) -> str:
    if sooner is None:
        return "never reached"
    return f"reached {sooner:.1f}x sooner" if sooner >= 1 else f"reached {1 / sooner:.1f}x later"
