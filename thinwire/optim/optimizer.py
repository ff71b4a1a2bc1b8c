"""The base of the public classes: an algorithm, the home that its stage chooses, and lines on stderr that say what was
saved."""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.comm import Communicator, threads
from thinwire.comm.agreement import check_same_on_every_rank, raise_together
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import join
from thinwire.compress.codecs import make_codec
from thinwire.compress.kernels.loading import compiled_backend, prepare_kernels, wait_for_kernels
from thinwire.compress.packet_layout import shard_numel
from thinwire.optim.algorithm import Algorithm, FreezeStep, LocalSteps
from thinwire.optim.home import AlgorithmHome
from thinwire.optim.options import HomeKeywords, HomeOptions, Recipe, earliest_freeze, find_peak
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
        recipe: what says when it freezes; another one may take its place. None if there is nothing to freeze.
        uncompressed: bytes that a ring all-reduce of its gradients sends in a step.
        otherwise: what it does if there is nothing to freeze.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        *,
        recipe: Recipe | None,
        uncompressed: int,
        otherwise: str = "it compresses from the first step on",
    ) -> None:
        self._name = type(optimizer).__name__
        self.recipe = recipe
        self._uncompressed_step = uncompressed
        self._steps = self._sent = self._uncompressed = 0
        self._frozen_at: int | None = None
        self._peak = 0
        self._first_frozen: tuple[int, int] | None = None
        self.speaks = comm.speaks and comm.size > 1
        when = f"it freezes by {self._freezes}" if self._freezes else otherwise
        self._say(f"{self._name} on {comm.size} ranks: {_amount(uncompressed)} a step uncompressed; {when}")
        if self.speaks:
            optimizer.register_step_post_hook(self._note)
        self.end = weakref.finalize(optimizer, self._end, os.getpid())
        """Say what the run has saved; only once, at the latest when the process ends."""

    @property
    def _freezes(self) -> str:
        if self.recipe is None or self.recipe.freeze_step is None:
            return ""
        return f"{self.recipe.freeze_option}={self.recipe.freeze_step!r}"

    def _note(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Take note of a step: the counts of all steps so far, and the step with the highest rate."""
        assert isinstance(optimizer, SynchronizedOptimizer)
        steps, sent, frozen_at = optimizer.steps, optimizer.bytes_sent, None
        self._steps, self._sent, self._uncompressed = steps, sent, optimizer.bytes_uncompressed
        if isinstance(optimizer, CompressedOptimizer):
            self._frozen_at = frozen_at = optimizer.frozen_at
            self._peak = max((group.peak.step for group in optimizer._home.groups), default=0)
        if frozen_at is None or not self._freezes:
            return
        if self._first_frozen is None and steps > frozen_at:
            self._first_frozen = (steps, sent)
        elif self._first_frozen is not None and steps == self._first_frozen[0] + _STEPS_OF_A_MEAN:
            mean = (sent - self._first_frozen[1]) / _STEPS_OF_A_MEAN
            saves = mean < self._uncompressed_step
            instead = "instead of" if saves else "and saves nothing: uncompressed gradients are"
            self._say(
                f"{self._name} froze after step {frozen_at}: {_amount(mean)} a step from now on {instead} "
                f"{_amount(self._uncompressed_step)}"
            )

    def _end(self, process: int) -> None:
        if not self._steps or os.getpid() != process:  # which a fork leaves to its parent
            return
        if self._freezes and self._frozen_at is None and self._sent > _NOTHING_SAVED * self._uncompressed:
            self._say(
                f"{self._name} never froze in {self._steps:,} steps, so that it saved nothing to speak of: "
                + self._advice()
            )
            return
        saved = self._uncompressed - self._sent
        self._say(
            f"{self._name} sent {_amount(self._sent)} in {self._steps:,} steps, "
            f"{_amount(saved) if saved > 0 else 'no'} less than uncompressed gradients"
        )

    def _advice(self) -> str:
        assert self.recipe is not None
        if self.recipe.freeze_step == "auto":
            return "the variance had not settled, after which freeze_step='auto' freezes"
        step = max(self._peak, math.ceil(self._steps / 5))
        auto = " or 'auto'" if self.recipe.freeze_option == "freeze_step" else ""
        return (
            f"{self._freezes} comes after the end. {step:,}{auto} would not, and neither before the learning rate is "
            "at its highest nor before a fifth of the steps"
        )

    def _say(self, line: str) -> None:
        if self.speaks:
            print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _amount(count: float) -> str:
    """Bytes in the unit that fits: `64 kB`, `0.13 MB`, `41 GB`."""
    size, unit = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    value = count / size
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.0f} {unit}"


class FreezeOption:
    """The option that says when the warmup ends, as an attribute that can be set until it has ended: on every rank,
    which is collective.

    Raises ValueError, on every rank, for what is no step to come, or differs between ranks, and RuntimeError once all
    parameters are frozen.
    """

    @overload
    def __get__(self, optimizer: None, owner: object) -> Self: ...
    @overload
    def __get__(self, optimizer: CompressedOptimizer, owner: object) -> FreezeStep: ...
    def __get__(self, optimizer: CompressedOptimizer | None, owner: object) -> Self | FreezeStep:
        """Read it."""
        if optimizer is None:
            return self
        step = optimizer._home.recipe.freeze_step
        assert step is not None
        return step

    def __set__(self, optimizer: CompressedOptimizer, step: FreezeStep) -> None:
        """Have parameters that are not frozen yet freeze then."""
        home, error = optimizer._home, None
        recipe = replace(home.recipe, freeze_step=step)
        option = recipe.freeze_option
        taken = max((one.clock.steps for one in home.groups if not one.clock.frozen), default=0)
        try:
            recipe.rule(0.0)
            if home.frozen:
                raise RuntimeError(
                    f"{option}={step!r} comes too late: the optimizer has been frozen since step {home.frozen_at}"
                )
            if isinstance(step, int) and step <= taken:
                raise ValueError(f"{option}={step} has passed: {taken} steps were taken. Give a later one")
        except (ValueError, RuntimeError) as raised:
            error = raised
        raise_together(optimizer.comm, error, f"set {option}")
        check_same_on_every_rank(optimizer.comm, [], [], {option: step})
        home.recipe = optimizer._savings.recipe = recipe


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
            chosen.check(name, recipe.stages, recipe.algorithm())
            recipe.check_group({"params": [], **defaults})
            defaults["betas"] = tuple(defaults["betas"])
            recipe.rule(defaults["betas"][1])
            super().__init__(params, defaults)
            for group in self.param_groups:
                recipe.check_group(group)
        except (ValueError, TypeError) as raised:
            error = raised
        elastic = chosen.elastic if isinstance(chosen.elastic, Elastic) else None
        if elastic is not None:
            self.comm, self.comes_and_goes = threads.single(elastic.timeout), True
        else:
            self.comm = join(chosen.comm, chosen.mesh, chosen.comm_backend_name)
        raise_together(self.comm, error, "build its optimizer")
        check_same_kind(self.comm, name, chosen.stage)
        held = [one for group in self.param_groups for one in group["params"]]
        # A share of a small model would be padded to a block: a LoRA of 8 KB would send 8 times that on 8 ranks.
        share = shard_numel(sum(one.numel() for one in held if one.requires_grad), self.comm.size, 64)
        chosen = replace(chosen, block_size=min(chosen.block_size, share))
        self.stage = chosen.stage
        self.max_norm = chosen.clips_to
        home: AlgorithmHome
        if self.stage == 0:
            home = ReplicatedHome(self, self.comm, chosen, recipe)
        else:
            compared = {**chosen.compared(), **recipe.compared}
            sharded = ShardedParameters(self, self.comm, chosen.named_parameters, chosen.sharding, compared)
            home = AlgorithmShardedHome(sharded, chosen, recipe)
        self._move_in(home, chosen.averaging.times_mean(self.comm.size))
        for device in {one.device for one in held if one.is_cuda}:
            compiled_backend(device.type)  # compression begins hours later, too late to tell that there is no compiler
        self._prepare_kernels(recipe.algorithm(), chosen, held)
        uncompressed = ring_bytes(self.comm.size, [one for one in held if one.requires_grad])
        self._savings = SavingsReport(self, self.comm, recipe=recipe, uncompressed=uncompressed)

    def _prepare_kernels(self, algorithm: Algorithm, options: HomeOptions, held: Sequence[Tensor]) -> None:
        """Have what compressed steps call compiled beside the warmup, or now if there is none."""
        device, form, local = held[0].device.type, algorithm.form, isinstance(algorithm, LocalSteps)
        narrow = self.stage > 0 and (options.param_dtype or held[0].dtype) != torch.float32
        if not make_codec(options.codec, options.block_size).has_kernels:
            return
        names = ["average_and_encode"]
        if form.packs and self.stage:
            packed = options.codec == "sign1"
            names += ["encode", *(("encode_packed_payload", "move_packed") if packed else ("decode", "store_rounded"))]
            names += [] if packed or not narrow else ["encode_rounded"]
            names += ["decode"] if packed and form.update is None else []
        else:
            names += ["encode_rounded", "store_rounded"] if narrow else ["encode" if local else "encode_payload"]
            names += ["decode" if local or form.update is None else "decode_and_move"]
        prepare_kernels(device, names)
        if local or not algorithm.freezes:
            wait_for_kernels(device)

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

    @override
    def close(self) -> None:
        self._savings.end()
        super().close()

    def check_schedule(self, schedule: Any, total_steps: int | None = None, every: int = 1) -> None:
        """Raise ValueError if a step that was given to freeze after comes too early: before `schedule` has its highest
        learning rate, or in the first of `total_steps`; warn, on rank 0, if it comes after all of these.

        `schedule`: None for a constant rate. `every`: steps between two of the schedule's. One that cannot be foreseen
        passes: the freeze itself then warns.
        """
        recipe, done = self._home.recipe, self.steps
        step, option = recipe.freeze_step, recipe.freeze_option
        if not isinstance(step, int) or self.frozen:
            return
        if total_steps is not None and step >= total_steps:
            if option == "freeze_step" and self.comm.size > 1 and self.comm.rank == 0:
                warnings.warn(
                    f"{option}={step:,} comes after the end of this run of {total_steps:,} steps, none of which will "
                    "be compressed: give an earlier step, or 'auto'",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return
        ahead = math.ceil(((2 * step if total_steps is None else total_steps) - done) / every)
        highest = None if schedule is None else find_peak(schedule, ahead)
        peak = 1 if highest is None else done + (highest - 1) * every + 1
        earliest = earliest_freeze(peak, total_steps or 0, max(group["betas"][1] for group in self.param_groups))
        if step < earliest:
            within = f"in the learning rate's warmup, which rises until step {peak}"
            early = f"after too few of {total_steps} steps"
            auto = ", or 'auto', which finds a step" if option == "freeze_step" else ""
            raise ValueError(
                f"{option}={step} freezes the variance {within if step < peak else early}: a model that trains on with "
                f"the variance of its first steps learns little. Give {option}={earliest} or later{auto}"
            )

    @property
    def optimizer(self) -> Self:
        """This optimizer, for scripts that expect another one around it."""
        return self

    @property
    def frozen(self) -> bool:
        """Whether every parameter's steps are compressed, so that they send one bit an element or nothing."""
        return self._home.frozen

    @property
    def workers(self) -> int:
        """How many ranks average gradients; of an elastic job, since the last step."""
        elastic = self._home.workers if isinstance(self._home, ReplicatedHome) else None
        return self.comm.size if elastic is None else elastic.comm.size
