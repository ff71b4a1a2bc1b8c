"""What the measurements of `experiments.long_sequences` show, computed from them: quartiles, ratios, and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import numpy as np

from experiments.long_sequences.bert_memory import Growth
from experiments.long_sequences.systems import DENSE, FLEX, GATHERED, LAYOUTS, Mode, input_bytes
from experiments.long_sequences.timing import Times

__all__ = ["OURS", "findings", "longest_sequences", "shown_length", "summarise", "times_faster", "timings"]

OURS = "BigBird"
"""The layout that is compared."""
_SHOWN_LENGTH = 8192

Length = TypeVar("Length", int, str)
"""A number of tokens; JSON has them as strings."""

Memory = Mapping[int, Mapping[str, Mapping[str, int]]]
"""Extra peak bytes by length, system and mode."""


def timings(times: Times) -> dict[str, Any]:
    """Quartiles of seconds by mode, length and system, and how many times faster than dense attention."""
    return {
        mode: {
            length: {
                name: {
                    "seconds": np.quantile(seconds, [0.25, 0.5, 0.75]).tolist(),
                    "times_faster_than_dense": times_faster(times, mode, length, name, DENSE),
                    "rounds": len(seconds),
                }
                for name, seconds in systems.items()
            }
            for length, systems in by_length.items()
        }
        for mode, by_length in times.seconds.items()
    }


def times_faster(times: Times, mode: Mode, length: int, name: str, than: str) -> float | None:
    """Median over rounds of the other's time over this one's; None where one of them was not timed."""
    systems = times.seconds[mode][length]
    if name not in systems or than not in systems:
        return None
    return median(slow / fast for slow, fast in zip(systems[than], systems[name], strict=True))


def longest_sequences(growths: Mapping[str, Mapping[str, Growth]], memory: Sequence[float]) -> dict[str, Any]:
    """By treatment and gigabytes of memory: the longest sequences, dense and sparse, and the ratio of the two."""
    found: dict[str, Any] = {}
    for treatment, by_attention in growths.items():
        rows = found[treatment] = {}
        for gigabytes in memory:
            dense, sparse = (by_attention[name].longest(gigabytes * 1e9) for name in ("dense", "sparse"))
            ratio = sparse / dense if dense else None
            rows[f"{gigabytes:g} GB"] = {"dense": dense, "sparse": sparse, "ratio": ratio}
    return found


def summarise(times: Times, memory: Memory) -> dict[str, Any]:
    """What BigBird reaches at each length, against its peers; `None` where a peer was not timed."""
    layout = LAYOUTS[OURS]
    lengths = times.seconds["training"]
    speedups = {length: times_faster(times, "training", length, OURS, DENSE) for length in lengths}
    return {
        "density": {length: layout.index(length).density() for length in lengths},
        "training_times_faster_than_dense": speedups,
        "the_same_times_density": {
            length: speedup and speedup * layout.index(length).density() for length, speedup in speedups.items()
        },
        "training_times_faster_than_gather": {
            length: times_faster(times, "training", length, OURS, GATHERED) for length in lengths
        },
        "forward_times_faster_than_flex": {
            length: times_faster(times, "forward", length, OURS, FLEX) for length in lengths
        },
        "training_memory_over_bytes_of_qkv": {
            length: systems[OURS]["training"] / input_bytes(length) for length, systems in memory.items()
        },
    }


def shown_length(speedups: Mapping[Length, float | None]) -> Length:
    """The length that titles speak of: 8192 tokens, else the longest at which dense attention was timed."""
    timed = [length for length, speedup in speedups.items() if speedup]
    return next((length for length in timed if int(length) == _SHOWN_LENGTH), max(timed, key=int))


def findings(summary: Mapping[str, Any], longest: Mapping[str, Any], model: str) -> tuple[str, str]:
    """Two sentences: time, and memory, for the first of the budgets."""
    speedups = summary["training_times_faster_than_dense"]
    length = shown_length(speedups)
    time = (
        f"At {length:,} tokens BigBird trains {speedups[length]:.1f}x faster than dense attention, "
        f"{summary['the_same_times_density'][length]:.2f} of what a density of {summary['density'][length]:.3f} allows"
    )
    memory_length, extra = max(summary["training_memory_over_bytes_of_qkv"].items())
    budget = next(iter(next(iter(longest.values()))))
    ratios = ", ".join(f"{_ratio(rows[budget])} ({treatment})" for treatment, rows in longest.items())
    needs = f"At {memory_length:,} it needs {extra:.1f}x the bytes of q, k, v"
    memory = f"{needs}; in {budget} BERT-{model} trains on sequences {ratios} as long"
    return time, memory


def _ratio(one: Mapping[str, Any]) -> str:
    return "∞x" if one["ratio"] is None else f"{one['ratio']:.0f}x"
