"""How long attention takes: all systems take turns within a process, so that a slow moment of the machine hits all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from experiments.long_sequences.systems import MODES, RUNS, SYSTEMS, Mode, inputs
from experiments.tasks.attention_peers import Attention

__all__ = ["FEWEST_ROUNDS", "Times", "rounds_at", "time_systems"]

FEWEST_ROUNDS = 3
_MOST_ROUNDS = 40
_ROUNDS_ARE_AT = 4096


@dataclass
class Times:
    """Seconds of every call.

    Attributes:
        seconds: by mode, length and system, one a round; the n-th of all systems lie together in time.
        unsupported: by mode and system, what it said when asked for the first time.
        skipped: by system, the shortest length at which it was left out as too slow or too large.
    """

    seconds: dict[Mode, dict[int, dict[str, list[float]]]] = field(default_factory=dict)
    unsupported: dict[Mode, dict[str, str]] = field(default_factory=lambda: {mode: {} for mode in MODES})
    skipped: dict[str, int] = field(default_factory=dict)


def rounds_at(length: int, rounds: int) -> int:
    """As many rounds as take about the same time at each length: `rounds` at 4096 tokens, at least 3, at most 40."""
    return max(FEWEST_ROUNDS, min(_MOST_ROUNDS, rounds * _ROUNDS_ARE_AT // length))


def time_systems(systems: Sequence[str], lengths: Sequence[int], rounds: int, limits: Mapping[str, int]) -> Times:
    """Times `systems`, forward and training; those in `limits` up to that length only.

    `rounds` are at 4096 tokens, see `rounds_at`.
    """
    times = Times()
    for length in lengths:
        for name, limit in limits.items():
            if length > limit:
                times.skipped.setdefault(name, length)
        attentions = {name: SYSTEMS[name].build(length) for name in systems if name not in times.skipped}
        for mode in MODES:
            measured = _take_turns(attentions, length, mode, rounds_at(length, rounds), times.unsupported[mode])
            times.seconds.setdefault(mode, {})[length] = measured
            print(f"time: {mode} at {length} tokens is done", file=sys.stderr, flush=True)
    return times


def _take_turns(
    attentions: Mapping[str, Attention], length: int, mode: Mode, rounds: int, unsupported: dict[str, str]
) -> dict[str, list[float]]:
    q, k, v = inputs(length, gradients=mode == "training")
    calls: dict[str, Callable[[], None]] = {}
    for name, attend in attentions.items():
        if name in unsupported:
            continue
        call = partial(RUNS[mode], attend, q, k, v)
        # The first call compiles and fills caches, or shows that there is no such thing on this machine.
        try:
            call()
        except Exception as error:
            if SYSTEMS[name].kind != "peer":
                raise
            unsupported[name] = _reason(error)
        else:
            calls[name] = call
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first: compilers wrap it in errors of their own."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return (str(error).strip() or type(error).__name__).splitlines()[0]
