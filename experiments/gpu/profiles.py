"""What a profile of a few steps says: what the GPU ran, how much of its communication was hidden, and where the host
waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile

__all__ = ["hidden", "length", "read_profile", "union"]

Span = tuple[float, float]
"""Begin and end, in microseconds."""

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_LISTED = 20


def read_profile(recorded: profile, steps: int) -> dict[str, Any]:
    """By step: milliseconds of kernels and of communication, what of that was hidden, launches, waits, and the kernels
    that took longest."""
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    calls = Counter(event.name for event in recorded.events() if event.name.startswith("cuda"))
    sending = [span for name, span in kernels if "nccl" in name.lower()]
    working = [span for name, span in kernels if "nccl" not in name.lower()]
    taken: Counter[str] = Counter()
    for name, (begin, end) in kernels:
        taken[name] += end - begin  # type: ignore[assignment]
    sent = length(union(sending))
    return {
        "kernel_ms": length(union(working)) / steps / 1e3,
        "communication_ms": sent / steps / 1e3,
        "communication_hidden": hidden(sending, working) / sent if sent else None,
        "kernels": len(kernels) / steps,
        "waits": {name: calls[name] / steps for name in _WAITS if calls[name]},
        "longest_ms": {name[:120]: time / steps / 1e3 for name, time in taken.most_common(_LISTED)},
    }


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as `spans`, apart and in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(spans: Sequence[Span]) -> float:
    """How long spans that lie apart are together."""
    return sum(end - begin for begin, end in spans)


def hidden(spans: Iterable[Span], behind: Iterable[Span]) -> float:
    """For how long something of `spans` runs while something of `behind` does too."""
    first, second = union(spans), union(behind)
    return length(first) + length(second) - length(union([*first, *second]))
