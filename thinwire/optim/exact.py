"""Optimizers that torch lacks or that need whole parameters, uncompressed: torch optimizers, which ShardedOptimizer
shards. LAMB is Adam's update times a trust ratio a parameter (You et al. 2020, arXiv 1904.00962); Lion the sign of a
momentum (Chen et al. 2023, arXiv 2302.06675); Muon orthogonalises the momentum of matrices (Jordan et al. 2024)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import override

AdjustLr = Literal["original", "match_rms_adamw"]
NewtonSchulzType = Literal["fp32", "bf16"]


def check_not_negative(**values: float) -> None:
    """Raise ValueError for a value below 0, or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both are from 0 up to, and without, 1."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas}")


class _ExactOptimizer(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_step()
        for group in self.param_groups:
            self._move_group(group)
        return loss

    def _begin_step(self) -> None:
        """Forget the last step."""

    def _move_group(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if moved:
            self._move(moved, group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step parameters of one group, all of which have gradients."""
        raise NotImplementedError


class Lamb(_ExactOptimizer):
    """LAMB with the formulas and names of FusedLamb. Sharded, every parameter lies whole on one rank.

    m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g²; u = m / (√v + ε) + λw; w ← w - η·c·u with c = ‖w‖ / ‖u‖ within
    [`min_coeff`, `max_coeff`], 1 where either norm is 0, and η = lr·√(1 - β₂ᵗ) / (1 - β₁ᵗ), or lr without
    `bias_correction`. `eps_inside_sqrt`: √(v + ε) in the place of √v + ε.

    Raises ValueError for values out of range.
    """

    whole_parameters = staticmethod(lambda group: True)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff)
        check_betas(betas)
        if not min_coeff <= max_coeff:
            raise ValueError(f"max_coeff must be at least min_coeff, {min_coeff}, got {max_coeff}")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay}
        defaults |= {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults)
        self._coefficients: list[Tensor] = []

    @override
    def _begin_step(self) -> None:
        self._coefficients = []

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, a number a parameter that moved in it."""
        return [float(one) for of_group in self._coefficients for one in of_group.tolist()]

    @override
    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        beta1, beta2 = group["betas"]
        means, variances = [one["exp_avg"] for one in states], [one["exp_avg_sq"] for one in states]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, gradients, gradients, value=1 - beta2)
        inside, outside = (group["eps"], 0.0) if group["eps_inside_sqrt"] else (0.0, group["eps"])
        roots = torch._foreach_sqrt(torch._foreach_add(variances, inside) if inside else variances)
        torch._foreach_add_(roots, outside)
        updates = torch._foreach_div(means, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, list(parameters), alpha=group["weight_decay"])
        ratios = _trust_ratios(parameters, updates, group["min_coeff"], group["max_coeff"])
        rates = ratios * ratios.new_tensor([_rate(group, float(one["step"])) for one in states])
        torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_sub_(parameters, updates)
        self._coefficients.append(ratios)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Its state, with this step counted."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _trust_ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor], least: float, most: float) -> Tensor:
    weights = torch.stack(torch._foreach_norm(list(parameters))).float()
    steps = torch.stack(torch._foreach_norm(list(updates))).float()
    says_nothing = (weights == 0) | (steps == 0)
    return torch.where(says_nothing, 1.0, (weights / steps).clamp(least, most))


def _rate(group: dict[str, Any], step: float) -> float:
    if not group["bias_correction"]:
        return float(group["lr"])
    beta1, beta2 = group["betas"]
    return float(group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step))


class Lion(_ExactOptimizer):
    """w ← (1 - ηλ)w - η·sign(β₁m + (1 - β₁)g), m ← β₂m + (1 - β₂)g. Elementwise.

    Raises ValueError for values out of range.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @override
    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
        directions = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-float(group["lr"]))
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta2)


_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """U S Vᵀ, in `dtype`, of a `matrix` U Σ Vᵀ, with S about 1: Newton-Schulz iterations of a quintic polynomial, the
    same operations, and in bf16 the same bits, as in torch.optim.Muon."""
    a, b, c = _COEFFICIENTS
    found = matrix.to(dtype, copy=True)
    tall = found.size(0) > found.size(1)
    if tall:
        found = found.T
    found.div_(found.norm().clamp(min=_LEAST_NORM))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def rate_of_matrix(shape: torch.Size, adjust: str | None) -> float:
    """What a matrix's learning rate is times: "match_rms_adamw" 0.2·√max(rows, columns), by which an update is as large
    as one of AdamW's (arXiv 2502.16982), and "original" √max(1, rows / columns)."""
    rows, columns = shape[0], math.prod(shape[1:])
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


class Muon(_ExactOptimizer):
    """Muon (Jordan et al. 2024) for groups that have `use_muon` true, torch.optim.AdamW for those that have it false.

    m ← μ m + (1 - μ) g; w ← (1 - ηλ) w - η·r·O(μ m + (1 - μ) g), with O = `orthogonalize` and r = `rate_of_matrix`;
    O(m) without `nesterov`. Sharded, every matrix lies whole on one rank. Groups that do not say are cut in two, the
    matrices first: a parameter is one if its attribute `use_muon` is true, or, without that attribute, if it has two
    dimensions or more and no name that says embedding or head. Dimensions beyond the first count as one, as for the
    kernels of convolutions.

    Args:
        params: parameters or groups, with names or without.
        lr: of matrices, 0.02 where neither this nor `muon_lr` is given, and of the rest, 3e-4 without `adam_lr`.
        momentum: of matrices.
        weight_decay: decoupled, of both.
        muon_lr: in the place of `lr`, for matrices.
        adam_lr: in the place of `lr`, for the rest.
        betas: of the rest.
        eps: of the rest.
        nesterov: whether the momentum looks ahead.
        ns_steps: of the Newton-Schulz iteration.
        adjust_lr_fn: what a matrix's rate is times; None is "original".
        ns_dtype: of the iteration, "fp32" or "bf16"; None is fp32 on a CPU and bf16, as in torch.optim.Muon, elsewhere.

    Raises ValueError for values out of range, or a group of matrices with a parameter of fewer than two dimensions.
    """

    whole_parameters = staticmethod(lambda group: bool(group["use_muon"]))

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        ns_dtype: NewtonSchulzType | None = None,
    ) -> None:
        rates = _rates(lr, muon_lr, adam_lr)
        check_not_negative(lr=min(rates), momentum=momentum, weight_decay=weight_decay, eps=eps)
        check_betas(betas)
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        if adjust_lr_fn not in (None, *get_args(AdjustLr)):
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(get_args(AdjustLr))}, got {adjust_lr_fn!r}")
        if ns_dtype not in (None, *get_args(NewtonSchulzType)):
            raise ValueError(f"ns_dtype must be one of {', '.join(get_args(NewtonSchulzType))}, got {ns_dtype!r}")
        defaults: dict[str, Any] = {"lr": rates[1], "use_muon": False, "momentum": momentum, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov, "ns_steps": ns_steps}
        groups = self.arrange(params, lr=lr, muon_lr=muon_lr, adam_lr=adam_lr)
        super().__init__(groups, {**defaults, "adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype})

    @staticmethod
    def arrange(params: ParamsT, **options: Any) -> list[dict[str, Any]]:
        """The groups of `params`, those that do not say whether they are matrices cut in two; with their rates.

        `options`: the constructor's. Raises ValueError for a group of matrices with something else in it.
        """
        muon_lr, adam_lr = _rates(*(options.get(name) for name in ("lr", "muon_lr", "adam_lr")))
        found: list[dict[str, Any]] = []
        for group in groups_of(params):
            if "use_muon" in group:
                found.append(group)
            else:
                found += _halves(group)
        for group in found:
            group.setdefault("lr", muon_lr if group["use_muon"] else adam_lr)
            shapes = group.get("shapes") or [_tensor(one).shape for one in group["params"]]
            if group["use_muon"] and any(len(shape) < 2 for shape in shapes):
                raise ValueError(
                    "Muon orthogonalises matrices, and a group with use_muon has a parameter of fewer than two "
                    "dimensions: set its attribute use_muon to False"
                )
        return found

    @override
    def _move_group(self, group: dict[str, Any]) -> None:
        if group["use_muon"]:
            self._move_matrices(group)
        elif group["params"]:
            settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            inner = torch.optim.AdamW(group["params"], **settings)
            inner.state = self.state
            inner.step()

    def _move_matrices(self, group: dict[str, Any]) -> None:
        shapes = group.get("shapes") or [parameter.shape for parameter in group["params"]]
        momentum, rate = group["momentum"], float(group["lr"])
        for parameter, shape in zip(group["params"], shapes, strict=True):
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None or not parameter.numel():
                continue
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            ahead = gradient.lerp(mean, momentum) if group["nesterov"] else mean
            wide = group["ns_dtype"] == "fp32" or (group["ns_dtype"] is None and parameter.device.type == "cpu")
            dtype = torch.float32 if wide else torch.bfloat16
            update = orthogonalize(ahead.view(shape[0], -1), group["ns_steps"], dtype)
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(update.reshape(parameter.shape), alpha=-rate * rate_of_matrix(shape, group["adjust_lr_fn"]))


_NOT_HIDDEN = re.compile(r"(^|[._])(emb\w*|wte|wpe|head)([._]|$)", re.IGNORECASE)


def is_hidden_matrix(parameter: Tensor, name: str = "") -> bool:
    """Whether Muon takes a parameter: its attribute `use_muon`, or else if it has two dimensions or more, and no name
    of an embedding or the language model's head."""
    return bool(getattr(parameter, "use_muon", parameter.dim() >= 2 and not _NOT_HIDDEN.search(name)))


def mark_matrices(named: Iterable[tuple[str, Tensor]], model: nn.Module | None = None) -> None:
    """Set the attribute `use_muon` of parameters that have none, by names and dimensions, and the `model`'s modules."""
    for module in () if model is None else model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not hasattr(module.weight, "use_muon"):
            module.weight.use_muon = False  # type: ignore[attr-defined]
    for name, parameter in named:
        parameter.use_muon = is_hidden_matrix(parameter, name)  # type: ignore[attr-defined]


def _rates(lr: float | None, muon_lr: float | None, adam_lr: float | None) -> tuple[float, float]:
    both = (0.02, 3e-4) if lr is None else (lr, lr)
    return (both[0] if muon_lr is None else muon_lr, both[1] if adam_lr is None else adam_lr)


def groups_of(params: ParamsT) -> list[dict[str, Any]]:
    """The groups of parameters, or the one that they are."""
    given: list[Any] = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    return groups


def _halves(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The matrices of a group and the rest of it, as groups; what is empty is left out."""
    settings = {key: value for key, value in group.items() if key != "params"}
    halves: dict[bool, list[Any]] = {True: [], False: []}
    for one in group["params"]:
        name, parameter = one if isinstance(one, tuple) else ("", one)
        halves[is_hidden_matrix(parameter, name)].append(one)
    return [{**settings, "params": held, "use_muon": which} for which, held in halves.items() if held]


def _tensor(one: Any) -> Tensor:
    tensor: Tensor = one[1] if isinstance(one, tuple) else one
    return tensor


EXACT: Mapping[str, type[torch.optim.Optimizer]] = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}


def needs_whole_parameters(name: str) -> bool:
    """Whether the optimizer of this name, ours or torch's, cannot step a part of a parameter by itself."""
    return name in EXACT and hasattr(EXACT[name], "whole_parameters")


class Adam(torch.optim.Adam):
    """w -= lr · m / (√v + ε), by torch's own kernels. Arguments and state are those of torch.optim.Adam, whose
    checkpoints it takes up, and the other way round.

    A kernel divides the moments by 1 - βᵗ. It is told that t is infinite, of which βᵗ is 0 and the divisor 1, to the
    last bit; `step` in the state counts all the same.
    """

    @override
    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *found)  # type: ignore[no-untyped-call]
        steps = found[-1]
        if steps:
            torch._foreach_add_(steps, 1)
            steps[:] = [torch.full_like(one, math.inf) for one in steps]
        return has_complex


class AdamW(Adam):
    """The same with decoupled weight decay, 0 where none is given."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **{**options, "decoupled_weight_decay": True})


UNCORRECTED: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"Adam": Adam, "AdamW": AdamW}
"""Adam and AdamW without the bias correction that torch's own always make: `"bias_correction": false`."""
