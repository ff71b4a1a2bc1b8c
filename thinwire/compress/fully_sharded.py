"""FSDP2's collectives through codecs: weights are gathered and gradients reduced in few bits between nodes, and exactly
inside of them, where a second copy of the weights serves every gather but the first after a step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank
from thinwire.comm.collectives import Traffic
from thinwire.comm.traffic import sent_bytes
from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.packet_layout import MemorylessCodec, shard_numel, sharded_block

# torch 2.13 renamed both and warns at the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FsdpHooks:
    """What `fsdp_hooks` has put into a model, with residuals and copies of weights; counts the bytes that they send.

    `between_nodes`: the traffic of what a codec carries, or that fills the copies inside nodes. `traffic`: all else.
    """

    def __init__(self, divide_first: float) -> None:
        self.traffic, self.between_nodes = Traffic(), Traffic()
        self.divide_first = divide_first
        self.gathers: dict[str, _AllGather] = {}
        self.reduces: dict[str, _ReduceScatter] = {}
        self.held: set[int] = set()  # the model's parameters, by id

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, headers, scales and padding included."""
        return self.traffic.bytes_sent + self.between_nodes.bytes_sent

    def weights_stepped(self) -> None:
        """Have the next gather of every module bring its copy inside the node up to date. Every rank has to say so;
        steps of torch optimizers that hold the model's parameters do."""
        for gather in self.gathers.values():
            gather.is_stale = True

    def reset(self) -> None:
        """Forget residuals and copies, so that weights are gathered whole: once they were written, as `load_state_dict`
        of the model does, or a step was skipped. Every rank has to."""
        self.drop_residuals()
        for gather in self.gathers.values():
            gather.copy = None

    def drop_residuals(self) -> None:
        """Set residuals to zero: they are of gradients that were not stepped along."""
        for reduce in self.reduces.values():
            reduce.residual = None


class _Ranks:
    """The ranks of a mesh as nodes of so many: `inside` are this node's, `between` those of its number in every node.

    Without nodes every rank is one.
    """

    def __init__(self, whole: Communicator, node_size: int, hooks: FsdpHooks) -> None:
        self.size, self.inside = whole.size, None
        between: Communicator | None = whole
        if node_size > 1:
            self.inside = whole.split(whole.rank // node_size)
            between = whole.split(whole.rank % node_size)
            assert self.inside is not None
            self.inside.traffic = hooks.traffic
        assert between is not None
        self.between = between
        self.between.traffic = hooks.between_nodes


class _Collective:
    """A collective of one module; without a codec and nodes, torch's own, counted."""

    def __init__(self, hooks: FsdpHooks, codec: Codec | None, ranks: _Ranks | None) -> None:
        self._hooks, self._codec, self._ranks = hooks, codec, ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _padded(self, values: Tensor, codec: Codec) -> Tensor:
        """Rows of values, each as whole blocks of the codec's, fp32, in new memory."""
        rows, numel = values.shape
        padded = torch.zeros(rows, shard_numel(numel, 1, codec.scale_block), device=values.device)
        padded[:, :numel] = values
        return padded

    def _packets(self, rows: int, padded: Tensor, codec: Codec) -> Tensor:
        return torch.zeros(rows, codec.packet_bytes(padded.shape[1]), dtype=torch.uint8, device=padded.device)


class _AllGather(_Collective):
    """Gather a module's weights. Without nodes every gather sends them through the codec. With nodes `copy`, [nodes,
    shard] in the dtype of the gather, holds this rank's number's shards of every node: what its owners' weights are
    further on is all that leaves a node, once a step, and so what a codec loses goes with the next."""

    copy: Tensor | None = None
    is_stale = False

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        codec, ranks = self._codec, self._ranks
        if ranks is None:
            self._hooks.traffic.add("all_gather", sent_bytes("all_gather", input_tensor.nbytes, group.size()))
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if not input_tensor.is_floating_point():
            raise TypeError(
                f"weights are gathered as {input_tensor.dtype}, which holds several dtypes: a codec needs one. Give "
                "fully_shard an mp_policy with a param_dtype, no tensor subclasses, and modules of one dtype each"
            )
        numel = input_tensor.numel()
        if ranks.inside is None:
            assert codec is not None
            # Its own weights too, so that every rank computes with the same.
            output_tensor.view(ranks.size, numel).copy_(self._through(codec, input_tensor.view(1, numel)))
            return None
        self._refresh(input_tensor.view(1, numel))
        assert self.copy is not None
        gathered = input_tensor.new_empty(ranks.inside.size, *self.copy.shape)
        ranks.inside.all_gather(gathered, self.copy)
        output_tensor.view(-1, ranks.inside.size, numel).copy_(gathered.transpose(0, 1))
        return None

    def _refresh(self, weights: Tensor) -> None:
        assert self._ranks is not None
        between = self._ranks.between
        if self.copy is None or (self.is_stale and self._codec is None):
            self.copy = weights.new_empty(between.size, weights.shape[1])
            between.all_gather(self.copy, weights.clone())
        elif self.is_stale and self._codec is not None and between.size > 1:
            own = self.copy[between.rank : between.rank + 1]
            self.copy += self._through(self._codec, weights.float() - own)
        elif self.is_stale:
            self.copy.copy_(weights)
        self.is_stale = False

    def _through(self, codec: Codec, values: Tensor) -> Tensor:
        """What the codec makes of the values, [1, numel], of all ranks between nodes, [nodes, numel]."""
        assert self._ranks is not None
        between, padded = self._ranks.between, self._padded(values, codec)
        sent, received = self._packets(1, padded, codec), self._packets(between.size, padded, codec)
        codec.encode(padded.view(-1), None, sent, padded.numel())
        between.all_gather(received, sent)
        decoded = padded.new_empty(between.size, padded.shape[1])
        codec.decode(received, decoded.view(-1), decoded.numel())
        return decoded[:, : values.shape[1]]


class _ReduceScatter(_Collective):
    """Reduce a module's gradients: a sum inside the node, then each node's sum through the codec to the owner, which
    adds up in fp32. `residual`, fp32 [nodes, padded shard], is what the codec has lost."""

    residual: Tensor | None = None
    keeps_residual = True

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        assert not async_op, "FSDP2 waits for its streams, not for this work"
        divide_first = self._hooks.divide_first
        if divide_first != 1.0:
            input_tensor.div_(divide_first)
        if self._ranks is None or self._codec is None:
            # As an all-to-all: every rank sends the others their parts.
            self._hooks.traffic.add("reduce_scatter", sent_bytes("all_to_all", input_tensor.nbytes, group.size()))
            work = _reduce_scatter(output_tensor, input_tensor, group=group, op=op)
        else:
            work = None
            total = 1.0 if op == dist.ReduceOp.AVG else float(self._ranks.size)
            if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
                raise ValueError(f"gradients are summed or averaged through a codec, got {op}: set no divide factor")
            self._reduce(self._codec, self._ranks, output_tensor, input_tensor, total)
        if divide_first != 1.0:
            output_tensor.mul_(divide_first / group.size())
        return work

    def _reduce(self, codec: Codec, ranks: _Ranks, output: Tensor, gradients: Tensor, times_mean: float) -> None:
        numel, inside, between = output.numel(), ranks.inside, ranks.between
        rows = gradients.view(-1, numel)
        if inside is not None:
            parts = rows.view(-1, inside.size, numel).transpose(0, 1).contiguous()
            received = torch.empty_like(parts)
            inside.all_to_all(received, parts)
            rows = received.sum(0, dtype=torch.float32)
        if between.size > 1:
            padded = self._padded(rows, codec)
            sent, brought = (self._packets(between.size, padded, codec) for _ in range(2))
            before = None if self.residual is None or self.residual.shape != padded.shape else self.residual
            codec.encode(padded.view(-1), None if before is None else before.view(-1), sent, padded.numel())
            if self.keeps_residual:
                # What is not finite has been sent, and must not come again.
                self.residual = padded.nan_to_num_(0.0, 0.0, 0.0)
            between.all_to_all(brought, sent)
            mean = padded.new_empty(padded.shape[1])
            codec.decode_mean(brought, mean, mean.numel())
            rows = mean[:numel]
        output.copy_(rows.view(-1))
        inside_size = 1 if inside is None else inside.size
        if inside_size != times_mean:
            output.mul_(times_mean / inside_size)


def fsdp_hooks(
    model: nn.Module,
    *,
    weights: MemorylessCodec | None = None,
    gradients: MemorylessCodec | None = None,
    node_size: int = 1,
    residuals: bool = True,
    divide_first: float = 1.0,
) -> FsdpHooks:
    """Have every part of `model` that `fully_shard` was applied to gather its weights and reduce its gradients through
    codecs. Collective; before the first forward.

    Args:
        model: sharded by FSDP2, all of it over one mesh of one dimension.
        weights: "int8", "int4", "fp8", "bf16", "fp16" or "none", which sends fp32, between nodes; None leaves them to
            torch.
        gradients: the same.
        node_size: ranks of a node, which follow one another in the mesh. With more than one, each node keeps a copy of
            all weights, in the dtype in which they are gathered and sharded over its ranks, that forward and backward
            gather from; between nodes a step sends once what its weights differ from that copy.
        residuals: whether what a codec loses of gradients is added to the next; an fp32 copy of the model's gradients
            over `node_size` ranks.
        divide_first: what gradients are divided by before they leave; their sum is multiplied by as much over the
            number of ranks.

    Raises ValueError or TypeError, on every rank, for other values, or a model that is not sharded so or has hooks.
    """
    from torch.distributed.fsdp import FSDPModule  # half a second that only stage 3 should cost

    if any(module in _hooked for module in model.modules()):
        raise ValueError("fsdp_hooks was called on this model before, or on a part of it: call it once, on all of it")
    hooks = FsdpHooks(divide_first)
    ranks = None
    if weights is not None or gradients is not None or node_size != 1:
        mesh = _mesh_of(model)
        whole = Communicator.of(mesh)
        asked = {"weights": weights, "gradients": gradients, "node_size": node_size, "residuals": residuals}
        on_every_rank(whole, lambda: _check(weights, gradients, node_size, whole.size), "take codecs", (ValueError,))
        check_same_on_every_rank(whole, [], [], asked)
        ranks = _Ranks(whole, node_size, hooks)
    codecs = [None if one is None else make_codec(one, sharded_block(one)) for one in (weights, gradients)]
    through_copy = weights is not None or node_size > 1
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            gather = hooks.gathers[name] = _AllGather(hooks, codecs[0], ranks if through_copy else None)
            reduce = hooks.reduces[name] = _ReduceScatter(hooks, codecs[1], ranks)
            reduce.keeps_residual = residuals
            _hooked.add(module)
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
            if divide_first != 1.0:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    if node_size > 1:
        _follow_writes(model, hooks)
    return hooks


def _mesh_of(model: nn.Module) -> Any:
    meshes = {getattr(parameter, "device_mesh", None) for parameter in model.parameters() if parameter.numel()}
    mesh = next(iter(meshes), None)
    if len(meshes) != 1 or mesh is None or mesh.ndim != 1:
        raise ValueError(
            "codecs take a model of which every parameter is sharded over one mesh of one dimension, and this one's "
            f"lie on {', '.join(map(str, meshes)) or 'none'}: apply torch's fully_shard to all of it first"
        )
    return mesh


def _check(weights: object, gradients: object, node_size: object, ranks: int) -> None:
    for name, codec in (("weights", weights), ("gradients", gradients)):
        if codec is not None and codec not in get_args(MemorylessCodec):
            raise ValueError(f"{name} must be one of {', '.join(get_args(MemorylessCodec))}, or None, got {codec!r}")
    if not isinstance(node_size, int) or node_size < 1 or ranks % node_size:
        raise ValueError(f"node_size must be a number of ranks that divides the mesh's {ranks}, got {node_size!r}")


_hooked: weakref.WeakSet[Any] = weakref.WeakSet()
_followed: weakref.WeakSet[FsdpHooks] = weakref.WeakSet()


def _follow_writes(model: nn.Module, hooks: FsdpHooks) -> None:
    _hook_into_steps()
    hooks.held = {id(parameter) for parameter in model.parameters()}
    _followed.add(hooks)
    reference = weakref.ref(hooks)

    def reset(*_: object) -> None:
        if (found := reference()) is not None:
            found.reset()

    model.register_load_state_dict_post_hook(reset)  # type: ignore[no-untyped-call]


@functools.cache
def _hook_into_steps() -> None:
    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for hooks in _followed:
            if any(id(one) in hooks.held for group in optimizer.param_groups for one in group["params"]):
                hooks.weights_stepped()

    register_optimizer_step_post_hook(stepped)
