"""Options of DiLoCo, their checks and defaults; and its parameters, in whatever form torch takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.agreement import check_nodes
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CodecName
from thinwire.optim.diloco.fragments import Correlation, Fragment, OuterOptimizer, auto_fragments, cut_fragments
from thinwire.optim.options import check_count
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

_MANY_PARAMETERS = 335_000_000

COMMUNICATES = (
    "communicates by itself, and DiLoCo's inner optimizer steps alone: pass the plain class, as torch.optim.AdamW. "
    "Ranks that share a worker are said with nodes=, and stage= shards their state"
)


def check_options(inner_class: object, given: Mapping[str, Any], elastic: object) -> None:
    """Raise ValueError or TypeError for options that cannot work; `given`: those of DiLoCo by their names."""
    every, overlap, fragments, mix = (given[name] for name in ("every", "overlap", "fragments", "mix"))
    codec, outer_lr, guard, tokens = (given[name] for name in ("codec", "outer_lr", "guard", "tokens"))
    if not callable(inner_class):
        raise TypeError(
            f"inner_class must be an optimizer class, or a function that builds one from groups, got {inner_class!r}: "
            "pass torch.optim.AdamW, and its options beside it"
        )
    if isinstance(inner_class, type) and issubclass(inner_class, SynchronizedOptimizer):
        raise ValueError(f"{inner_class.__name__} {COMMUNICATES}")
    make_codec(codec, given["block_size"])
    _check_share(given["share"])
    check_nodes(given["nodes"])
    if (touch := given["touch"]) is not None and (
        isinstance(touch, bool) or not isinstance(touch, int | float) or not 0 < touch <= 1 or elastic is not None
    ):
        raise ValueError(
            "touch must be a part of the weights, above 0 and up to 1, or None, and None with elastic, whose workers' "
            f"steps are not alike, got {touch!r}"
        )
    check_count("every", every)
    if isinstance(overlap, bool) or not isinstance(overlap, int) or not 0 <= overlap < every:
        raise ValueError(
            f"overlap must be a number of steps from 0 up to, not including, every={every}, got {overlap!r}: a "
            "fragment has to be back before it leaves again"
        )
    if outer_lr == "auto":
        _check_follows(every, codec, elastic)
    if mix == "carry" and (overlap == 0 or elastic is not None):
        raise ValueError(
            'mix="carry" keeps what a worker does while a fragment is in flight: it wants overlap from 1 on, and does '
            f"not go with elastic, got overlap={overlap}"
        )
    if fragments != "auto":
        check_count("fragments", fragments)
    for name, value, low, high, beside in (
        ("mix", 0.0 if mix == "carry" else mix, 0.0, 1.0, ', or "carry"'),
        ("outer_momentum", given["outer_momentum"], 0.0, 1.0, ""),
        ("outer_lr", 1.0 if outer_lr in (None, "auto") else outer_lr, 0.0, math.inf, ', or "auto"'),
        ("guard", 3.0 if guard is None else guard, 1.0, math.inf, ", or None"),
        ("max_norm", given["max_norm"], 0.0, math.inf, ", or None"),
        ("tokens", 1.0 if tokens is None else tokens, 1e-9, 1e15, ""),
    ):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value < high:
            raise ValueError(
                f"{name} must be a number from {low:g} up to, not including, {high:g}{beside}, got {value!r}"
            )
    if given["stage"] not in (0, 1, 2):
        raise ValueError(
            f"stage must be 0, 1 or 2 for DiLoCo, got {given['stage']!r}: every worker needs its own whole replica"
        )


def overlap_and_mix(every: object, overlap: int | None, mix: float | Literal["carry"] | None) -> dict[str, Any]:
    """What was given, by name, or what is best where nothing was."""
    if overlap is None and isinstance(every, int):
        overlap = max(0, min(1, every - 1))
    return {"overlap": overlap, "mix": (0.5 if overlap else 0.0) if mix is None else mix}


def _check_follows(every: int, codec: CodecName, elastic: object) -> None:
    if every == 1:
        raise ValueError(
            'outer_lr="auto" follows the correlation of what workers do in successive intervals, got every=1: single '
            "steps, whose correlation is the inner optimizer's own momentum. Pass a rate, or a longer interval"
        )
    if codec in ("stat2", "sign1"):
        raise ValueError(
            f'outer_lr="auto" finds that correlation in what codec={codec!r} leaves of outer steps, which is too '
            'coarse for it. Pass a rate, or codec="int4"'
        )
    if elastic is not None:
        raise ValueError(
            'outer_lr="auto" does not go with elastic: a worker that joins would not know what the others have seen of '
            "outer steps, and take others of its own. Pass a rate"
        )


def _check_share(share: object) -> None:
    if not isinstance(share, dict) or not all(isinstance(kind, str) and kind for kind in share):
        raise TypeError(
            'share must say of kinds of the inner optimizer\'s state how often, as {"exp_avg": 1, "exp_avg_sq": 6}, '
            f"got {share!r}"
        )
    for kind, times in share.items():
        check_count(f"share[{kind!r}]", times)


def cut_trained(parameters: Sequence[Tensor], names: Sequence[str], fragments: int | Literal["auto"]) -> list[Fragment]:
    """The fragments of those that train."""
    numels = {number: one.numel() for number, one in enumerate(parameters) if one.requires_grad and one.numel()}
    if not numels:
        raise ValueError("no parameter trains: set requires_grad before the optimizer is built")
    return cut_fragments(names, numels, auto_fragments(names) if fragments == "auto" else fragments)


def for_interval(inner_class: Any, every: int) -> dict[str, Any]:
    """Options that an inner class has others of for local steps; what is given goes first."""
    found: dict[str, Any] = inner_class.for_interval(every) if hasattr(inner_class, "for_interval") else {}
    return found


def make_outer_optimizer(given: Mapping[str, Any], workers: int, cut: Sequence[Fragment]) -> OuterOptimizer:
    """From options that have been checked; `workers`: for how many a rate is chosen if none is given."""
    lr, momentum, mix = given["outer_lr"], float(given["outer_momentum"]), given["mix"]
    if lr == "auto":
        taken = 1.0 if mix == "carry" else 1 - mix  # of an outer step, by a worker
        return OuterOptimizer(1 / taken, momentum, [Correlation(one.numel) for one in cut])
    rate = _default_outer_lr(workers, sum(one.numel for one in cut)) if lr is None else float(lr)
    return OuterOptimizer(rate, momentum)


def _default_outer_lr(workers: int, parameters: int) -> float:
    """What was best for many models at that number of workers (arXiv 2503.09799, figure 7)."""
    if workers == 1:
        return 0.4 if parameters >= _MANY_PARAMETERS else 0.6
    return 0.6 if workers <= 4 else 0.8


def listed(params: ParamsT) -> Any:
    """`params`, which may be an iterator, as lists."""
    if isinstance(params, Tensor):
        raise TypeError("params must be parameters or groups of them, got a single tensor: put it into a list")
    given = list(params)
    if not given:
        raise ValueError("the optimizer got no parameters")
    return [
        {**one, "params": [one["params"]] if isinstance(one["params"], Tensor) else list(one["params"])}
        if isinstance(one, dict)
        else one
        for one in given
    ]


def tensors_in(given: Any) -> list[Tensor]:
    """All parameters in what an optimizer takes."""
    flat = [entry for one in given for entry in (one["params"] if isinstance(one, dict) else [one])]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in flat]


def names_of(
    groups: Sequence[dict[str, Any]],
    parameters: Iterable[Tensor],
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> list[str]:
    """What `parameters`, those of an optimizer's `groups`, are called, by whoever knows."""
    known = {id(parameter): name for name, parameter in named_parameters or ()}
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"group{number}.{place}" for place in range(len(group["params"]))]
        for parameter, name in zip(group["params"], given, strict=True):
            known.setdefault(id(parameter), name)
    return [known[id(parameter)] for parameter in parameters]
