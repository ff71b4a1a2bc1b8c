"""A task small enough to train in milliseconds, finished runs, and results that were written."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.training.optimizers import engine_section
from experiments.training.plans import Plan
from experiments.training.trainer import Curve, Outcome

REPOSITORY = Path(__file__).parents[2]

PLAN = Plan(steps=12, warmup_steps=2, learning_rate=1e-2, weight_decay=0.1, freeze_step=3, evaluate_every=2, seed=5)


class LineTask:
    """Learns a linear map with a hidden layer; everything is a function of (seed, step, rank)."""

    def build_model(self, seed: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random) / 4)
        return model

    def training_loss(self, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        return self._loss(model, 1000 * seed + 10 * step + rank, 16)

    def validation_sum(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        return 32 * self._loss(model, rank, 32).item(), 32

    def _loss(self, model: nn.Module, key: int, count: int) -> Tensor:
        inputs = torch.randn(count, 7, generator=torch.Generator().manual_seed(key))
        return (model(inputs) - inputs[:, :3]).square().mean()


def engine_config(optimizer: str, stage: int, plan: Plan = PLAN) -> dict[str, Any]:
    """The engine's configuration for `LineTask`."""
    return {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": engine_section(optimizer, plan.learning_rate, plan.freeze_step),
        "zero_optimization": {"stage": stage},
    }


def write_text(path: Path, lines: int) -> Path:
    """A file of so many lines of simple text, to learn from."""
    goods = ("apples", "bread", "candles", "dates", "eggs")
    path.write_text("".join(f"day {day}: {goods[day % 5]} and {day % 7} {goods[day % 3]}\n" for day in range(lines)))
    return path


def written(folder: Path, name: str) -> dict[str, Any]:
    """The results of an experiment, which has drawn them too and names no folder of this machine."""
    text = (folder / f"{name}.json").read_text()
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder) not in text
    content: dict[str, Any] = json.loads(text)
    return content


def outcome(final_loss: float, bytes_sent: int = 1000, frozen_at: int | None = None, seed: int = 0) -> Outcome:
    """A run of ten validations whose loss falls to `final_loss`."""
    points = range(1, 11)
    sent, losses = [bytes_sent * point // 10 for point in points], [final_loss * (2 - point / 10) for point in points]
    curve = Curve([10 * point for point in points], sent, losses)
    return Outcome(seed, 123, final_loss, bytes_sent, bytes_sent // 100, frozen_at, 1.5, curve)


def race_run(seconds_a_step: float, losses: list[float]) -> dict[str, Any]:
    """What the race records of a contender with steps of one kind, validated after every tenth."""
    steps = [10 * number for number in range(1, len(losses) + 1)]
    timed = {"stage": "exact", "bytes_sent": 100, "steps": steps[-1], "timed_seconds": [seconds_a_step]}
    return {
        "steps": steps,
        "losses": losses,
        "seconds": [seconds_a_step * step for step in steps],
        "bytes_sent": [100 * step for step in steps],
        "seconds_a_step": {"exact": seconds_a_step},
        "kinds": [timed],
        "frozen_at": None,
    }
