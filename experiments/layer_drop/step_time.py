"""How much of a step's time layer drop saves, once θ has settled: a stack of layers alone, and the whole training step.

Steps with and without take turns, and every step with drop is paired with the one before it without: what else the
machine does cancels. Which layers a step keeps is chance, so times are fitted over the number of kept layers and read
where the formula expects it.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from experiments.layer_drop.learning import KeepRates
from experiments.tasks.batches import random_batch
from experiments.tasks.models import build_pre_ln_bert
from experiments.tasks.sizes import BertSize
from experiments.training.learners import parameter_groups
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers, keep_probability

__all__ = ["Saving", "Workload", "count_kept", "expected_kept", "measure_keep_rates", "measure_savings"]

_VOCABULARY = 4096
_RATE = 1e-4
_WARM_UP_ROUNDS = 2
# θ(t) - θ is 1e-9 of what it was at the first of these steps.
_GAMMA, _SETTLED = 1.0, 21


@dataclass(frozen=True)
class Workload:
    """What a step computes: BERT of this size on `sequences` of `length` tokens; θ is where the schedule settles."""

    size: BertSize
    sequences: int
    length: int
    theta: float


@dataclass(frozen=True)
class Saving:
    """Time with layer drop beside the time without, in pairs of steps.

    Attributes:
        layers: of the stack.
        kept: layers that each step with drop kept.
        seconds: of those steps.
        seconds_without: of the steps without drop, in the same order.
        ratio: time with drop over time without, where as many layers are kept as the formula expects.
        expected: that number of layers over all layers: the floor of the stack's ratio.
        a_layer: by how much one kept layer raises the ratio.
    """

    layers: int
    kept: list[int]
    seconds: list[float]
    seconds_without: list[float]
    ratio: float
    expected: float
    a_layer: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float, float]], layers: int, theta: float) -> Saving:
        """From triples of kept layers, seconds with drop and seconds without.

        Medians by number of kept layers, whose line is weighted by how many steps each stands for.
        """
        kept, seconds, without = (list(column) for column in zip(*pairs, strict=True))
        ratios = np.asarray(seconds) / np.asarray(without)
        numbers, counts = np.unique(kept, return_counts=True)
        medians = np.array([np.median(ratios[np.asarray(kept) == number]) for number in numbers])
        expected = expected_kept(layers, theta)
        weights = counts / counts.sum()
        centre, middle = weights @ numbers, weights @ medians
        spread = weights @ (numbers - centre) ** 2
        slope = float(weights @ ((numbers - centre) * (medians - middle)) / spread) if spread else 1 / layers
        ratio = float(middle + slope * (expected - centre))
        return cls(layers, kept, seconds, without, ratio, expected / layers, slope)


def expected_kept(layers: int, theta: float) -> float:
    """How many of the layers a step keeps in the mean, by the formula."""
    return sum(keep_probability(layer, layers, theta) for layer in range(1, layers + 1))


def measure_savings(workload: Workload, rounds: int) -> dict[str, Saving]:
    """The savings of "the stack" and "the whole step" over so many rounds, all in one process and in turns.

    The stack: forward and backward of the layers alone. The whole step: also embedding, output head, loss and AdamW.
    """
    torch.manual_seed(0)
    plain = build_pre_ln_bert(workload.size, _VOCABULARY, workload.length, 0.0, seed=0)
    dropping = copy.deepcopy(plain)
    schedule = ProgressiveLayerDrop(workload.theta, _GAMMA)
    drop = drop_layers(dropping, schedule)
    batch = random_batch(workload.sequences, workload.length, _VOCABULARY, seed=0)
    hidden = torch.randn(workload.sequences, workload.length, workload.size.width)
    steps = {
        "the stack": (_stack_step(plain, hidden), _stack_step(dropping, hidden)),
        "the whole step": (_whole_step(plain, batch), _whole_step(dropping, batch)),
    }
    pairs: dict[str, list[tuple[int, float, float]]] = {name: [] for name in steps}
    number = _SETTLED
    for round_number in range(-_WARM_UP_ROUNDS, rounds):
        for name, (without_drop, with_drop) in steps.items():
            without = _seconds(without_drop)
            number += 1
            schedule.update_state(number)
            seconds = _seconds(with_drop)
            if round_number >= 0:
                pairs[name].append((count_kept(drop), seconds, without))
        if (round_number + 1) % max(1, rounds // 5) == 0 and round_number >= 0:
            print(f"step time: round {round_number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {name: Saving.of(pair, workload.size.layers, workload.theta) for name, pair in pairs.items()}


def measure_keep_rates(layers: int, theta: float, steps: int) -> KeepRates:
    """How often gates keep each layer of a stack over so many steps with a settled θ."""
    stack = [nn.Identity() for _ in range(layers)]
    schedule = ProgressiveLayerDrop(theta, _GAMMA)
    drop = drop_layers(stack, schedule, seed=1)
    hidden = torch.ones(1)
    for step in range(_SETTLED, _SETTLED + steps):
        schedule.update_state(step)
        for layer in stack:
            layer(hidden)
    return KeepRates.of(drop.keep_rates, [theta] * steps)


def count_kept(drop: LayerDrop) -> int:
    """How many layers the forward of this step has kept."""
    dropped = {id(parameter) for parameter in drop.dropped_parameters()}
    return sum(id(next(layer.parameters())) not in dropped for layer in drop.layers)


def _seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _stack_step(model: nn.Module, hidden: Tensor) -> Callable[[], None]:
    """Forward and backward of the layers, for hidden states that want a gradient, as embeddings' do."""
    encoder = model.get_submodule("roberta_prelayernorm.encoder")
    d_output = torch.randn_like(hidden)

    def step() -> None:
        given = hidden.clone().requires_grad_()
        encoder(given)[0].backward(d_output)
        encoder.zero_grad()

    return step


def _whole_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=_RATE, fused=True)

    def step() -> None:
        total, count = model(*batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
