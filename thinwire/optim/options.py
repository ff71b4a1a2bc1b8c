"""The options that all optimizers share, the recipe that a public class gives to its home, and what must hold of both:
checked before anything is sent, so that no collective can mismatch later."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypedDict, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import Communicator
from thinwire.comm.agreement import Nodes
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import Backend
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import DEFAULT_BLOCK_SIZE, CodecName
from thinwire.optim.algorithm import Algorithm, FreezeRule, FreezeStep, make_freeze_rule
from thinwire.optim.settings import WarmupWire
from thinwire.optim.step import ROUNDING, AdamSettings, OwnedParameters, Peak
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES
from thinwire.zero.placement import PLAIN_AVERAGING, Averaging, Sharding
from thinwire.zero.sharded_home import check_interval


class HomeKeywords(TypedDict, total=False):
    """The keyword arguments that every optimizer of ours takes beside its algorithm's own; see HomeOptions."""

    comm: Communicator | None
    mesh: DeviceMesh | None
    comm_backend_name: Backend | None
    stage: int
    max_norm: float | None
    named_parameters: Iterable[tuple[str, Tensor]] | None
    param_dtype: torch.dtype | None
    codec: CodecName
    block_size: int
    bucket_bytes: int | None
    warmup_wire: WarmupWire
    nodes: Nodes
    offload: bool
    pin_memory: bool
    resync_interval: int
    on_drift: Literal["repair", "raise"]
    reversible: bool | None
    averaging: Averaging
    elastic: Elastic | None


@dataclass(frozen=True)
class HomeOptions:
    """What HomeKeywords mean: where an optimizer's state lives, and how it travels.

    Args:
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.
        mesh: in its place, a torch DeviceMesh of one dimension, as `mesh["dp"]`: the ranks to average over.
        comm_backend_name: "nccl", "gloo" or "mpi", where `comm` is not given and the choice must not be automatic.
        stage: 0 keeps all state on every rank. 1 shards master weights, variance and owners' residuals, 2 gradients of
            the warmup too (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054).
        max_norm: 2-norm that the averaged gradient is clipped to, 0 or None for none. Once compression has begun it is
            estimated from random projections to 0.5%, and the second leg waits for it; in a local step it is this
            rank's own.
        named_parameters: names, for checkpoints and errors; by default those that `params` come with.
        param_dtype: torch.bfloat16 or torch.float16 lays fp32 parameters out in it, with fp32 master weights.
        codec: what compressed steps go through: "sign1" (1 bit), "stat2" (2 bits), "int4", "fp8", "int8", "bf16",
            "fp16" or "none". 1-bit Adam and LAMB keep their sharded momentum in it, too.
        block_size: elements that share one scale, a multiple of 64; no more than a rank's share of the model.
        bucket_bytes: bytes of gradients that leave together; None is an eighth of the model, from 4 to 16 MiB, or at
            stages 1 and 2 16 MiB.
        warmup_wire: "fp32" averages the warmup's gradients exactly, "bf16" and "fp16" send half the bytes. "int8" and
            "int4" send a quarter and an eighth, with error feedback until the freeze: on both legs, or where owners
            send weights, which 1-bit Adam and LAMB do at stages 1 and 2, on the first, at 8 bytes an element.
        nodes: which ranks share a node, where some do: their gradients are added up exactly inside it, and nodes are
            the algorithm's workers. "auto" asks the launcher and the hosts, "flat" takes every rank for a node; else
            the node's number for each rank. At stages 1 and 2 nodes must have equally many ranks: "auto" is "flat"
            where hosts have not.
        offload, pin_memory: at stages 1 and 2, keep master weights and the warmup's state in CPU memory, for parameters
            on a GPU.
        resync_interval: steps between two comparisons of all replicas and, at stages 1 and 2 once steps are compressed,
            new copies of the master weights.
        on_drift: what a comparison that fails does: "repair" with a warning, or "raise" a ReplicaDriftError.
        reversible: at stages 1 and 2, keep the residuals of before a step until it is applied, so that a skipped step
            leaves them untouched; by default for fp16 parameters and with `max_norm`, and by node always.
        averaging: the dtype in which a step's backwards add up, and sums over the ranks in place of means; in steps
            that average exactly, the dtype in which gradients travel too, and division before they are summed. What a
            compressed step sends, a codec scales by itself.
        elastic: workers, each a process, that come and go while the job runs, over Gloo; at stage 0.
        owned: parameters that one of such workers steps for all.
    """

    comm: Communicator | None = None
    mesh: DeviceMesh | None = None
    comm_backend_name: Backend | None = None
    stage: int = 0
    max_norm: float | None = 0.0
    named_parameters: Iterable[tuple[str, Tensor]] | None = None
    param_dtype: torch.dtype | None = None
    codec: CodecName = "sign1"
    block_size: int = DEFAULT_BLOCK_SIZE
    bucket_bytes: int | None = None
    warmup_wire: WarmupWire = "fp32"
    nodes: Nodes = "auto"
    offload: bool = False
    pin_memory: bool = True
    resync_interval: int = 100
    on_drift: Literal["repair", "raise"] = "repair"
    reversible: bool | None = None
    averaging: Averaging = PLAIN_AVERAGING
    elastic: Elastic | None = None
    owned: OwnedParameters | None = None

    @property
    def clips_to(self) -> float:
        """`max_norm`, 0 where nothing is clipped."""
        return 0.0 if self.max_norm is None else self.max_norm

    def check(self, optimizer: str, stages: Sequence[int], algorithm: Algorithm) -> None:
        """Raise ValueError or TypeError, naming what was given and expected, for options that cannot work."""
        packs = algorithm.form.packs
        if isinstance(self.stage, bool) or self.stage not in stages:
            raise ValueError(
                f"stage must be {_listed(stages)} for {optimizer}, got {self.stage!r}{_why_not(self.stage)}"
            )
        if self.bucket_bytes is not None and not self.bucket_bytes >= 4:
            raise ValueError(f"bucket_bytes must be at least 4, one element, or None, got {self.bucket_bytes}")
        if self.warmup_wire not in get_args(WarmupWire):
            raise ValueError(f"warmup_wire must be {_listed(get_args(WarmupWire))}, got {self.warmup_wire!r}")
        if self.warmup_wire != "fp32" and not algorithm.freezes:
            raise ValueError(f"{optimizer} has no warmup for warmup_wire={self.warmup_wire!r}: leave it out")
        if self.warmup_wire != "fp32" and self.averaging.wire_dtype is not None:
            raise ValueError("warmup_wire and averaging's wire_dtype say the same: give one of them")
        check_interval(self.resync_interval)
        if self.elastic is not None:
            self.check_elastic()
        if self.on_drift not in ("repair", "raise"):
            raise ValueError(f"on_drift must be 'repair' or 'raise', got {self.on_drift!r}")
        if self.reversible is False and self.max_norm:
            raise ValueError("reversible=False does not go with max_norm: clipping changes residuals after the fact")
        make_codec(self.codec, self.block_size)
        self.sharding.check()
        # What only the other home has is refused, rather than ignored.
        foreign = _ONLY_SHARDED if self.stage == 0 else {} if packs else _ONLY_PACKED
        default = HomeOptions()
        for name, instead in foreign.items():
            if getattr(self, name) != getattr(default, name):
                raise ValueError(f"{name}={getattr(self, name)!r} does not go with stage={self.stage}: {instead}")

    def check_elastic(self) -> None:
        """Raise ValueError or TypeError for what elastic workers cannot have."""
        if not isinstance(self.elastic, Elastic):
            raise TypeError(f"elastic must be a thinwire.Elastic, got {self.elastic!r}")
        if self.stage:
            raise ValueError(
                f"elastic goes with stage=0, where every worker holds all state, got stage={self.stage}: a shard would "
                "go with its owner"
            )
        if self.comm is not None or self.mesh is not None or self.comm_backend_name not in (None, "gloo"):
            raise ValueError(
                "a worker of an elastic job is one process, which finds the others at their meeting place and "
                "exchanges over Gloo: leave comm, mesh and comm_backend_name out"
            )
        if not isinstance(self.nodes, str):
            raise ValueError(f"a worker of an elastic job is one process, got nodes={self.nodes!r}: leave nodes out")
        if self.averaging.op != "mean" or self.averaging.divide_first != 1.0:
            raise ValueError("elastic workers take means, however many they are: leave averaging's op and divide_first")

    @property
    def sharding(self) -> Sharding:
        """How stages 1 and 2 lay parameters out."""
        wire = _DTYPES.get(self.warmup_wire, torch.float32)
        exact = self.averaging if wire == torch.float32 else replace(self.averaging, wire_dtype=wire)
        return Sharding(
            self.stage,
            self.param_dtype,
            LARGEST_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes,
            self.block_size,
            self.clips_to,
            self.offload,
            self.pin_memory,
            exact,
            nodes=self.nodes,
        )

    @property
    def exact_codec(self) -> CodecName:
        """What gradients that are averaged go through, where a codec carries them."""
        if self.warmup_wire in COMPRESSED_WIRES:
            return self.warmup_wire
        return _EXACT_CODECS[self.averaging.wire_dtype or _DTYPES[self.warmup_wire]]

    def compared(self) -> dict[str, Any]:
        """What has to be the same on every rank."""
        own = ("comm", "mesh", "comm_backend_name", "named_parameters", "elastic")
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in own}
        nodes = self.nodes if isinstance(self.nodes, str) else list(self.nodes)
        told = {"max_norm": self.clips_to, "averaging": self.averaging.compared(), "owned": repr(self.owned)}
        return {**values, **told, "param_dtype": str(self.param_dtype), "nodes": nodes}


COMPRESSED_WIRES: Final = ("int8", "int4", "fp8", "stat2", "sign1")
"""Those that keep residuals."""

_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXACT_CODECS: Mapping[torch.dtype, CodecName] = {torch.float32: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}

_ONLY_PACKED: dict[str, str] = {
    "offload": "every rank uses all of its state at every step; leave it out",
    "reversible": "residuals always survive a skipped step here; leave it out",
}
_ONLY_SHARDED: dict[str, str] = {
    "offload": "every rank keeps all state at stage 0; use stage 1 or 2",
    "reversible": "residuals always survive a skipped step at stage 0; leave it out",
}


def _listed(values: Sequence[object]) -> str:
    *some, last = map(repr, values)
    return f"{', '.join(some)} or {last}" if some else last


def _why_not(stage: int) -> str:
    if stage == 2:
        return (
            ": once compressed a gradient lives only while its bucket is in flight, so that there is none to shard. "
            "Use stage 1"
        )
    if stage == 3:
        return ": stage 3 shards the model itself, which thinwire.initialize does with torch's fully_shard"
    return ""


def check_compress(amsgrad: bool, compress: str, stage: int) -> None:
    """Raise ValueError, naming what was given and what is expected, for options that cannot work."""
    if amsgrad:
        raise ValueError("amsgrad=True cannot work with a frozen variance: pass False, or use torch.optim.AdamW")
    if compress not in ("update", "momentum"):
        raise ValueError(f"compress must be 'update' or 'momentum', got {compress!r}")
    if compress == "momentum" and stage:
        raise ValueError(f"compress='momentum' does not go with stage={stage}, which compresses updates: use stage 0")


def check_count(name: str, value: object) -> None:
    """Raise ValueError where option `name` is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter group, or defaults for one, whose hyperparameters cannot work."""
    if not _number("lr", group["lr"]) >= 0:
        raise ValueError(f"lr must be at least 0, got {group['lr']}")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= _number("betas", one) < 1 for one in betas):
        raise ValueError(f"betas must be two numbers from 0 up to, not including, 1; got {betas}")
    if not _number("eps", group.get("eps", 1.0)) > 0:
        raise ValueError(f"eps must be above 0, got {group['eps']}")
    if not _number("weight_decay", group["weight_decay"]) >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {group['weight_decay']}")
    for name in group.keys() & {"freeze_step", "var_freeze_step"}:
        raise ValueError(f"{name} belongs to all parameter groups: pass it to the class, or set it on the optimizer")
    if group.get("maximize") or group.get("amsgrad"):
        raise ValueError("a compressed optimizer has no maximize and no amsgrad: it descends, with one variance")
    if group.get("exp_avg_mask") is not None:
        _check_mask(group["exp_avg_mask"], group["params"])


def _check_mask(mask: object, parameters: Sequence[Tensor]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"exp_avg_mask must be a tensor, got {type(mask).__name__}")
    for parameter in parameters:
        flat = mask.dim() == 1 and mask.numel() == parameter.numel()
        if not flat and not _broadcasts(mask.shape, parameter.shape):
            raise ValueError(
                f"exp_avg_mask of shape {tuple(mask.shape)} does not broadcast to a parameter of its group, of shape "
                f"{tuple(parameter.shape)}, and is not that flattened: give parameters with a mask a group of their own"
            )


def _number(name: str, value: Any) -> float:
    """Raises ValueError for what is none, in a string too."""
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(f"{name} must be a number, got {value!r}")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


# How early a variance may be frozen: it is one of gradients that the model leaves behind

_PLATEAU = 1000
"""Steps without a higher rate after which none is expected, beside as many as it took to rise so far."""


_LEAST_PART = 5
"""A variance that goes on growing as the step number is too small by so many times at the end."""


def earliest_freeze(peak: int, total_steps: int, beta2: float) -> int:
    """The first step after which a variance may be frozen, of a run whose learning rate is highest at step `peak`: not
    before that, nor before a fifth of the steps, or in long runs, a half-life of the variance's memory."""
    half_life = math.log(0.5) / math.log(beta2) if beta2 > 0 else 0.0
    return max(peak, math.ceil(min(total_steps / _LEAST_PART, half_life)))


def find_peak(schedule: Any, steps: int) -> int | None:
    """The first of the next `steps` steps of a schedule, from 1 on, at which rates are as high as they become before
    they fall; None if the schedule does not say, as one that looks at a metric. The schedule stays as it is."""
    peak = Peak()
    try:
        for step, rates in enumerate(_rates_to_come(schedule), start=1):
            peak.take(step, rates)
            fell = all(now < highest * (1 - ROUNDING) for now, highest in zip(rates, peak.rates, strict=True))
            if fell or step == steps or step > 2 * peak.step + _PLATEAU:
                break
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):  # of a class that we do not know
        return None
    return peak.step


def _rates_to_come(schedule: Any) -> Iterator[list[float]]:
    """The rates of every parameter group, step by step, of a copy that steers nothing."""
    stand_in = _StandIn(schedule.optimizer)
    copied = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
    while True:
        yield [float(group["lr"]) for group in stand_in.param_groups]
        copied.step()


class _StandIn:
    """What a schedule's copy steers: an optimizer's hyperparameters without its parameters."""

    _opt_called = True  # else torch warns that the schedule is stepped before the optimizer

    def __init__(self, optimizer: Any) -> None:
        self.defaults: Mapping[str, Any] = dict(optimizer.defaults)
        self.param_groups = [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        ]

    def step(self) -> None:
        """Nothing: a schedule looks for it."""


_StandIn.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm, when it freezes, and what has to hold of its options.

    Args:
        algorithm: makes one, for parameters that enter together.
        settings: what ranks and checkpoints have to agree on, as it gives momenta and residuals their meaning.
        schedule: what ranks have to agree on, and a resume may change, beside `freeze_step`.
        stages: those that the algorithm has.
        check: raises ValueError for options that cannot work.
        check_group: the same for a parameter group, or the defaults of one.
        hyperparameters: the class of a parameter group's.
        freeze_step: the step after which the warmup ends, or "auto"; None where there is none.
        freeze_option: its name.
    """

    algorithm: Callable[[], Algorithm]
    settings: Mapping[str, Any]
    schedule: Mapping[str, Any]
    stages: Sequence[int]
    check: Callable[[], None]
    check_group: Callable[[Mapping[str, Any]], None] = check_group
    hyperparameters: type[AdamSettings] = AdamSettings
    freeze_step: FreezeStep | None = None
    freeze_option: str = "freeze_step"

    def rule(self, beta2: float) -> FreezeRule | None:
        """Make the rule that ends a warmup, given the largest β₂. Raises ValueError for a bad `freeze_step`."""
        if self.freeze_step is None:
            return None
        if self.freeze_option != "freeze_step":  # nothing else can be "auto"
            check_count(self.freeze_option, self.freeze_step)
        return make_freeze_rule(self.freeze_step, beta2)

    @property
    def compared(self) -> dict[str, Any]:
        """What ranks have to agree on."""
        return {**self.settings, **self.schedule, self.freeze_option: self.freeze_step}
