"""``python -m tests.compress.fully_sharded_job``: what four launched ranks do with models that FSDP2 shards on plain
torch, by people who call `fully_shard` themselves; their collectives go through codecs."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.refusing import refused
from thinwire.comm import Communicator
from thinwire.compress import FsdpHooks, fsdp_hooks
from thinwire.compress.kernels.reference import decode_blocks, encode_blocks

SHAPES = ((5, 3), (1,), (7,), (130, 17))
"""Of which most ranks have no element, an odd number, or several blocks."""
STEPS = 3


class Sum(nn.Module):
    """Gives the sum of its parameters times what is given, which is their gradient then; keeps what it saw of them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)
        self.seen: list[Tensor] = []

    def forward(self, factors: list[Tensor]) -> Tensor:
        self.seen = [weight.detach().clone() for weight in self.weights]
        return sum((weight * factor).sum() for weight, factor in zip(self.weights, factors, strict=True))


def random(step: int, rank: int) -> list[Tensor]:
    """Alike in size to what others have, so that every block loses something; exact in fp32."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def cut(tensors: list[Tensor], ranks: int) -> Tensor:
    """By rank what it holds of all tensors, [ranks, elements], float64: rows, as many for each, but for padding."""
    parts = []
    for tensor in tensors:
        rows = -(-len(tensor) // ranks) * ranks
        padded = torch.zeros(rows, *tensor.shape[1:], dtype=torch.float64)
        padded[: len(tensor)] = tensor
        parts.append(padded.view(ranks, -1))
    return torch.cat(parts, dim=1)


def through(codec: str, values: Tensor) -> Tensor:
    """What the codec makes of each row, in float64."""
    if codec == "none":
        return values
    block = 64 if codec == "int4" else 2048
    padded = torch.zeros(len(values), -(-values.shape[1] // block) * block, dtype=torch.float64)
    padded[:, : values.shape[1]] = values
    blocks = padded.view(-1, block)
    scales, codes = encode_blocks(codec, blocks, torch.ones_like(blocks, dtype=torch.bool))
    return decode_blocks(codec, scales, codes, torch.float64).view(padded.shape)[:, : values.shape[1]]


def expected(ranks: int, node_size: int, weights: str, gradients: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Step by step what every rank computes with, and the gradients' mean: float64 [ranks, elements]."""
    nodes = ranks // node_size
    if nodes == 1:  # nothing leaves it
        weights = gradients = "none"
    held = cut(list(Sum().weights), ranks)
    seen = held if node_size > 1 else through(weights, held)
    lost = [torch.zeros(nodes, held.shape[1]) for _ in range(ranks)]
    for step in range(STEPS):
        sums = torch.stack([cut(random(step, rank), ranks) for rank in range(ranks)])
        # By node, and by rank of it: what it sums up for the ranks of its number in every node.
        sums = sums.view(nodes, node_size, nodes, node_size, -1).sum(1).transpose(1, 2).flatten(0, 1)
        sent = torch.empty_like(sums)
        for rank in range(ranks):
            sent[rank] = through(gradients, sums[rank] + lost[rank])
            lost[rank] = sums[rank] + lost[rank] - sent[rank]
        mean = sent.view(nodes, node_size, nodes, -1).sum(0).transpose(0, 1).flatten(0, 1) / ranks
        yield seen, mean
        held = held - cut(random(step, -1), ranks)
        seen = seen + through(weights, held - seen) if node_size > 1 else through(weights, held)


def check_against_float64(ranks: int, node_size: int, weights: Any, gradients: Any) -> None:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    if mesh.get_coordinate() is None:
        return
    rank = dist.get_rank()
    model = nn.Sequential(Sum())
    fully_shard(model, mesh=mesh)
    hooks = fsdp_hooks(model, weights=weights, gradients=gradients, node_size=node_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, (seen, mean) in enumerate(expected(ranks, node_size, weights, gradients)):
        model(random(step, rank)).backward()
        torch.testing.assert_close(cut(model[0].seen, ranks), seen, rtol=1e-6, atol=1e-6)
        own = torch.cat([_local(one.grad, ranks) for one in model.parameters()]).double()
        torch.testing.assert_close(own, mean[rank], rtol=1e-6, atol=1e-6)
        if gradients == "none" and ranks == 2:  # whose sum has one order
            exact = copy_in_torch(mesh, step, rank)
            assert [one.tolist() for one in exact] == [_local(one.grad, ranks).tolist() for one in model.parameters()]
        everyone = Communicator.of(mesh).all_gather_bytes(str([one.tolist() for one in model[0].seen]).encode())
        assert len(set(everyone)) == 1, "ranks compute with different weights"
        for parameter, change in zip(model.parameters(), random(step, -1), strict=True):
            local = cut([change], ranks)[rank].float()[: parameter.to_local().numel()]
            parameter.grad.to_local().copy_(local.view(parameter.to_local().shape))
        optimizer.step()
        optimizer.zero_grad()
    assert (hooks.bytes_sent > 0) == (ranks > 1)


def copy_in_torch(mesh: DeviceMesh, step: int, rank: int) -> list[Tensor]:
    """The gradients that FSDP2 alone gives, as they lie on this rank."""
    model = nn.Sequential(Sum())
    fully_shard(model, mesh=mesh)
    model(random(step, rank)).backward()
    return [_local(one.grad, mesh.size()) for one in model.parameters()]


def _local(tensor: Any, ranks: int) -> Tensor:
    """A rank's rows, flat, with padding."""
    local, rows = tensor.to_local().reshape(-1), -(-tensor.shape[0] // ranks)
    padded = torch.zeros(rows * math.prod(tensor.shape[1:]))
    padded[: local.numel()] = local
    return padded


class Stack(nn.Sequential):
    """Layers of several blocks a rank, in which what is counted has no padding to speak of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh()) for _ in range(3)))

    def shard(self, **options: Any) -> FsdpHooks:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for layer in self:
            fully_shard(layer, mp_policy=policy)
        return fsdp_hooks(fully_shard(self, mp_policy=policy), **options)

    def run(self, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = torch.randn(8, 256, generator=generator)
        loss = factor * (self(data).float() - data.tanh()).square().mean()
        loss.backward()
        return loss.detach()


def count() -> None:
    """Bytes between nodes in a step, beside the least that exact stage 3 sends in bf16: 2 to every other node, three
    times, for each element that a rank owns."""
    elements = 3 * 256 * 256 // 4
    for options, most in (
        ({"weights": "int8", "gradients": "int8"}, 0.502 * 3),
        ({"weights": "int8", "gradients": "int4", "node_size": 2}, 0.27),
        ({"weights": "int4", "gradients": "int4", "node_size": 2}, 0.2),
    ):
        model = Stack()
        hooks = model.shard(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):  # a gather of the whole comes first
            before = hooks.between_nodes.copy()
            model.run()
            optimizer.step()
            optimizer.zero_grad()
        sent = hooks.between_nodes.since(before).bytes_by_collective
        nodes = 2 if "node_size" in options else 4
        share = sent.total() / (6 * elements * (nodes - 1))
        assert share <= most, f"{options}: {share:.4f} of what exact stage 3 sends between nodes, at most {most}"


def skip() -> None:
    """What is not finite reaches every rank, as in torch, and leaves residuals that the next step can use."""
    model = Stack()
    hooks = model.shard(weights="int4", gradients="int4", node_size=2)
    model.run()
    before = copy.deepcopy({name: one.residual for name, one in hooks.reduces.items()})
    model.zero_grad()
    model.run(math.nan if dist.get_rank() == 1 else 1.0)
    for parameter in model.parameters():
        assert not parameter.grad.to_local().isfinite().any()
    assert all(one.residual is None or one.residual.isfinite().all() for one in hooks.reduces.values())
    hooks.drop_residuals()
    model.zero_grad()
    model.run()
    again = {name: one.residual for name, one in hooks.reduces.items()}
    for name, residual in before.items():
        assert residual is None or torch.equal(again[name], residual)


def refuse() -> None:
    whole = nn.Linear(4, 4)
    refused(ValueError, "apply torch's fully_shard to all of it first", lambda: fsdp_hooks(whole, weights="int8"))
    model: Any = fully_shard(nn.Linear(4, 4))
    for wrong, says in (
        ({"weights": "sign1"}, "weights must be one of none, int8, int4"),
        ({"gradients": 4}, "gradients must be one of"),
        ({"node_size": 3}, "divides the mesh's 4, got 3"),
        ({"weights": "int8" if dist.get_rank() else "int4"}, "weights"),
    ):
        refused(ValueError, says, lambda wrong=wrong: fsdp_hooks(model, **wrong))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False))
    fully_shard(mixed)
    fsdp_hooks(mixed, weights="int8")
    refused(ValueError, "called on this model before", lambda: fsdp_hooks(mixed))
    refused(TypeError, "torch.uint8, which holds several dtypes", lambda: mixed(torch.zeros(1, 4)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in (
        (1, 1, "int8", "int8"),
        (2, 1, "none", "none"),
        (3, 1, "int8", "int4"),
        (4, 1, "int4", "int8"),
        (4, 2, "int4", "int4"),
        (4, 2, "int8", "none"),
        (4, 4, "int4", "int4"),
    ):
        check_against_float64(*case)
    count()
    skip()
    refuse()
    dist.destroy_process_group()
