"""1-bit LAMB (Li et al. 2021, arXiv 2104.06069): LAMB while the parameters warm up, then layerwise coefficients that
follow a variance found again from the momentum, on the exchange of 1-bit Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.optim.adam import Adam, Compressed, roots, track_moments, track_variances
from thinwire.optim.algorithm import Agreement
from thinwire.optim.optimizer import CompressedOptimizer, FreezeOption
from thinwire.optim.options import HomeKeywords, Recipe, check_compress, check_group
from thinwire.optim.step import AdamSettings, Clock, Members

LAMB_OPTIONS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
"""The hyperparameters of a parameter group that Adam does not have."""


@dataclass(frozen=True)
class LambSettings(AdamSettings):
    """The hyperparameters of one parameter group; see OneBitLamb."""

    max_coeff: float
    min_coeff: float
    coeff_beta: float
    factor_max: float
    factor_min: float
    factor_threshold: float

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> LambSettings:
        """Read them from an entry of `optimizer.param_groups`."""
        return cls(
            **vars(AdamSettings.of_group({**group, "eps_inside_sqrt": False})),
            **{name: group[name] for name in LAMB_OPTIONS},
        )


@dataclass
class Layer:
    """What 1-bit LAMB remembers of one parameter.

    `coefficient`: the moving average of its trust ratios, and `mass`, what their weights add up to so far. `factor`: by
    how much the frozen coefficient was multiplied last. `scale`: what its momentum is multiplied by on the wire.
    """

    coefficient: float = 0.0
    mass: float = 0.0
    factor: float = 1.0
    scale: float = 1.0

    @property
    def frozen_coefficient(self) -> float:
        """c: the average of the trust ratios; 1 for a layer that never had one."""
        return self.coefficient / self.mass if self.mass else 1.0

    def smooth(self, ratio: float, settings: LambSettings) -> None:
        """c ← β_c c + (1 - β_c) ratio."""
        beta = settings.coeff_beta
        self.coefficient = beta * self.coefficient + (1 - beta) * ratio
        self.mass = beta * self.mass + (1 - beta)

    def follow(self, growth: float, share: float, settings: LambSettings) -> float:
        """The coefficient of a frozen step, c · r; r is kept as `factor`.

        `growth`: the largest √v_frozen / √v_fresh of the layer. `share`: of the update's norm, what it would be without
        weight decay, at most 1; the rest does not depend on v.
        """
        blended = growth * share + (1 - share)
        bounded = min(max(blended, settings.factor_min), settings.factor_max)
        slowest = self.factor * (1 - settings.factor_threshold)
        fastest = self.factor * (1 + settings.factor_threshold)
        self.factor = min(max(bounded, slowest), fastest)
        return self.frozen_coefficient * self.factor


def trust_ratio(weight_norm: float, update_norm: float, settings: LambSettings) -> float | None:
    """‖w‖ / ‖update‖ within [min_coeff, max_coeff]; None where one of them is zero, which says nothing."""
    if not weight_norm or not update_norm:
        return None
    return min(max(weight_norm / update_norm, settings.min_coeff), settings.max_coeff)


def begin_fresh(fresh: list[Tensor], denominators: list[Tensor], settings: AdamSettings, step: int) -> None:
    """Make each fresh variance, in place, the one that the frozen `denominators` D = √v̂ + ε stand for.

    It is kept over D², which has no units, and infinite where D is, at coordinates that stay.
    """
    for variance, denominator in zip(fresh, denominators, strict=True):
        torch.reciprocal(denominator, out=variance)
        variance.mul_(-settings.eps).add_(1.0).square_().mul_(settings.second_correction(step))
        variance.masked_fill_(torch.isinf(denominator), float("inf"))


def greatest_growths(fresh: list[Tensor], denominators: list[Tensor], settings: AdamSettings, step: int) -> Tensor:
    """The largest (√v̂ + ε) / (√v̂' + ε) of each layer, v' fresh and v frozen: fp32 [layers]; 0 where all stay."""
    growths = roots(fresh, settings, step)
    torch._foreach_add_(growths, torch._foreach_reciprocal(denominators), alpha=settings.eps)
    torch._foreach_reciprocal_(growths)
    return torch.stack(torch._foreach_max(growths))


def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squares of the 2-norms: fp64 [tensors], squares of fp32 numbers, so that roots give these again."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square()


def _check_group(group: Mapping[str, Any]) -> None:
    check_group(group)
    if not 0 < group["min_coeff"] <= group["max_coeff"]:
        raise ValueError(
            f"min_coeff must be above 0 and at most max_coeff, got min_coeff {group['min_coeff']} and max_coeff "
            f"{group['max_coeff']}"
        )
    if not 0 <= group["coeff_beta"] < 1:
        raise ValueError(f"coeff_beta must be from 0 up to, not including, 1; got {group['coeff_beta']}")
    if not 0 < group["factor_min"] <= 1 <= group["factor_max"]:
        raise ValueError(
            "factor_min must be above 0 and at most 1, and factor_max at least 1, as the factor begins at 1; got "
            f"factor_min {group['factor_min']} and factor_max {group['factor_max']}"
        )
    if not 0 <= group["factor_threshold"] < 1:
        raise ValueError(f"factor_threshold must be from 0 up to, not including, 1; got {group['factor_threshold']}")


class Lamb(Adam):
    """Adam's momentum on the wire, and a coefficient for each parameter, which is a layer.

    Once frozen, what is exchanged is s times Adam's: s = mean RMS / RMS is a constant of the layer, so that layers that
    share a block have one magnitude. `exp_avg_sq_fresh` is the fresh variance over the frozen denominator's square.
    `coefficients`: what each parameter's learning rate was multiplied by in its last step.
    """

    frozen_state: ClassVar[Mapping[str, str | None]] = {**Adam.frozen_state, "exp_avg_sq_fresh": None}

    def __init__(self, compressed: Compressed) -> None:
        super().__init__(compressed)
        self.form = replace(self.form, update=None)  # norms of the updates come first
        self.coefficients: dict[int, float] = {}
        self.scales: dict[int, float] = {}
        self._layers: dict[int, Layer] = {}
        self._rows_of: dict[tuple[int, ...], Tensor] = {}

    # The warmup: LAMB

    @override
    def exact(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """Leaves m̂ / (√v̂ + ε) + λw in the averages' memory."""
        squares = agree.zeros(2)
        for members in groups:
            updates, settings = members.averages, members.settings
            track_moments(members, clock.steps)
            torch._foreach_reciprocal_(updates)
            torch._foreach_mul_(updates, members["exp_avg"])
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

    @override
    def freeze(
        self, groups: Sequence[Members], clock: Clock, agree: Agreement, precondition: Callable[[], None]
    ) -> None:
        super().freeze(groups, clock, agree, precondition)
        for members in groups:
            begin_fresh(members["exp_avg_sq_fresh"], members["denominator"], members.settings, clock.steps)
        self._scale_momenta(groups, agree)

    def _scale_momenta(self, groups: Sequence[Members], agree: Agreement) -> None:
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
            scale = sum(moving) / len(moving) / rms if rms else 1.0
            self.scales[parameter] = self._layer(parameter).scale = scale
        for members in groups:
            torch._foreach_mul_(members["exp_avg"], self._scales(members.parameters))

    # The frozen stage

    @override
    def compressed(self, groups: Sequence[Members], clock: Clock, agree: Agreement) -> None:
        """Leaves m̂ / (√v̂ + ε) + λw, with v frozen, in the averages' memory."""
        squares, growths = agree.zeros(2), agree.zeros(1)[:, 0]
        for members in groups:
            self._renew_moments(members)
            updates, settings, denominators = members.averages, members.settings, members["denominator"]
            correction = settings.first_correction(clock.steps)
            torch._foreach_div_(updates, [scale * correction for scale in self._scales(members.parameters)])
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

    @override
    def rates(self, parameters: Sequence[int], settings: AdamSettings, clock: Clock) -> list[tuple[float, float]]:
        found, correction = [], settings.first_correction(clock.steps)
        for parameter, scale in zip(parameters, self._scales(parameters), strict=True):
            rate = settings.lr * self.coefficients.get(parameter, 1.0)
            found.append((rate / (scale * correction), 1 - rate * settings.weight_decay))
        return found

    # Checkpoints

    @override
    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "layers": {names[parameter]: asdict(layer) for parameter, layer in self._layers.items()},
            "coefficients": {names[parameter]: value for parameter, value in self.coefficients.items()},
        }

    @override
    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        number_of = {name: number for number, name in enumerate(names)}
        self._layers = {number_of[name]: Layer(**layer) for name, layer in saved["layers"].items() if name in number_of}
        self.scales = {number: layer.scale for number, layer in self._layers.items()}
        self.coefficients = {
            number_of[name]: value for name, value in saved["coefficients"].items() if name in number_of
        }

    def _renew_moments(self, members: Members) -> None:
        """Take the new momenta, in the averages, over, and into the fresh variance the gradients that led to them."""
        momenta, settings = members["exp_avg"], members.settings
        gradients = momenta  # g = (m_t - β₁ m_{t-1}) / (1 - β₁), in the old momenta's memory
        torch._foreach_mul_(gradients, -settings.beta1)
        torch._foreach_add_(gradients, members.averages)
        torch._foreach_div_(gradients, [(1 - settings.beta1) * scale for scale in self._scales(members.parameters)])
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

    def _scales(self, parameters: Sequence[int]) -> list[float]:
        return [self.scales.get(parameter, 1.0) for parameter in parameters]

    def _layer(self, parameter: int) -> Layer:
        return self._layers.setdefault(parameter, Layer())


def _add_decay(members: Members) -> None:
    if members.settings.weight_decay:
        torch._foreach_add_(members.averages, members.weights, alpha=members.settings.weight_decay)


class OneBitLamb(CompressedOptimizer):
    """LAMB that sends one bit an element: 1-bit LAMB (Li et al. 2021, arXiv 2104.06069).

    Synchronises by itself as OneBitAdam does, with the same calls, groups and checkpoints. Every parameter is a layer
    with a coefficient. In the warmup this is LAMB (You et al. 2019, arXiv 1904.00962) on exactly averaged gradients: a
    layer moves by u = m̂ / (√v̂ + ε) + λw times ‖w‖/‖u‖, within [min_coeff, max_coeff]; the average c of that
    coefficient is kept. From the freeze on v and c stay. The ranks exchange m / (√v̂ + ε), or with
    `compress="momentum"` m as in the paper, every layer scaled to one RMS, through `codec`, with error feedback, and
    the layer moves by c·r·u. r follows the largest √v / √v' of the layer, where v' is the variance of the gradients
    (m_t - β₁ m_{t-1}) / (1 - β₁) that the exchanged momenta imply; the part of u that is decay does not count.

    With `stage=1` the state is sharded as OneBitAdam's is, and the fresh variance v' with it: 4 bytes an element,
    divided by the ranks. Layers are cut where shards are: each owner adds up what of a layer's norms is in its shard.

    Args:
        params, lr, betas, eps, amsgrad, compress: as in OneBitAdam, `exp_avg_mask` in groups included.
        freeze_step: warmup steps before v and c are frozen; "auto" freezes when v has settled.
        weight_decay: λ.
        bias_correction: as in OneBitAdam.
        max_coeff, min_coeff: bounds of ‖w‖/‖u‖ in the warmup.
        coeff_beta: β of the average c, which is divided by 1 - βᵗ.
        factor_max, factor_min: bounds of r.
        factor_threshold: r changes by at most this part of itself a step.
        options: stage 0 or 1, and the others of `HomeOptions`.

    The six may differ by parameter group. A layer with ‖w‖ or ‖u‖ zero has coefficient 1, and leaves c alone. All else
    is as in OneBitAdam: coordinates whose variance is 0 at the freeze stay, decay aside; a step that is not finite on
    any rank is skipped on all of them.
    """

    freeze_step = FreezeOption()
    lamb_freeze_key = CompressedOptimizer.frozen  # as scripts written for other libraries call it

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int | Literal["auto"] = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        amsgrad: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        compress: Compressed = "update",
        **options: Unpack[HomeKeywords],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        layerwise = max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold
        defaults |= {"bias_correction": bias_correction, **dict(zip(LAMB_OPTIONS, layerwise, strict=True))}
        recipe = Recipe(
            algorithm=lambda: Lamb(compress),
            settings={"compress": compress},
            schedule={},
            freeze_step=freeze_step,
            stages=(0, 1),
            check=lambda: check_compress(amsgrad, compress, options.get("stage", 0)),
            check_group=_check_group,
            hyperparameters=LambSettings,
        )
        super().__init__(params, defaults, recipe, options)

    def get_lamb_coeffs(self) -> list[float]:
        """What each parameter's learning rate was multiplied by in its last step, in the order of the groups; 1 for a
        parameter that has not stepped."""
        coefficients: dict[int, float] = {}
        for group in self._home.groups:
            assert isinstance(group.algorithm, Lamb)
            coefficients |= group.algorithm.coefficients
        return [coefficients.get(index, 1.0) for index in range(len(self._home.parameters))]
