"""Muon, which orthogonalises the momentum of matrices (Jordan et al. 2024): exact, a torch optimizer that needs whole
matrices; and through one, two or four bits an element from the first step to the last."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import Nodes
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import Backend, join
from thinwire.compress.packet_layout import LOW_RANK, BlockCodecName
from thinwire.optim.exact import ExactOptimizer, check_betas, check_not_negative
from thinwire.optim.optimizer import SavingsReport
from thinwire.zero import ShardedOptimizer
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES
from thinwire.zero.placement import PLAIN_AVERAGING, Averaging
from thinwire.zero.sharded_home import ShardedHome

AdjustLr = Literal["original", "match_rms_adamw"]
NewtonSchulzType = Literal["fp32", "bf16"]

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


class Muon(ExactOptimizer):
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
        fused: of the rest, as in torch.optim.AdamW.

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
        fused: bool | None = None,
    ) -> None:
        rates = _rates(lr, muon_lr, adam_lr)
        check_not_negative(lr=rates[0], adam_lr=rates[1], momentum=momentum, weight_decay=weight_decay, eps=eps)
        check_betas(betas)
        if not momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
        if not isinstance(nesterov, bool):
            raise ValueError(f"nesterov must be true or false, got {nesterov!r}")
        if not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be a whole number from 1 to 99, got {ns_steps!r}")
        if adjust_lr_fn not in (None, *get_args(AdjustLr)):
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(get_args(AdjustLr))}, got {adjust_lr_fn!r}")
        if ns_dtype not in (None, *get_args(NewtonSchulzType)):
            raise ValueError(f"ns_dtype must be one of {', '.join(get_args(NewtonSchulzType))}, got {ns_dtype!r}")
        defaults: dict[str, Any] = {"lr": rates[1], "use_muon": False, "momentum": momentum, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov, "ns_steps": ns_steps}
        groups = self.arrange(params, lr=lr, muon_lr=muon_lr, adam_lr=adam_lr)
        super().__init__(groups, {**defaults, "adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype, "fused": fused})

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
            _check_mark(group["use_muon"])
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
            inner = torch.optim.AdamW(group["params"], fused=group.get("fused"), **settings)
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
    return _check_mark(getattr(parameter, "use_muon", parameter.dim() >= 2 and not _NOT_HIDDEN.search(name)))


def _check_mark(mark: object) -> bool:
    if not isinstance(mark, bool):
        raise ValueError(f"use_muon must be true or false, of a group as of a parameter, got {mark!r}")
    return mark


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
    groups = given if all(isinstance(one, dict) for one in given) else [{"params": given}]
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


_MOST_SHARE = 1.5
"""Of the matrices, as a multiple of an owner's mean, that goes without a warning."""

_Codecs = BlockCodecName | tuple[BlockCodecName, BlockCodecName]
"""Of gradients, and of what comes back."""


class OneBitMuon(ShardedOptimizer):
    """Muon whose gradients and steps travel in one, two or four bits an element, from the first step on.

    Muon has no variance, so that nothing has to be frozen and nothing is warmed up. Each hidden matrix has one owner:

        rank i   c_i = C(g_i + e_i),  e_i += g_i - c_i                              leg 1, to the owner of the matrix
        owner    m ← μ m + (1 - μ) mean c;  w ← (1 - ηλ) w - η·r·O(m);  q = D(w - r)
        all      r += q                                                             leg 2: the same bits on every rank

    C sends a few leading singular directions of a matrix's gradient in bf16, and rounds the rest to the codec's bits:
    O steps as far along every direction, and one bit loses as much in each, which is more than most hold. w are the
    owner's fp32 master weights and r the model's parameters: what D loses comes with the next step. O are
    Newton-Schulz iterations, once a matrix in the whole job, and r by `adjust_lr_fn`: see `thinwire.optim.Muon`.
    Embeddings, heads, norms and biases are stepped by AdamW, through `rest_codec`, in shards. A parameter's attribute
    `use_muon`, or a group's, says which it is; else dimensions and names do: pass `model.named_parameters()`.

    Synchronises by itself as OneBitAdam does, with the same calls and checkpoints, which cross to and from an exact
    `ShardedOptimizer(..., thinwire.optim.Muon)`. Momenta and master weights lie on their owners at every stage: 0, 1
    and 2 are one thing.

    Args:
        params: parameters or groups, with names or without; the same on every rank.
        lr: of all; with "match_rms_adamw" as AdamW's.
        momentum: μ, of matrices.
        weight_decay: λ, decoupled, of all.
        codec: "sign1" (1 bit), "stat2" (2), "int4", "fp8" or "int8", or a pair: of gradients, and of what comes back.
        rest_codec: the same of what is no hidden matrix.
        low_rank: the most leading directions of a matrix, and no more than take a bit an element; 0 sends none.
        nesterov: whether the momentum looks ahead, by which what was rounded last counts twice.
        adjust_lr_fn, ns_steps, ns_dtype, betas, eps, muon_lr, adam_lr: as in `thinwire.optim.Muon`.
        resync_interval: steps between two comparisons of all replicas.
        stage: 0, 1 or 2.
        elastic: workers, each a process, that come and go, in fp32. The worker after a matrix's owner is its buddy: it
            gets the same packets, so that leg 1 takes twice the bytes, and keeps the same momentum and master weights.
            If both die, the job ends. What is no hidden matrix is averaged through one `rest_codec` on both legs, and
            stepped by all.
        comm_backend_name: as in OneBitAdam, and all others as in ShardedOptimizer.

    Raises ValueError or TypeError, on every rank, for parameters or options that cannot work.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        codec: _Codecs = "sign1",
        rest_codec: _Codecs = "stat2",
        low_rank: int = LOW_RANK,
        adjust_lr_fn: AdjustLr | None = "match_rms_adamw",
        nesterov: bool = False,
        ns_steps: int = 5,
        ns_dtype: NewtonSchulzType | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        stage: Literal[0, 1, 2] = 0,
        comm: Communicator | None = None,
        mesh: DeviceMesh | None = None,
        comm_backend_name: Backend | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int | None = None,
        block_size: int = 2048,
        max_norm: float | None = 0.0,
        offload: bool = False,
        pin_memory: bool = True,
        nodes: Nodes = "auto",
        resync_interval: int = 100,
        averaging: Averaging = PLAIN_AVERAGING,
        elastic: Elastic | None = None,
    ) -> None:
        over = _ranks(elastic, comm, mesh, comm_backend_name)
        named = None if named_parameters is None else list(named_parameters)
        mark_matrices(named or ())
        rates: dict[str, Any] = {"lr": lr, "muon_lr": muon_lr, "adam_lr": adam_lr, "weight_decay": weight_decay}
        matrices = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        rest = {"betas": betas, "eps": eps, "low_rank": low_rank}
        sent = {"nodes": nodes, "resync_interval": resync_interval, "offload": offload, "pin_memory": pin_memory}
        super().__init__(
            _checked(params, warn=over["comm"] is None or over["comm"].rank == 0),
            Muon,
            stage=stage or 1,
            named_parameters=named,
            param_dtype=param_dtype,
            bucket_bytes=LARGEST_BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
            max_norm=max_norm,
            block_size=block_size,
            averaging=averaging,
            codec=_both(codec),
            rest_codec=_both(rest_codec),
            adjust_lr_fn=adjust_lr_fn,
            **{**over, **rates, **matrices, **rest, **sent},
        )
        self.stage = stage
        self._warn_of_unlike_shares()
        self._savings = SavingsReport(self, self.comm, recipe=None, uncompressed=self._home.uncompressed_step_bytes)

    frozen = True
    """Every step is compressed."""

    def _warn_of_unlike_shares(self) -> None:
        """Warn if owners have so unlike shares of the matrices that all wait for those with most."""
        if not isinstance(self._home, ShardedHome):  # of as many workers as come
            return
        layouts = [one.layout for one in self._home._parameters.buckets if one.layout.whole]
        held = sum(slot.numel + one.block_size * self.comm.size for one in layouts for slot in one.slots)
        times = sum(one.padded_numel for one in layouts) / held if held else 1.0
        if self.comm.rank == 0 and times > _MOST_SHARE:
            warnings.warn(
                f"OneBitMuon has ranks wait for one with {times:.1f} times its share of the matrices, and keep memory "
                f"for as much from each: they are too few or too unlike for {self.comm.size} ranks to own about as "
                "much. Use fewer ranks, or OneBitAdam",
                RuntimeWarning,
                stacklevel=3,
            )

    @override
    def close(self) -> None:
        self._savings.end()
        super().close()


def _ranks(elastic: Elastic | None, comm: Communicator | None, mesh: DeviceMesh | None, backend: Any) -> dict[str, Any]:
    """Over which ranks, as ShardedOptimizer takes it: those that there are, or workers that come and go."""
    if elastic is None:
        return {"comm": join(comm, mesh, backend)}
    if backend not in (None, "gloo"):
        raise ValueError(f"elastic workers exchange over Gloo, got comm_backend_name={backend!r}: leave it out")
    return {"comm": comm, "mesh": mesh, "elastic": elastic}


def _both(codec: Any) -> Any:
    if codec is None:
        raise ValueError("codec and rest_codec must name what is sent, got None: use ShardedOptimizer to send exactly")
    return (codec, codec) if isinstance(codec, str) else codec


def _checked(params: ParamsT, warn: bool) -> list[dict[str, Any]]:
    """The groups of `params`, with a warning if matrices are told from embeddings by their dimensions alone."""
    groups = groups_of(params)
    told = ("param_names" in group or "use_muon" in group for group in groups)
    held = [one for group, known in zip(groups, told, strict=True) if not known for one in group["params"]]
    nameless = [one for one in held if isinstance(one, Tensor) and not hasattr(one, "use_muon") and one.dim() >= 2]
    if nameless and warn:
        warnings.warn(
            f"OneBitMuon takes {len(nameless)} parameters for hidden matrices by their dimensions alone, embeddings "
            "and heads too, which lose by it: pass model.named_parameters(), by whose names it tells them apart, or "
            "set their attribute use_muon to False",
            RuntimeWarning,
            stacklevel=3,
        )
    return groups
