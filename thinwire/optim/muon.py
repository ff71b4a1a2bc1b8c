"""Muon through one, two or four bits an element from the first step to the last."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.comm.agreement import Nodes
from thinwire.compress.packet_layout import BlockCodecName
from thinwire.optim.exact import AdjustLr, Muon, NewtonSchulzType, groups_of, mark_matrices
from thinwire.optim.optimizer import SavingsReport
from thinwire.zero import ShardedOptimizer
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES
from thinwire.zero.placement import PLAIN_AVERAGING, Averaging
from thinwire.zero.sharded_home import ShardedHome

_MOST_PADDING = 1.5
_Codecs = BlockCodecName | tuple[BlockCodecName, BlockCodecName]
"""Of gradients, and of what comes back."""


class OneBitMuon(ShardedOptimizer):
    """Muon whose gradients and steps travel in one, two or four bits an element, from the first step on.

    Muon has no variance, so that nothing has to be frozen and nothing is warmed up. Each hidden matrix has one owner:

        rank i   c_i = C(g_i + e_i),  e_i += g_i - c_i                              leg 1, to the owner of the matrix
        owner    m ← μ m + (1 - μ) mean c;  w ← (1 - ηλ) w - η·r·O(μ m + (1 - μ) mean c);  q = D(w - r)
        all      r += q                                                             leg 2: the same bits on every rank

    w are the owner's fp32 master weights and r the model's parameters: what D loses comes with the next step. O are
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
        adjust_lr_fn, nesterov, ns_steps, ns_dtype, betas, eps, muon_lr, adam_lr: as in `thinwire.optim.Muon`.
        resync_interval: steps between two comparisons of all replicas.
        stage: 0, 1 or 2.
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
        adjust_lr_fn: AdjustLr | None = "match_rms_adamw",
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: NewtonSchulzType | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        stage: Literal[0, 1, 2] = 0,
        comm: Communicator | None = None,
        comm_backend_name: Literal["nccl", "gloo", "mpi"] | None = None,
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
    ) -> None:
        comm = comm or communication.init(backend=comm_backend_name)
        named = None if named_parameters is None else list(named_parameters)
        mark_matrices(named or ())
        rates: dict[str, Any] = {"lr": lr, "muon_lr": muon_lr, "adam_lr": adam_lr, "weight_decay": weight_decay}
        matrices = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        rest = {"betas": betas, "eps": eps}
        sent = {"nodes": nodes, "resync_interval": resync_interval, "offload": offload, "pin_memory": pin_memory}
        super().__init__(
            _checked(params, warn=comm.rank == 0),
            Muon,
            stage=stage or 1,
            comm=comm,
            named_parameters=named,
            param_dtype=param_dtype,
            bucket_bytes=LARGEST_BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
            max_norm=max_norm,
            block_size=block_size,
            averaging=averaging,
            codec=_both(codec),
            rest_codec=_both(rest_codec),
            adjust_lr_fn=adjust_lr_fn,
            **{**rates, **matrices, **rest, **sent},
        )
        self.stage = stage
        self._warn_of_padding()
        self._savings = SavingsReport(self, comm, recipe=None, uncompressed=self._home.uncompressed_step_bytes)
        if self._savings.speaks:
            self.register_step_post_hook(self._note_step)

    frozen = True
    """Every step is compressed."""

    def _warn_of_padding(self) -> None:
        """Warn if owners have so unlike shares of the matrices that much of what is sent is padding."""
        assert isinstance(self._home, ShardedHome)
        layouts = [one.layout for one in self._home._parameters.buckets if one.layout.whole]
        held = sum(slot.numel + one.block_size * self.comm.size for one in layouts for slot in one.slots)
        times = sum(one.padded_numel for one in layouts) / held if held else 1.0
        if self.comm.rank == 0 and times > _MOST_PADDING:
            warnings.warn(
                f"OneBitMuon sends {times:.1f} times its matrices' bits, the rest is padding: each has one owner, and "
                f"they are too few or too unlike for {self.comm.size} ranks to own about as much. Use fewer ranks, or "
                "OneBitAdam",
                RuntimeWarning,
                stacklevel=3,
            )

    @staticmethod
    def _note_step(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        assert isinstance(optimizer, OneBitMuon)
        sent = optimizer.bytes_sent, optimizer.bytes_uncompressed
        optimizer._savings.note(optimizer.steps, None, *sent, 0)

    @override
    def close(self) -> None:
        self._savings.end()
        super().close()


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
