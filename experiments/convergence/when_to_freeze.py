"""When 1-bit Adam may freeze: how the variance grows tensor by tensor in a run of AdamW, where "auto" would freeze it,
and what runs that freeze at given steps end at. In this process, ranks are threads.

    python -m experiments.convergence.when_to_freeze --task tiny --steps 2500 --recorded 1300
    python -m experiments.convergence.when_to_freeze --task digits --steps 600 --freeze never 60 120 auto --seeds 3
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from experiments.convergence.subjects import SUBJECTS
from experiments.tasks.corpus import load
from experiments.tasks.language import MaskedLanguageTask
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import share_tokens
from experiments.training.plans import Plan
from experiments.training.trainer import Task
from thinwire import OneBitAdam
from thinwire.comm import Communicator, threads
from thinwire.optim.algorithm import make_freeze_rule

__all__ = ["main"]

_NEVER = 10**9
_RANKS = 4
_SEQUENCES = 32  # of all ranks
_LOOKS_EVERY = 10
_VOCABULARY = {"tiny": 4096, "mini": 1024}
"""With 4096 tokens BERT-mini does not leave its plateau in a thousand steps."""


def main() -> None:
    """Show the growth of the variance, and with `--freeze` the losses of runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=("digits", "tiny", "mini"), default="tiny")
    parser.add_argument("--steps", type=int, default=1200, help="of the schedule, a tenth of them warmup")
    parser.add_argument(
        "--recorded", type=int, default=0, metavar="STEPS", help="of AdamW, whose variance is looked at"
    )
    parser.add_argument("--freeze", nargs="*", default=[], help='of each run: a step, "auto" or "never"')
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=_RANKS)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the schedule's highest")
    typed = parser.parse_args()
    task, ranks = _task(typed.task, typed.ranks), typed.ranks

    def plan(seed: int, freeze: Any) -> Plan:
        return Plan(typed.steps, typed.steps // 10, typed.learning_rate, 0.01, freeze, typed.steps, seed)

    if typed.recorded:
        _show_growth(task, plan(0, _NEVER), ranks, typed.recorded)
    for seed in range(typed.seeds):
        for freeze in typed.freeze:
            when = _NEVER if freeze == "never" else freeze if freeze == "auto" else int(freeze)
            (loss, frozen_at), *_ = threads.run(lambda comm, s=seed, f=when: _run(task, plan(s, f), comm), ranks)
            print(f"seed {seed}, freeze {freeze}: frozen at {frozen_at}, validation loss {loss:.4f}", flush=True)


def _task(name: str, ranks: int) -> Task[Any]:
    alone = threads.single(60.0)
    if name == "digits":
        return SUBJECTS["digits"](alone, None).task
    tokens = share_tokens(alone, lambda: load(None), _VOCABULARY[name], 32, 1024)
    return MaskedLanguageTask(tokens, SIZES[name], _SEQUENCES // ranks, dropout=0.0)


def _groups(model: torch.nn.Module, plan: Plan) -> list[dict[str, Any]]:
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() <= 1]
    return [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _run(task: Task[Any], plan: Plan, comm: Communicator) -> tuple[float, int | None]:
    """The final validation loss, and where it froze."""
    model = task.build_model(plan.seed)
    optimizer = OneBitAdam(_groups(model, plan), lr=plan.learning_rate, freeze_step=plan.freeze_step, comm=comm)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        optimizer.zero_grad()
        task.training_loss(model, plan.seed, step, comm.rank, comm.size).backward()
        optimizer.step()
    summed = torch.tensor(task.validation_sum(model, comm.rank, comm.size), dtype=torch.float64)
    comm.all_reduce(summed)
    return float(summed[0] / summed[1]), optimizer.frozen_at


def _variances(task: Task[Any], plan: Plan, ranks: int, steps: int) -> Iterator[tuple[int, float, list[float]]]:
    """Of AdamW at every look: the step, its rate, and each tensor's bias-corrected variance, summed."""
    model = task.build_model(plan.seed)
    optimizer = torch.optim.AdamW(_groups(model, plan), lr=plan.learning_rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        optimizer.zero_grad()
        for rank in range(ranks):
            (task.training_loss(model, plan.seed, step, rank, ranks) / ranks).backward()
        optimizer.step()
        if (step + 1) % _LOOKS_EVERY == 0:
            sums = [float(state["exp_avg_sq"].double().sum()) for state in optimizer.state.values()]
            yield step + 1, plan.rate_at(step), [one / (1 - 0.999 ** (step + 1)) for one in sums]


def _show_growth(task: Task[Any], plan: Plan, ranks: int, steps: int) -> None:
    """By what the total, the median tensor, the third quartile and the ninth decile grow over a fifth of the steps; and
    the freeze."""
    rule, seen, frozen = make_freeze_rule("auto", 0.999), dict[int, list[float]](), False
    print("step   total  median  third quartile  ninth decile")
    for step, rate, norms in _variances(task, plan, ranks, steps):
        seen[step] = norms
        earlier = [one for one in seen if one <= step - max(20, step / 5)]
        if earlier and step % (5 * _LOOKS_EVERY) == 0:
            growth = sorted(now / before for now, before in zip(norms, seen[max(earlier)], strict=True) if before)
            total = sum(norms) / sum(seen[max(earlier)])
            print(
                f"{step:5}  {total:6.2f}  {_at(growth, 0.5):6.2f}  {_at(growth, 0.75):14.2f}  {_at(growth, 0.9):12.2f}",
                flush=True,
            )
        if not frozen and rule.reached(step, [rate], lambda found=norms: found):
            print(f'"auto" freezes at {step}', flush=True)
            frozen = True


def _at(ordered: Sequence[float], part: float) -> float:
    return ordered[math.ceil(part * len(ordered)) - 1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
