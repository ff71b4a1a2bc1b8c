"""What the public classes have in common: an algorithm, and the home that its stage chooses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, overload

from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.compress.kernels import prepare
from thinwire.optim.algorithm import Linear
from thinwire.optim.algorithm_home import AlgorithmHome
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home_options import HomeKeywords, HomeOptions
from thinwire.optim.recipe import Recipe
from thinwire.optim.replicated.home import ReplicatedHome
from thinwire.optim.savings import SavingsReport
from thinwire.optim.sharded.full_home import FullHome
from thinwire.optim.sharded.packed_home import PackedHome
from thinwire.zero.home import ring_bytes
from thinwire.zero.rank_checks import check_same_kind
from thinwire.zero.sharded_parameters import ShardedParameters
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["CompressedOptimizer"]


class CompressedOptimizer(SynchronizedOptimizer):
    """A SynchronizedOptimizer that averages exactly until it freezes, and compresses from then on.

    Raises:
        ValueError: bad hyperparameters, no parameters, or ranks that do not hold the same ones; on every rank.
        TypeError: complex, integer or fp64 parameters, or parameters on several devices.
    """

    _home: AlgorithmHome

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        recipe: Recipe,
        options: HomeKeywords,
    ) -> None:
        name = type(self).__name__
        error: Exception | None = None
        if unknown := sorted(options.keys() - {one.name for one in fields(HomeOptions)}):
            known = ", ".join(inspect.signature(type(self)).parameters)
            raise TypeError(f"{name} takes no {', '.join(unknown)}; what it takes: {known}")
        chosen = HomeOptions(**options)
        try:
            recipe.check()
            chosen.check(name, recipe.stages, isinstance(recipe.algorithm(), Linear))
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
        home = self._replicated(recipe, chosen) if self.stage == 0 else self._sharded(recipe, chosen)
        self._move_in(home, chosen.averaging.times_mean(self.comm.size))
        freezes = [f"{option}={value!r}" for option, value in recipe.schedule.items() if "freeze_step" in option]
        held = [one for group in self.param_groups for one in group["params"]]
        for device in {one.device for one in held if one.is_cuda}:
            prepare(device)  # compression begins hours later, where a missing compiler is told too late
        uncompressed = ring_bytes(self.comm.size, [one for one in held if one.requires_grad])
        self._savings = SavingsReport(self, self.comm, freezes="".join(freezes), uncompressed=uncompressed)

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

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See SynchronizedOptimizer."""
        loss: float | None = super().step(closure)
        if self.comm.speaks:
            self._savings.note(self.steps, self.frozen_at, self.bytes_sent, self.bytes_uncompressed)
        return loss

    def close(self) -> None:
        """See SynchronizedOptimizer."""
        self._savings.end()
        super().close()

    @property
    def frozen(self) -> bool:
        """Whether every parameter's steps are compressed, so that they send one bit an element or nothing."""
        return self._home.frozen

    def _replicated(self, recipe: Recipe, options: HomeOptions) -> AlgorithmHome:
        return ReplicatedHome(self, self.comm, options, recipe, self._rule(recipe))

    def _sharded(self, recipe: Recipe, options: HomeOptions) -> AlgorithmHome:
        algorithm = recipe.algorithm()
        agreed = {**options.compared(), **recipe.settings, **recipe.schedule}
        parameters = ShardedParameters(
            self.comm,
            self.param_groups,
            options.named_parameters,
            options.sharding,
            optimizer=type(self).__name__,
            settings=agreed,
        )
        home = PackedHome if isinstance(algorithm, Linear) else FullHome
        return home(parameters, options, recipe, self._rule(recipe))

    def _rule(self, recipe: Recipe) -> Callable[[], FreezeRule | None]:
        return lambda: recipe.rule(max(group["betas"][1] for group in self.param_groups))
