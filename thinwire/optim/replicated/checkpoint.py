"""A 1-bit optimizer's checkpoint: what torch's optimizer state does not hold, residuals above all, and how it
comes back. Apart from the optimizer so that the format stands in one place."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.optim.replicated.freeze_group import Cohort
    from thinwire.optim.replicated.optimizer import OneBitOptimizer

__all__ = ["check", "load", "save"]

_FORMAT = 1


def save(optimizer: OneBitOptimizer) -> dict[str, Any]:
    """What `state_dict()["thinwire"]` holds: counters, and for each bucket its parameters and residuals."""
    return {
        "format": _FORMAT,
        "rank": optimizer.comm.rank,
        "size": optimizer.comm.size,
        "nodes": _nodes(optimizer),
        "step": optimizer._synchronizer.step,
        "skipped_steps": optimizer.skipped_steps,
        "bytes_sent": optimizer.bytes_sent,
        "bytes_uncompressed": optimizer.bytes_uncompressed,
        "loss_scale": optimizer._loss_scale,
        **_settings(optimizer),
        "cohorts": [_save_cohort(cohort) for cohort in optimizer._cohorts],
    }


def _settings(optimizer: OneBitOptimizer) -> dict[str, Any]:
    """What must be as it was for residuals and momenta to keep their meaning."""
    return {
        "optimizer": type(optimizer).__name__,
        **optimizer._own_settings(),
        "codec": optimizer._codec.name,
        "block_size": optimizer._codec.block_size,
    }


def _nodes(optimizer: OneBitOptimizer) -> list[int] | None:
    """The node of each rank, where residuals belong to nodes."""
    return None if optimizer._links is None else list(optimizer._groups.node_of)


def _save_cohort(cohort: Cohort) -> dict[str, Any]:
    return {
        "steps": cohort.steps,
        "frozen_at": cohort.frozen_at,
        "rule": cohort.rule.state(),
        **cohort.own_state(),
        "buckets": [
            {
                "parameters": [slot.parameter for slot in bucket.layout.slots],
                "worker_residual": bucket.compressor.worker_residual,
                "owner_residual": bucket.compressor.owner_residual,
            }
            for bucket in cohort.buckets
        ],
    }


def check(optimizer: OneBitOptimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError, before anything is changed, where this state cannot be this optimizer's."""
    name = type(optimizer).__name__
    ours = state_dict.get("thinwire")
    if ours is None:
        raise ValueError(
            f"this state_dict has no 'thinwire' entry, so it is not from {name}: give the state of another "
            f"optimizer to that optimizer, and start {name} fresh from the model's weights"
        )
    if ours["format"] != _FORMAT:
        raise ValueError(f"this state_dict has format {ours['format']}, this thinwire reads format {_FORMAT}")
    for setting, mine in _settings(optimizer).items():
        if (theirs := ours.get(setting)) != mine:
            raise ValueError(
                f"this state_dict was saved with {setting}={theirs!r}; this optimizer has {setting}={mine!r}. Build "
                "it with the same"
            )
    parameters = optimizer._table.parameters
    for index in (
        index for cohort in ours["cohorts"] for bucket in cohort["buckets"] for index in bucket["parameters"]
    ):
        entry = state_dict["state"].get(index, {})
        given = tuple(entry["exp_avg"].shape) if "exp_avg" in entry else "no state"
        wanted = tuple(parameters[index].shape) if index < len(parameters) else "no such parameter"
        if given != wanted:
            raise ValueError(
                f"the state's parameter {index} has shape {given}, this optimizer's: {wanted}. Build the same model"
            )


def load(optimizer: OneBitOptimizer, state_dict: dict[str, Any]) -> None:
    """Rebuild the buckets as they were and fill them."""
    ours = state_dict["thinwire"]
    for index in range(len(optimizer._table)):
        optimizer._table.make_master(index)
        if "master" in state_dict["state"].get(index, {}):
            optimizer._table.weight(index).detach().copy_(state_dict["state"][index]["master"])
    optimizer._cohorts.clear()
    optimizer._synchronizer.restore(
        [[bucket["parameters"] for bucket in cohort["buckets"]] for cohort in ours["cohorts"]]
    )
    place = (ours["rank"], ours["size"], ours.get("nodes"))
    same_place = place == (optimizer.comm.rank, optimizer.comm.size, _nodes(optimizer))
    for cohort, saved in zip(optimizer._cohorts, ours["cohorts"], strict=True):
        _load_cohort(optimizer, cohort, saved, state_dict["state"], same_place)
    optimizer._synchronizer.step = ours["step"]
    optimizer.skipped_steps = ours["skipped_steps"]
    optimizer.bytes_uncompressed = ours["bytes_uncompressed"]
    optimizer._bytes_before_resume += ours["bytes_sent"] - optimizer.bytes_sent
    optimizer._loss_scale = ours["loss_scale"]
    compresses = any(
        bucket.compressor.worker_residual is not None for cohort in optimizer._cohorts for bucket in cohort.buckets
    )
    if compresses and not same_place:
        warnings.warn(
            f"this state was saved by rank {ours['rank']} of {ours['size']} and is loaded by rank "
            f"{optimizer.comm.rank} of {optimizer.comm.size}, or on other nodes: error-feedback residuals belong "
            "to one rank, so they start from zero here. To keep them, save and load state_dict() on every rank",
            RuntimeWarning,
            stacklevel=3,
        )


def _load_cohort(
    optimizer: OneBitOptimizer, cohort: Cohort, saved: dict[str, Any], states: dict[int, Any], same_place: bool
) -> None:
    cohort.steps = saved["steps"]
    if saved["rule"].keys() == cohort.rule.state().keys():  # else freeze_step was changed: the new rule starts afresh
        cohort.rule.load(saved["rule"])
    cohort.load_own_state(saved)
    if saved["frozen_at"] is not None:
        cohort.name_frozen_state()
    for bucket in cohort.buckets:
        for slot in bucket.layout.slots:
            state = optimizer._table.state(slot.parameter)
            for name in state.keys() - {"master"}:
                state[name].copy_(states[slot.parameter][name])
    cohort.restore(saved["frozen_at"])
    if same_place:
        for bucket, entry in zip(cohort.buckets, saved["buckets"], strict=True):
            if entry["worker_residual"] is not None:
                bucket.compressor.load_residuals(entry["worker_residual"], entry["owner_residual"])
