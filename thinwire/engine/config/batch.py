"""train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · ranks: what is missing follows
from what is there, and what does not multiply out is told with the numbers that would."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.engine.config.errors import ConfigError

__all__ = ["BatchSizes", "complete_batch_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """In samples: `train` a step over all ranks, `micro` a forward on one rank; `accumulation` forwards a step."""

    train: int
    micro: int
    accumulation: int


def complete_batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """All three from those that are given, each at least 1, on `world_size` ranks.

    Two give the third. `train` or `micro` alone means one forward a step, as in DeepSpeed.

    Raises ConfigError where neither is given, or where they do not multiply out.
    """
    if train is None and micro is None:
        raise ConfigError(
            "the batch size is missing: give train_batch_size or train_micro_batch_size_per_gpu"
            + (" beside gradient_accumulation_steps" if accumulation is not None else "")
        )
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation, "gradient_accumulation_steps", world_size, "samples a micro-batch")
        return BatchSizes(train, micro, accumulation)
    if accumulation is None:
        accumulation = _divide(train, micro, "train_micro_batch_size_per_gpu", world_size, "accumulation steps")
        return BatchSizes(train, micro, accumulation)
    if train != micro * accumulation * world_size:
        raise ConfigError(_conflict(train, micro, accumulation, world_size))
    return BatchSizes(train, micro, accumulation)


def _divide(train: int, factor: int, factor_key: str, world_size: int, quotient: str) -> int:
    unit = factor * world_size
    if train % unit == 0:
        return train // unit
    below, above = train // unit * unit, (train // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        f"train_batch_size {train} is not a multiple of {factor_key} {factor} x {_ranks(world_size)} = {unit}, which "
        f"would make {train / unit:.4g} {quotient}: the nearest train_batch_size that works is {nearest}"
    )


def _conflict(train: int, micro: int, accumulation: int, world_size: int) -> str:
    product = micro * accumulation * world_size
    ways = [f"train_batch_size {product}"]
    if train % (micro * world_size) == 0:
        ways.append(f"gradient_accumulation_steps {train // (micro * world_size)}")
    if train % (accumulation * world_size) == 0:
        ways.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world_size)}")
    return (
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
        f"{accumulation} x {_ranks(world_size)} = {product}: give two of the three, or one of " + ", ".join(ways)
    )


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
