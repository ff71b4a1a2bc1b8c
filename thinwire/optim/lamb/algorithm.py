"""1-bit LAMB's arithmetic (Li et al. 2021, arXiv 2104.06069): LAMB while the parameters warm up, then layerwise
coefficients that follow a variance found again from the momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.optim.adam.algorithm import Adam, Compressed
from thinwire.optim.algorithm import Agreement, Clock
from thinwire.optim.formulas import AdamSettings, track_moments, track_variances
from thinwire.optim.lamb.formulas import LambSettings, Layer, begin_fresh, greatest_growths, square_norms, trust_ratio
from thinwire.optim.members import Members

__all__ = ["Lamb"]


class Lamb(Adam):
    """Adam's momentum on the wire, and a coefficient for each parameter, which is a layer.

    Once frozen, what is exchanged is s times Adam's: s = mean RMS / RMS is a constant of the layer, so that layers that
    share a block have one magnitude. `exp_avg_sq_fresh` is the fresh variance over the frozen denominator's square.
    `coefficients`: what each parameter's learning rate was multiplied by in its last step.
    """

    frozen_state: ClassVar[Mapping[str, str | None]] = {**Adam.frozen_state, "exp_avg_sq_fresh": None}
    received_as = None
    settings_class = LambSettings
    follows_variance = True

    def __init__(self, compressed: Compressed) -> None:
        super().__init__(compressed)
        self.move_rule = None  # norms of the updates come first
        self.coefficients: dict[int, float] = {}
        self._layers: dict[int, Layer] = {}
        self._rows_of: dict[tuple[int, ...], Tensor] = {}

    def scale(self, parameter: int) -> float:
        """See Algorithm."""
        return self._layer(parameter).scale

    # The warmup: LAMB

    def absorb_exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm; leaves m̂ / (√v̂ + ε) + λw in the averages' memory."""
        squares = agree.zeros(2)
        for members in groups:
            updates, settings = members.averages, members.settings
            momenta, variances = members["exp_avg"], members["exp_avg_sq"]
            track_moments(updates, momenta, variances, updates, settings, clock.steps)
            torch._foreach_reciprocal_(updates)
            torch._foreach_mul_(updates, momenta)
            torch._foreach_div_(updates, settings.first_correction(clock.steps))
            _add_decay(members)
            rows = self._rows(members, squares)
            squares[rows, 0] += square_norms(members.weights).to(squares.device)
            squares[rows, 1] += square_norms(updates).to(squares.device)
        agreed, _ = agree(squares)
        norms = agreed.sqrt().tolist()
        for parameter, settings in agree.settings.items():
            assert isinstance(settings, LambSettings)
            weight_norm, update_norm = norms[parameter]
            ratio = trust_ratio(weight_norm, update_norm, settings)
            if ratio is not None:
                self._layer(parameter).smooth(ratio, settings)
            self.coefficients[parameter] = 1.0 if ratio is None else ratio

    # The freeze

    def freeze(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm."""
        super().freeze(groups, clock, agree)
        self.begin_frozen(groups, clock)
        self.scale_momenta(groups, agree)

    def begin_frozen(self, groups: Sequence[Members], clock: Clock) -> None:
        """See Linear."""
        for members in groups:
            begin_fresh(members["exp_avg_sq_fresh"], members["denominator"], members.settings, clock.steps)

    def scale_momenta(self, groups: Sequence[Members], agree: Agreement) -> None:
        """Give the layers' momenta their mean RMS; one that is zero altogether stays so."""
        squares = agree.zeros(1)
        for members in groups:
            squares[self._rows(members, squares), 0] += square_norms(members["exp_avg"]).to(squares.device)
        agreed, _ = agree(squares)
        roots = torch.tensor([numel**0.5 for numel in agree.numels])
        magnitudes = (agreed[:, 0].sqrt().float() / roots).tolist()
        of_layer = {parameter: magnitudes[parameter] for parameter in agree.settings}
        moving = [rms for rms in of_layer.values() if rms]
        for parameter, rms in of_layer.items():
            self._layer(parameter).scale = sum(moving) / len(moving) / rms if rms else 1.0
        for members in groups:
            torch._foreach_mul_(members["exp_avg"], self._scales(members))

    # The frozen stage

    def absorb_compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """See Algorithm; leaves m̂ / (√v̂ + ε) + λw, with v frozen, in the averages' memory."""
        squares, growths = agree.zeros(2), agree.zeros(1)[:, 0]
        for members in groups:
            self._renew_moments(members)
            updates, settings, denominators = members.averages, members.settings, members["denominator"]
            correction = settings.first_correction(clock.steps)
            torch._foreach_div_(updates, [scale * correction for scale in self._scales(members)])
            if self._compressed == "momentum":
                torch._foreach_div_(updates, denominators)
            grown = greatest_growths(members["exp_avg_sq_fresh"], denominators, settings, clock.steps)
            rows = self._rows(members, squares)
            growths[rows] = grown.double().to(growths.device)
            squares[rows, 0] += square_norms(updates).to(squares.device)
            _add_decay(members)
            squares[rows, 1] += square_norms(updates).to(squares.device)
        agreed, greatest = agree(squares, growths)
        norms = agreed.sqrt().tolist()
        for parameter, settings in agree.settings.items():
            assert isinstance(settings, LambSettings)
            bare, norm = norms[parameter]
            share = min(1.0, bare / norm) if norm else 1.0
            growth = float(greatest[parameter])
            self.coefficients[parameter] = self._layer(parameter).follow(growth, share, settings)

    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        """w -= lr · coefficient · update; spends the updates."""
        for members in groups:
            rates = [-members.settings.lr * self.coefficients[parameter] for parameter in members.parameters]
            torch._foreach_mul_(members.averages, rates)
            torch._foreach_add_(members.weights, members.averages)

    def rates(self, parameter: int, settings: AdamSettings, clock: Clock) -> tuple[float, float]:
        """See Linear."""
        rate = settings.lr * self.coefficients[parameter]
        divisor = self.scale(parameter) * settings.first_correction(clock.steps)
        return rate / divisor, 1 - rate * settings.weight_decay

    # Checkpoints

    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """See Algorithm."""
        return {
            "layers": {names[parameter]: asdict(layer) for parameter, layer in self._layers.items()},
            "coefficients": {names[parameter]: value for parameter, value in self.coefficients.items()},
        }

    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        """See Algorithm."""
        number_of = {name: number for number, name in enumerate(names)}
        self._layers = {number_of[name]: Layer(**layer) for name, layer in saved["layers"].items() if name in number_of}
        self.coefficients = {
            number_of[name]: value for name, value in saved["coefficients"].items() if name in number_of
        }

    # Parts

    def _renew_moments(self, members: Members) -> None:
        """Take the new momenta, in the averages, over, and into the fresh variance the gradients that led to them."""
        momenta, settings = members["exp_avg"], members.settings
        gradients = momenta  # g = (m_t - β₁ m_{t-1}) / (1 - β₁), in the old momenta's memory
        torch._foreach_mul_(gradients, -settings.beta1)
        torch._foreach_add_(gradients, members.averages)
        torch._foreach_div_(gradients, [(1 - settings.beta1) * scale for scale in self._scales(members)])
        if self._compressed == "momentum":
            torch._foreach_div_(gradients, members["denominator"])
        track_variances(gradients, members["exp_avg_sq_fresh"], settings)
        torch._foreach_copy_(momenta, members.averages)

    def _rows(self, members: Members, sums: Tensor) -> Tensor:
        """Where `sums` has these parameters: an index that is copied to its device once and not in every step."""
        numbers = tuple(members.parameters)
        known = self._rows_of.get(numbers)
        if known is None or known.device != sums.device:
            known = self._rows_of[numbers] = torch.tensor(numbers, device=sums.device)
        return known

    def _scales(self, members: Members) -> list[float]:
        return [self.scale(parameter) for parameter in members.parameters]

    def _layer(self, parameter: int) -> Layer:
        return self._layers.setdefault(parameter, Layer())


def _add_decay(members: Members) -> None:
    if members.settings.weight_decay:
        torch._foreach_add_(members.averages, members.weights, alpha=members.settings.weight_decay)
