"""Samples that make a micro-batch, and how hard they may be: parts of DeepSpeed's data pipeline that stand alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.deepspeed.errors import DeepSpeedUsageError
from thinwire.deepspeed.utilities import logger

_ORDERS = ("dataloader", "random", "seqlen")
_REQUIRED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Pack samples of these lengths into micro-batches of at most `max_tokens` tokens.

    Returns (number of the batch, samples) of every micro-batch, and of every batch how many samples it has and its
    longest one's length.

    Args:
        seqlens: tokens of every sample.
        max_tokens: of a micro-batch; a longer sample is left out, and a line says so.
        sequence_ids_per_mb: the samples to pack, by default all.
        min_batch_size: samples of a micro-batch at least.
        max_batch_size: and at most; None for any number.
        sequence_picking_order: "dataloader" takes them as they come, "random" shuffles, "seqlen" shortest first.
        effective_batch_size: micro-batches of a batch; what does not fill the last one is left out.
        required_microbatches_of_same_size: give those of a batch equally many samples, dealt in turn.
        verbose: log every batch.
        seed: of the order "random".

    Raises DeepSpeedUsageError for another order, and where no batch is full.
    """
    if sequence_picking_order not in _ORDERS:
        raise DeepSpeedUsageError(f"sequence_picking_order is one of {_ORDERS}, not {sequence_picking_order!r}")
    asked = range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    order = [sample for sample in asked if seqlens[sample] <= max_tokens]
    if len(order) < len(asked):
        logger.warning("%d samples have more than %d tokens and are left out", len(asked) - len(order), max_tokens)
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(order)
    elif sequence_picking_order == "seqlen":
        order.sort(key=lambda sample: (seqlens[sample], sample))
    width = effective_batch_size if required_microbatches_of_same_size else 1
    packed: list[list[int]] = []
    start = 0
    while (rows := _rows(order[start:], seqlens, max_tokens, width, max_batch_size)) >= max(1, min_batch_size):
        end = start + rows * width
        packed += [order[start + first : end : width] for first in range(width)]
        start = end
    batches = [packed[i : i + effective_batch_size] for i in range(0, len(packed), effective_batch_size)]
    batches = [batch for batch in batches if len(batch) == effective_batch_size]
    if not batches:
        raise DeepSpeedUsageError(
            f"{len(asked)} samples do not fill {effective_batch_size} micro-batches of {max_tokens} tokens: give more "
            "samples or tokens, or a smaller effective_batch_size"
        )
    sizes = [sum(map(len, batch)) for batch in batches]
    longest = [max(seqlens[sample] for one in batch for sample in one) for batch in batches]
    for number, size in enumerate(sizes if verbose else ()):
        logger.info("batch %d: %d samples of at most %d tokens", number, size, longest[number])
    return [(number, one) for number, batch in enumerate(batches) for one in batch], sizes, longest


def _rows(order: Sequence[int], seqlens: Sequence[int], limit: int, width: int, most: int | None) -> int:
    """How many samples each of `width` micro-batches can take, dealt in turn."""
    totals, rows = [0] * width, 0
    for start in range(0, len(order) - width + 1, width):
        totals = [total + seqlens[sample] for total, sample in zip(totals, order[start : start + width], strict=True)]
        if max(totals) > limit or rows == most:
            break
        rows += 1
    return rows


class CurriculumScheduler:
    """How hard samples may be, step by step, from "min_difficulty" to "max_difficulty" of `config`, an object like
    DeepSpeed's "curriculum_learning": it says a number, the length of a sequence say, and the script cuts samples.

    "fixed_linear" and "fixed_root" rise to the maximum within "total_curriculum_step" steps, in multiples of
    "difficulty_step"; "fixed_discrete" has each "difficulty" until its "max_step"; "custom" asks a function.

    Raises DeepSpeedUsageError, an AssertionError, for keys that are missing, and RuntimeError for another schedule.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if key not in config:
                raise DeepSpeedUsageError(
                    f"curriculum learning needs {key!r}, and the configuration has {list(config)}"
                )
        kind, section = config["schedule_type"], config.get("schedule_config", {})
        if kind not in _REQUIRED:
            raise RuntimeError(f"schedule_type is one of {', '.join(_REQUIRED)}, not {kind!r}")
        if missing := [key for key in _REQUIRED[kind] if key not in section]:
            raise DeepSpeedUsageError(f"the schedule {kind!r} needs {', '.join(missing)} in schedule_config")
        if kind == "fixed_discrete" and len(section["difficulty"]) != len(section["max_step"]) + 1:
            raise DeepSpeedUsageError("every difficulty but the last needs a max_step, until which it holds")
        self.state = {**config, "schedule_config": section, "current_difficulty": config["min_difficulty"]}
        self.custom_get_difficulty: Callable[[int], int] | None = None

    def get_current_difficulty(self) -> int:
        """Of the last `update_difficulty`."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Go on from here."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Have the schedule "custom" ask this function of a step."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """What `set_state` takes."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` returned."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """Of a step."""
        kind, section = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise DeepSpeedUsageError("the schedule is custom: give set_custom_get_difficulty() a function first")
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            return int(section["difficulty"][sum(global_steps > last for last in section["max_step"])])
        low, high, step = self.state["min_difficulty"], self.state["max_difficulty"], section["difficulty_step"]
        degree = section["root_degree"] if kind == "fixed_root" else 1
        reached = math.floor(low + (high - low) * (global_steps / section["total_curriculum_step"]) ** (1 / degree))
        return int(min(high, step * max(reached // step, math.ceil(low / step))))

    def update_difficulty(self, global_steps: int) -> int:
        """Of a step, which is the current one from now on; the maximum stays."""
        if self.get_current_difficulty() < self.state["max_difficulty"]:
            self.set_current_difficulty(self.get_difficulty(global_steps))
        return self.get_current_difficulty()
