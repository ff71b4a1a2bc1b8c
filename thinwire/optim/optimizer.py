"""The base of the public classes: an algorithm, the home that its stage chooses, and lines on stderr that say what was
saved."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from dataclasses import fields
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.compress.kernels.loading import compiled_backend
from thinwire.optim.home import AlgorithmHome
from thinwire.optim.options import HomeKeywords, HomeOptions, Recipe
from thinwire.optim.replicated.home import ReplicatedHome
from thinwire.optim.sharded.home import AlgorithmShardedHome
from thinwire.zero.home import ring_bytes
from thinwire.zero.master_weights import ShardedParameters
from thinwire.zero.rank_checks import check_same_kind
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

_STEPS_OF_A_MEAN = 16
"""Frozen steps over which the bytes of one are averaged: those with local steps send nothing in most."""

_NOTHING_SAVED = 0.9
"""Of the bytes uncompressed."""


class SavingsReport:
    """Rank 0's, on stderr, where `comm.init()` has said there what it found: silent after `init(quiet=True)`.

    Args:
        optimizer: whose end, or the process's, is the end of the run.
        comm: its ranks.
        freezes: what says when it freezes, as in `freeze_step=1000`; empty where it compresses from the first step on.
        uncompressed: bytes that a ring all-reduce of its gradients sends in a step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, comm: Communicator, *, freezes: str, uncompressed: int
    ) -> None:
        self._name = type(optimizer).__name__
        self._freezes = freezes
        self._uncompressed_step = uncompressed
        self._steps = self._sent = self._uncompressed = 0
        self._frozen_at: int | None = None
        self._first_frozen: tuple[int, int] | None = None
        self.speaks = comm.speaks and comm.size > 1
        when = f"it freezes by {freezes}" if freezes else "it compresses from the first step on"
        self._say(f"{self._name} on {comm.size} ranks: {_amount(uncompressed)} a step uncompressed; {when}")
        self.end = weakref.finalize(optimizer, self._end, os.getpid())
        """Say what the run has saved; only once, at the latest when the process ends."""

    def note(self, steps: int, frozen_at: int | None, sent: int, uncompressed: int) -> None:
        """Take note of a step: the counts of all steps so far."""
        self._steps, self._frozen_at, self._sent, self._uncompressed = steps, frozen_at, sent, uncompressed
        if frozen_at is None or not self._freezes:
            return
        if self._first_frozen is None and steps > frozen_at:
            self._first_frozen = (steps, sent)
        elif self._first_frozen is not None and steps == self._first_frozen[0] + _STEPS_OF_A_MEAN:
            mean = (sent - self._first_frozen[1]) / _STEPS_OF_A_MEAN
            self._say(
                f"{self._name} froze after step {frozen_at}: {_amount(mean)} a step from now on instead of "
                f"{_amount(self._uncompressed_step)}"
            )

    def _end(self, process: int) -> None:
        if not self._steps or os.getpid() != process:  # which a fork leaves to its parent
            return
        if self._freezes and self._frozen_at is None and self._sent > _NOTHING_SAVED * self._uncompressed:
            self._say(
                f"{self._name} never froze in {self._steps:,} steps, so that it saved nothing to speak of: "
                f"{self._freezes} should come after about a fifth of the steps"
            )
            return
        self._say(
            f"{self._name} sent {_amount(self._sent)} in {self._steps:,} steps, "
            f"{_amount(max(0, self._uncompressed - self._sent))} less than uncompressed gradients"
        )

    def _say(self, line: str) -> None:
        if self.speaks:
            print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _amount(count: float) -> str:
    """Bytes in the unit that fits: `64 kB`, `0.13 MB`, `41 GB`."""
    size, unit = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    value = count / size
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.0f} {unit}"


class CompressedOptimizer(SynchronizedOptimizer):
    """A SynchronizedOptimizer that averages exactly until it freezes, and compresses from then on.

    Raises:
        ValueError: bad hyperparameters, no parameters, or ranks that do not hold the same ones; on every rank.
        TypeError: complex, integer or fp64 parameters, or parameters on several devices.
    """

    _home: AlgorithmHome

    def __init__(self, params: ParamsT, defaults: dict[str, Any], recipe: Recipe, options: HomeKeywords) -> None:
        name = type(self).__name__
        error: Exception | None = None
        if unknown := sorted(options.keys() - {one.name for one in fields(HomeOptions)}):
            known = ", ".join(inspect.signature(type(self)).parameters)
            raise TypeError(f"{name} takes no {', '.join(unknown)}; what it takes: {known}")
        chosen = HomeOptions(**options)
        try:
            recipe.check()
            chosen.check(name, recipe.stages, recipe.algorithm().form.packs)
            recipe.check_group({"params": [], **defaults})
            defaults["betas"] = tuple(defaults["betas"])
            recipe.rule(defaults["betas"][1])
            super().__init__(params, defaults)
            for group in self.param_groups:
                recipe.check_group(group)
        except (ValueError, TypeError) as raised:
            error = raised
        self.comm = chosen.comm or communication.init(backend=chosen.comm_backend_name)
        raise_together(self.comm, error, "build its optimizer")
        check_same_kind(self.comm, name, chosen.stage)
        self.stage = chosen.stage
        self.max_norm = chosen.clips_to
        home: AlgorithmHome
        if self.stage == 0:
            home = ReplicatedHome(self, self.comm, chosen, recipe)
        else:
            sharded = ShardedParameters(
                self.comm,
                self.param_groups,
                chosen.named_parameters,
                chosen.sharding,
                optimizer=name,
                settings={**chosen.compared(), **recipe.settings, **recipe.schedule},
            )
            home = AlgorithmShardedHome(sharded, chosen, recipe)
        self._move_in(home, chosen.averaging.times_mean(self.comm.size))
        freezes = [f"{option}={value!r}" for option, value in recipe.schedule.items() if "freeze_step" in option]
        held = [one for group in self.param_groups for one in group["params"]]
        for device in {one.device for one in held if one.is_cuda}:
            compiled_backend(device.type)  # compression begins hours later, too late to tell that there is no compiler
        uncompressed = ring_bytes(self.comm.size, [one for one in held if one.requires_grad])
        self._savings = SavingsReport(self, self.comm, freezes="".join(freezes), uncompressed=uncompressed)
        if self._savings.speaks:
            self.register_step_post_hook(self._note_step)

    def __init_subclass__(cls) -> None:
        """Show the keyword arguments that all of them take in the class's signature, for `help` and editors."""
        super().__init_subclass__()
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        given = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        named = {one.name for one in given}
        shared = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for one in fields(HomeOptions)
            if one.name not in named and len(given) < len(own)
        ]
        cls.__signature__ = inspect.Signature([*given, *shared])  # type: ignore[attr-defined]

    @staticmethod
    def _note_step(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        assert isinstance(optimizer, CompressedOptimizer)
        sent = optimizer.bytes_sent, optimizer.bytes_uncompressed
        optimizer._savings.note(optimizer.steps, optimizer.frozen_at, *sent)

    @override
    def close(self) -> None:
        self._savings.end()
        super().close()

    @property
    def frozen(self) -> bool:
        """Whether every parameter's steps are compressed, so that they send one bit an element or nothing."""
        return self._home.frozen
