"""Tensor parallelism of Hugging Face models: which matrices of a model are cut, as data, and what follows from it.

A plan speaks as Transformers' `base_model_tp_plan` does, whose models bring their own: a matrix is cut by `colwise`, so
that a rank has some heads or channels of its output, or by `rowwise`, which takes these and adds up over the ranks.
`fused N` cuts by columns each of the N matrices that lie in one, such as queries, keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank


@dataclass(frozen=True)
class _Plan:
    """Of a family of models; paths begin in the base model, and `*` is the number of a layer.

    split_sizes: attributes that say how wide a part of a fused matrix is, which becomes a rank's.
    With sequence parallelism, the hidden states that `first` gives are cut in their length until `last` has given its
    own; norms and dropouts on the way see a part.
    """

    matrices: Mapping[str, str]
    split_sizes: Sequence[str] = ()
    first: str = ""
    last: str = ""
    norms: Sequence[str] = ()
    dropouts: Sequence[str] = ()


_BERT = _Plan(
    matrices={
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    first="embeddings",
    last="encoder.layer",
    norms=["encoder.layer.*.attention.output.LayerNorm", "encoder.layer.*.output.LayerNorm"],
    dropouts=["encoder.layer.*.attention.output.dropout", "encoder.layer.*.output.dropout"],
)
_PLANS = {
    "bert": _BERT,
    "roberta": _BERT,
    "gpt2": _Plan(
        matrices={
            "h.*.attn.c_attn": "fused 3",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        split_sizes=["h.*.attn.split_size"],
        first="drop",
        last="ln_f",
        norms=["h.*.ln_1", "h.*.ln_2", "ln_f"],
        dropouts=["h.*.attn.resid_dropout", "h.*.mlp.dropout"],
    ),
    "modernbert": _Plan(
        matrices={
            "layers.*.attn.Wqkv": "fused 3",
            "layers.*.attn.Wo": "rowwise",
            "layers.*.mlp.Wi": "fused 2",
            "layers.*.mlp.Wo": "rowwise",
        },
        first="embeddings",
        last="final_norm",
        norms=["layers.*.attn_norm", "layers.*.mlp_norm", "final_norm"],
        dropouts=["layers.*.attn.out_drop"],
    ),
    "llama": _Plan(
        matrices={},  # its own
        first="embed_tokens",
        last="norm",
        norms=["layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"],
    ),
}
_STYLES = {"rowwise": 0, "colwise": 1, "fused 2": 2, "fused 3": 3}  # and how many matrices it cuts by columns
_BY_HAND = "torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan) takes a plan of your own"


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> nn.Module:
    """Cut a Hugging Face model's attention and feed-forward matrices over the ranks of a mesh, in place.

    Their parameters become DTensors, whose `full_tensor` is what the model had; embeddings, norms and heads stay whole.
    All take the values that the mesh's first rank has, and so does the state of random numbers, which must stay alike
    in the ranks of a mesh: dropout is then the same on what they all have, and other on each rank's part.

    model: BERT, RoBERTa, GPT-2, ModernBERT, or one whose configuration has a `base_model_tp_plan` of matrices, as
        Llama's; on its device.
    mesh: of one dimension, as `mesh["tp"]`. It must divide heads, those of keys and values too, and intermediate sizes.
    sequence_parallel: cut what norms and dropouts between the matrices see in its length, where the plan says how.

    Returns the model. Collective. Raises ValueError, on every rank, with nothing changed, for what cannot be cut.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f'mesh must be a DeviceMesh of one dimension, as mesh["tp"], not {mesh}')
    comm = Communicator.of(mesh)
    found = on_every_rank(comm, lambda: _find(model, mesh.size(), sequence_parallel), "cut the model", (ValueError,))
    base, plan, matrices = found
    settings = {"matrices": matrices, "sequence_parallel": sequence_parallel}
    check_same_on_every_rank(comm, [*model.parameters()], [], settings)
    _send_from_first(comm, model)
    between = _BetweenMatrices(mesh)
    model.register_forward_pre_hook(between.leave)  # where an error has left it
    for name, style in matrices.items():
        module = base.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            for parameter in module.parameters():
                parameter.register_hook(partial(_add_up, comm))  # type: ignore[no-untyped-call]
            continue
        is_row = style == "rowwise"
        module.register_forward_pre_hook(between.leave if is_row else between.on_entering)
        parallelize_module(module, mesh, _style(module, style, sequence_parallel))
    for path in plan.split_sizes:
        path, _, attribute = path.rpartition(".")
        for _, module in _matching(base, path):
            setattr(module, attribute, getattr(module, attribute) // mesh.size())
    if sequence_parallel:
        _cut_sequence(base, plan, mesh, between)
    return model


def _find(model: nn.Module, ranks: int, sequence_parallel: bool) -> tuple[nn.Module, _Plan, dict[str, str]]:
    """The base model, its plan, and the style of each matrix."""
    kind, config, base = type(model).__name__, getattr(model, "config", None), getattr(model, "base_model", model)
    plan = _PLANS.get(getattr(config, "model_type", ""), _Plan({}))
    patterns = plan.matrices or getattr(config, "base_model_tp_plan", None) or {}
    if not patterns:
        raise ValueError(f"there is no plan of how to cut a {kind}: {_BY_HAND}")
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError(f"{kind} has DTensors already: it is cut once, before anything else shards it")
    if sequence_parallel and not plan.norms:
        raise ValueError(f"the plan of {kind} does not say which norms see a part of a sequence: {_BY_HAND}")
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, what, None)) is not None and heads % ranks:
            raise ValueError(f"{kind} has {what}={heads}, which {ranks} ranks of the mesh cannot share equally")
    matrices = {}
    for path, style in patterns.items():
        for name, module in _matching(base, path):
            matrices[name] = style
            if style == "replicated_with_grad_allreduce":
                continue
            if not (isinstance(module, nn.Linear) or _is_conv(module)) or style not in _STYLES:
                raise ValueError(f"{kind} would cut {name}, a {type(module).__name__}, by {style!r}, which this cannot")
            weight = module.get_parameter("weight")
            rows, columns = weight.shape if _is_conv(module) else weight.shape[::-1]
            size = rows if style == "rowwise" else columns // _STYLES[style]
            if size % ranks:
                raise ValueError(f"{name} is {size} wide, which {ranks} ranks of the mesh cannot share equally")
    if not matrices:
        raise ValueError(f"{kind} has no module at {', '.join(patterns)}, as its plan says: {_BY_HAND}")
    return base, plan, matrices


def _matching(base: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
    return [(name, module) for name, module in base.named_modules() if pattern.fullmatch(name)]


def _is_conv(module: nn.Module) -> bool:
    """Whether it is Transformers' Conv1D: a Linear whose weight is transposed."""
    return hasattr(module, "nf") and hasattr(module, "nx")


@torch.no_grad()
def _send_from_first(comm: Communicator, model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            comm.broadcast(tensor.data, root=0)
    seed = torch.randint(1 << 62, ()).to(comm.control_device)
    comm.broadcast(seed, root=0)
    torch.manual_seed(int(seed))


def _add_up(comm: Communicator, gradient: Tensor) -> Tensor:
    """Over heads that other ranks have."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


class _BetweenMatrices:
    """What holds from a matrix cut by columns to the one by rows: ranks have other activations, and draw other numbers.

    The numbers follow from the common ones, so that whoever restores these, as checkpointing of activations does, has
    the same again.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._given: Any = None
        self._whole: Any = None
        self._common: Tensor | None = None
        device = mesh.device_type
        self._generators = None if device == "cpu" else torch.get_device_module(device)

    def on_entering(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give all matrices that take one tensor one DTensor, whose gradient is then added up once."""
        if self._given is not args[0]:
            (self._given,) = args
            self._whole = _whole(self._given, self.mesh)
            self._common = None  # of what did not come to its end, as recomputing need not
            if module.training:
                self.draw_own()
        return (self._whole,)

    def draw_own(self) -> None:
        """Draw what no other rank draws, until `leave`."""
        seed = int(torch.randint(1 << 62, ()))
        self._common = self._generator.get_state()
        self._generator.manual_seed(seed + self.mesh.get_local_rank())

    def leave(self, *_: object) -> None:
        """Draw what all ranks draw; a hook, before or after a forward."""
        if self._common is not None:
            self._generator.set_state(self._common)
        self._given = self._whole = self._common = None

    @property
    def _generator(self) -> torch.Generator:
        module = self._generators
        return torch.default_generator if module is None else module.default_generators[module.current_device()]


def _whole(given: Tensor, mesh: DeviceMesh) -> DTensor:
    """What every rank has, as a DTensor; gathered, if ranks have parts of it."""
    if isinstance(given, DTensor):
        return given.redistribute(placements=[Replicate()])
    return DTensor.from_local(given, mesh, [Replicate()], run_check=False)


def _style(module: nn.Module, style: str, sequence_parallel: bool) -> ParallelStyle:
    output = Shard(1) if sequence_parallel else Replicate()
    if _is_conv(module) or style not in ("rowwise", "colwise"):
        return _LocalProduct(_STYLES[style], output)
    if style == "colwise":
        return ColwiseParallel()
    return RowwiseParallel(output_layouts=output, use_local_output=not sequence_parallel)


class _LocalProduct(ParallelStyle):
    """Cuts a Linear or Conv1D as ColwiseParallel and RowwiseParallel, which take no Conv1D and know no fused matrices.

    parts: matrices in one, each cut by columns; 0 cuts one by rows. output: how what rows give is placed.
    """

    def __init__(self, parts: int, output: Placement) -> None:
        self.parts, self.output = parts, output

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = self.parts > 0
        for name, parameter in list(module.named_parameters()):
            dim = 0 if name == "bias" else int(_is_conv(module) == columns)
            cut = _StridedShard(dim, split_factor=self.parts) if self.parts > 1 else Shard(dim)
            placements = [cut if columns or name == "weight" else Replicate()]
            part = distribute_tensor(parameter, device_mesh, placements, src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        kind, mixin = type(module), _Columns if columns else _Rows
        module.__class__ = type(f"{mixin.__name__[1:]}{kind.__name__}", (mixin, kind), {"_output": self.output})
        return module


class _Part(nn.Module):
    """Of a matrix, on this rank."""

    weight: DTensor
    bias: DTensor | None
    _output: Placement

    def _product(self, given: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.weight.to_local()
        return nn.functional.linear(given, weight.t() if _is_conv(self) else weight, bias)


class _Columns(_Part):
    """Of a matrix, or of each of those fused in one."""

    @override
    def forward(self, given: DTensor) -> Tensor:
        """Multiply what all ranks have whole; gives this rank's part."""
        bias = None if self.bias is None else self.bias.to_local()
        return self._product(given.to_local(grad_placements=[Partial()]), bias)


class _Rows(_Part):
    """Of a matrix."""

    @override
    def forward(self, given: Tensor) -> Tensor:
        """Multiply this rank's part, and add up over the ranks."""
        part = DTensor.from_local(self._product(given), self.weight.device_mesh, [Partial()], run_check=False)
        total, bias = part.redistribute(placements=[self._output]), self.bias
        if self._output.is_replicate():
            return total.to_local() if bias is None else total.to_local() + bias.to_local()
        return total if bias is None else total + bias


def _cut_sequence(base: nn.Module, plan: _Plan, mesh: DeviceMesh, between: _BetweenMatrices) -> None:
    for path in plan.norms:
        for _, module in _matching(base, path):
            parallelize_module(module, mesh, SequenceParallel())
    for path in plan.dropouts:
        for _, module in _matching(base, path):
            module.register_forward_pre_hook(lambda module, _: between.draw_own() if module.training else None)
            module.register_forward_hook(between.leave)
    first, last = base.get_submodule(plan.first), base.get_submodule(plan.last)
    cut: dict[str, Any] = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
    parallelize_module(first, mesh, PrepareModuleOutput(**cut, use_local_output=False))
    whole: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    parallelize_module(last[-1] if isinstance(last, nn.ModuleList) else last, mesh, PrepareModuleOutput(**whole))
