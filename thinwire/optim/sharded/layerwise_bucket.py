"""One bucket of sharded 1-bit LAMB once the variance is frozen: 1-bit Adam's, with layers scaled alike on the wire, a
fresh variance on the owner's shard, and the sums from which the layers' coefficients follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.optim.formulas import AdamSettings, track_variances
from thinwire.optim.lamb.formulas import Layer, begin_fresh, greatest_growths
from thinwire.optim.lamb.master_weights import square_norms
from thinwire.optim.sharded.packed_bucket import FrozenBucket, StepSettings
from thinwire.optim.sharded.packing import FrozenState
from thinwire.zero import Piece, PieceSource
from thinwire.zero.flat_bucket import FlatBucket, Run
from thinwire.zero.master_weights import BucketMasters

__all__ = ["FrozenLambBucket"]

_FRESH = "exp_avg_sq_fresh"


class FrozenLambBucket(FrozenBucket):
    """FrozenBucket whose u is s · m / (√v̂ + ε), s the layer's scale, and moves weights by u/s and decay alike, times
    the layer's coefficient.

    `layers` and `coefficients`, by parameter, are read when a step needs them. `fresh_state`: the fresh variance over
    the frozen denominator's square, fp32 [shard], the owner's.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        masters: BucketMasters,
        comm: Communicator,
        codec: Codec,
        settings: StepSettings,
        state: FrozenState,
        *,
        reversible: bool,
        layers: Sequence[Layer],
        coefficients: Mapping[int, float],
    ) -> None:
        super().__init__(bucket, masters, comm, codec, settings, state, reversible=reversible)
        self._layers = layers
        self._coefficients = coefficients
        self._table_by_parameter = {slot.parameter: values for slot, values in self._table_of.items()}
        self.fresh_state = torch.zeros(self.layout.shard, device=bucket.flat.device)
        for group, runs in self._runs_by_settings():
            begin_fresh(_cut(self.fresh_state, runs), self._denominators(runs), group, settings.step())

    @torch.no_grad()
    def take_over_and_measure(self, squares: Tensor, growths: Tensor) -> None:
        """Take the new u over, and write down what the layers' coefficients depend on, of the own shard.

        Adds ‖û‖² and ‖û + λw‖² to `squares`, fp64 [parameters, 2], and sets `growths`, fp64 [parameters], to the
        largest (√v̂ + ε) / (√v̂' + ε), with v' the fresh variance.
        """
        gradients = self.own_momentum()
        self.take_over()
        momentum = self.own_momentum()
        if self._holds_still:
            momentum.mul_(self.bucket.shard_of(self.codes).ne(0))
        for group, runs in self._runs_by_settings():
            self._follow_variance(group, runs, _cut(gradients, runs), _cut(momentum, runs))
            numbers = [run.parameter for run in runs]
            fresh, denominators = _cut(self.fresh_state, runs), self._denominators(runs)
            growths[numbers] = greatest_growths(fresh, denominators, group, self._settings.step() + 1).double()
            updates = _cut(momentum, runs)
            torch._foreach_div_(updates, [self._divisor_of_update(group, number) for number in numbers])
            squares[numbers, 0] += square_norms(updates)
            if group.weight_decay:
                torch._foreach_add_(updates, _cut(self._own_weights(), runs), alpha=group.weight_decay)
            squares[numbers, 1] += square_norms(updates)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """The fresh variance of this rank's shard."""
        return [
            Piece(_FRESH, names[run.parameter], run.start, self.fresh_state[run.place]) for run in self.bucket.own_runs
        ]

    def load(self, source: PieceSource, names: Sequence[str]) -> None:
        """Take over what `pieces` of all ranks, of any number, gave."""
        for run in self.bucket.own_runs:
            self.fresh_state[run.place].copy_(source.read(_FRESH, names[run.parameter], run.start, run.numel))

    # Parts

    def _divisor(self, parameter: int) -> float:
        return super()._divisor(parameter) / self._layers[parameter].scale

    def _rates(self, parameter: int) -> tuple[float, float]:
        group = self._settings.group(parameter)
        rate = group.lr * self._coefficients[parameter]
        return rate / self._divisor_of_update(group, parameter), 1 - rate * group.weight_decay

    def _divisor_of_update(self, group: AdamSettings, parameter: int) -> float:
        """What u is divided by to be m̂ / (√v̂ + ε)."""
        return self._layers[parameter].scale * group.first_correction(self._settings.step() + 1)

    def _follow_variance(
        self, group: AdamSettings, runs: Sequence[Run], before: list[Tensor], after: list[Tensor]
    ) -> None:
        """Take (m_t - β₁ m_{t-1}) / (1 - β₁) into the fresh variance; spends `before`, u of the step before."""
        torch._foreach_mul_(before, -group.beta1)
        torch._foreach_add_(before, after)
        torch._foreach_div_(before, [(1 - group.beta1) * self._layers[run.parameter].scale for run in runs])
        track_variances(before, _cut(self.fresh_state, runs), group)

    def _runs_by_settings(self) -> list[tuple[AdamSettings, list[Run]]]:
        runs_of: dict[AdamSettings, list[Run]] = {}
        for run in self.bucket.own_runs:
            runs_of.setdefault(self._settings.group(run.parameter), []).append(run)
        return list(runs_of.items())

    def _denominators(self, runs: Sequence[Run]) -> list[Tensor]:
        """√v̂ + ε as the preconditioner has it, infinite where coordinates stay."""
        codes = _cut(self.bucket.shard_of(self.codes), runs)
        return [
            self._table_by_parameter[run.parameter][code.int()].reciprocal_()
            for run, code in zip(runs, codes, strict=True)
        ]

    def _own_weights(self) -> Tensor:
        weights = self._masters.weights
        own = self.bucket.shard_of(weights) if self._masters.whole else weights
        return own.to(self.fresh_state.device)


def _cut(shard: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    return [shard[run.place] for run in runs]
