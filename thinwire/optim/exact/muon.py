"""Muon for matrices, AdamW for the rest, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.exact.checks import check_betas, check_not_negative

__all__ = ["Muon", "mark_matrices"]

_NOT_HIDDEN = ("embed", "lm_head")


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon (Jordan et al. 2024) where a group has `use_muon` true, torch.optim.AdamW where it is false.

    Sharded, every parameter lies whole on one rank. Groups that do not say are cut in two, the matrices first: a
    parameter is one if its attribute `use_muon` is true, or, where it has none, if it has two dimensions or more. Those
    beyond the first count as one, as for the kernels of convolutions.

    Args:
        params: parameters or groups.
        lr: of matrices, 0.02 where neither this nor `muon_lr` is given, and of the rest, 3e-4 without `adam_lr`.
        momentum: of matrices.
        weight_decay: decoupled, of both.
        muon_lr: in the place of `lr`, for matrices.
        adam_lr: in the place of `lr`, for the rest.
        betas: of the rest.
        eps: of the rest.
        nesterov: whether the momentum looks ahead.
        ns_steps: of the Newton-Schulz iteration.
        adjust_lr_fn: what a matrix's rate is times, as in torch: "original" √max(1, rows / columns).

    Raises ValueError for values out of range, or a group of matrices with a parameter of fewer than two dimensions.
    """

    whole_parameters = True

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
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
    ) -> None:
        rates = _rates(lr, muon_lr, adam_lr)
        check_not_negative(lr=min(rates), momentum=momentum, weight_decay=weight_decay, eps=eps)
        check_betas(betas)
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        defaults = {
            "lr": rates[1],
            "use_muon": False,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        groups = self.arrange(params, lr=lr, muon_lr=muon_lr, adam_lr=adam_lr)
        super().__init__(groups, defaults)

    @staticmethod
    def arrange(params: ParamsT, **options: Any) -> list[dict[str, Any]]:
        """The groups of `params`, those that do not say whether they are matrices cut in two; with their rates.

        `options`: the constructor's. Raises ValueError for a group of matrices with something else in it.
        """
        muon_lr, adam_lr = _rates(*(options.get(name) for name in ("lr", "muon_lr", "adam_lr")))
        found: list[dict[str, Any]] = []
        for group in _groups(params):
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["use_muon"]:
                self._move_matrices(group)
            else:
                self._move_others(group)
        return loss

    def _move_matrices(self, group: dict[str, Any]) -> None:
        shapes = group.get("shapes") or [parameter.shape for parameter in group["params"]]
        moved = [(one, shape) for one, shape in zip(group["params"], shapes, strict=True) if one.grad is not None]
        if not moved:
            return
        matrices = [parameter.detach().view(shape[0], -1) for parameter, shape in moved]
        settings = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        inner = torch.optim.Muon(matrices, **{name: group[name] for name in settings})
        for (parameter, _), matrix in zip(moved, matrices, strict=True):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            inner.state[matrix]["momentum_buffer"] = state["momentum_buffer"].view_as(matrix)
            assert parameter.grad is not None
            matrix.grad = parameter.grad.view_as(matrix)
        inner.step()  # type: ignore[no-untyped-call]

    def _move_others(self, group: dict[str, Any]) -> None:
        if group["params"]:
            settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            inner = torch.optim.AdamW(group["params"], **settings)
            inner.state = self.state
            inner.step()


def mark_matrices(named: Iterable[tuple[str, Tensor]]) -> None:
    """Set the attribute `use_muon` of parameters that have none: of two dimensions or more, not of an embedding or the
    language model's head by their names. DeepSpeed's rule."""
    for name, parameter in named:
        if not hasattr(parameter, "use_muon"):
            hidden = not any(word in name.lower() for word in _NOT_HIDDEN)
            parameter.use_muon = hidden and parameter.dim() >= 2  # type: ignore[attr-defined]


def _rates(lr: float | None, muon_lr: float | None, adam_lr: float | None) -> tuple[float, float]:
    both = (0.02, 3e-4) if lr is None else (lr, lr)
    return (both[0] if muon_lr is None else muon_lr, both[1] if adam_lr is None else adam_lr)


def _groups(params: ParamsT) -> list[dict[str, Any]]:
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
        parameter = _tensor(one)
        halves[bool(getattr(parameter, "use_muon", parameter.dim() >= 2))].append(one)
    return [{**settings, "params": held, "use_muon": which} for which, held in halves.items() if held]


def _tensor(one: Any) -> Tensor:
    tensor: Tensor = one[1] if isinstance(one, tuple) else one
    return tensor
