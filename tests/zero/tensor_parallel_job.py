"""What launched ranks do with a model that torch's tensor parallelism cuts: ``tensor_parallel_job DP TP TASK...``."""

import copy
import math
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import thinwire
from tests.launching import same_on_all_ranks
from tests.optim.training import through_a_file
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.parallel import parallelize
from thinwire.zero import ShardedOptimizer

WORDS, WIDTH, LENGTH = 40, 16, 8
FREEZE = 6


class Model(nn.Module):
    """Transformers' BERT or GPT-2 in small, its head tied to its embedding; gives the loss of words."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": WORDS}
        sizes |= {"hidden_size": WIDTH, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": LENGTH}
        if kind == "bert":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model: nn.Module = BertForMaskedLM(BertConfig(**sizes, **off, intermediate_size=4 * WIDTH))
        else:
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        self.masks = kind == "bert"

    def forward(self, words: Tensor) -> Tensor:
        given = words.clone()
        if self.masks:
            given[:, ::3] = 0
        return self.model(input_ids=given, labels=words).loss

    def cut(self, mesh: DeviceMesh, sequence: bool = False) -> "Model":
        parallelize(self.model, mesh, sequence_parallel=sequence)
        return self


def make(kind: str) -> Model:
    torch.manual_seed(1)
    return Model(kind)


def words(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    start = torch.randint(1, WORDS, (8, 1), generator=generator)
    return (start + torch.arange(LENGTH) * torch.randint(1, 3, (8, 1), generator=generator)) % (WORDS - 1) + 1


Run = list[tuple[float, float]]
"""Losses and norms by step."""


def alone(kind: str, ranks: int, steps: int) -> Run:
    """One process that sees all ranks' data: losses and norms before clipping to 1."""
    model, found = make(kind), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [model(words(rank, step)) / ranks for rank in range(ranks)]
        torch.stack(losses).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((float(sum(losses)), float(norm)))
    return found


def train(model: nn.Module, optimizer: Any, steps: range, pieces: int = 1) -> Run:
    found = Run()
    for step in steps:
        optimizer.zero_grad()
        mean, given = torch.zeros(()), words(optimizer.comm.rank, step).chunk(pieces)
        for number, piece in enumerate(given):
            loss = model(piece) / pieces
            if number < pieces - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
            mean += loss.detach()
        optimizer.step()
        optimizer.comm.all_reduce(mean, "mean")
        found.append((float(mean), optimizer.last_step.grad_norm))
    return found


def at_first(found: Run) -> list[Run]:
    """What every rank has found, on rank 0; nothing elsewhere."""
    everyones: list[Run] = [found] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return everyones if dist.get_rank() == 0 else []


def close(found: Run, expected: Run, tolerance: float) -> None:
    for one in at_first(found):
        assert len(one) == len(expected)
        for step, (mine, other) in enumerate(zip(one, expected, strict=True)):
            assert mine == pytest.approx(other, rel=tolerance), (step, mine, other)


def exact(mesh: DeviceMesh) -> None:
    """ShardedOptimizer with clipping against torch's AdamW in one process."""
    for kind in ("bert", "gpt"):
        expected = alone(kind, mesh["dp"].size(), 5) if dist.get_rank() == 0 else []
        assert dist.get_rank() or any(norm > 1 for _, norm in expected)
        for stage, sequence, pieces in ((0, False, 1),) if kind == "bert" else ((1, True, 2), (2, False, 1)):
            model = make(kind).cut(mesh["tp"], sequence)
            options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "bucket_bytes": 4000, "block_size": 64}
            params = model.named_parameters() if stage else [one for _, one in model.named_parameters()]
            optimizer = ShardedOptimizer(
                params, torch.optim.AdamW, stage=stage, mesh=mesh["dp"], max_norm=1.0, **options
            )
            close(train(model, optimizer, range(5), pieces), expected, 1e-5)
            same_replicas(mesh, model)
            optimizer.close()


def part(parameter: Tensor) -> Tensor:
    """What is here of it."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def same_replicas(mesh: DeviceMesh, model: nn.Module) -> None:
    """All replicas of a part hold the same bits, and what is not cut is the same everywhere."""
    parts, whole = [], []
    for one in model.parameters():
        is_cut = isinstance(one, DTensor) and not one.placements[0].is_replicate()
        (parts if is_cut else whole).append(part(one).reshape(-1))
    for comm, tensors in ((mesh["dp"], parts), (mesh["dp"], whole), (mesh["tp"], whole)):
        of_rank = Communicator.of(comm).all_gather_bytes(torch.cat(tensors).numpy().tobytes())
        assert len(set(of_rank)) == 1


BUILDS = {
    "adam": lambda model, **ranks: thinwire.OneBitAdam(
        model.named_parameters(), 3e-3, FREEZE, max_norm=1.0, block_size=64, bucket_bytes=4000, **ranks
    ),
    "lamb": lambda model, **ranks: thinwire.OneBitLamb(
        model.named_parameters(), 1e-2, FREEZE, max_norm=1.0, block_size=64, bucket_bytes=4000, **ranks
    ),
    "zero_one": lambda model, **ranks: thinwire.ZeroOneAdam(
        model.named_parameters(), 3e-3, FREEZE, 4, 3, 4, max_norm=1.0, block_size=64, bucket_bytes=4000, **ranks
    ),
}


def compressed(mesh: DeviceMesh) -> None:
    """1-bit optimizers against the same on whole models: as exact in the warmup, and near once frozen. 1-bit Adam at
    stage 0: `cube` of tests/parallel."""
    for name, stage in (("adam", 2), ("lamb", 1), ("zero_one", 0), ("zero_one", 1)):
        build = BUILDS[name]

        made = make("gpt")

        def unsplit(comm: Communicator, build: Any = build, stage: int = stage, made: nn.Module = made) -> Any:
            model = copy.deepcopy(made)
            return train(model, build(model, comm=comm, stage=stage), range(2 * FREEZE))

        expected = threads.run(unsplit, mesh["dp"].size())[0] if dist.get_rank() == 0 else []
        model = make("gpt").cut(mesh["tp"])
        optimizer = build(model, mesh=mesh["dp"], stage=stage)
        found = train(model, optimizer, range(2 * FREEZE))
        warm = FREEZE if name in ("adam", "lamb") else 1
        close(found[:warm], expected[:warm], 1e-4)
        for one in at_first(found):
            last, wanted = (sum(loss for loss, _ in run[-6:]) for run in (one, expected))
            assert abs(last / wanted - 1) < 0.01, (name, stage, last, wanted)
        optimizer.synchronize_weights()
        same_replicas(mesh, model)
        if name != "zero_one":  # whose local steps take what is not finite for zero
            _skip_together(mesh, model, optimizer)
        optimizer.close()


def _skip_together(mesh: DeviceMesh, model: nn.Module, optimizer: Any) -> None:
    """What is not finite in one rank's part stops the step on all ranks that hold parts."""
    before, skipped = optimizer.steps, optimizer.skipped_steps
    optimizer.zero_grad()
    weight = model.model.transformer.h[0].attn.c_attn.weight  # type: ignore[union-attr, index]

    def spoil(gradient: Tensor) -> Tensor:
        local = gradient.to_local() * (math.inf if mesh.get_local_rank("tp") == 1 else 1.0)
        return DTensor.from_local(local, mesh["tp"], gradient.placements)  # type: ignore[attr-defined]

    hook = weight.register_hook(spoil)
    model(words(optimizer.comm.rank, 99)).backward()
    hook.remove()
    optimizer.step()
    assert (optimizer.steps, optimizer.skipped_steps) == (before, skipped + 1)
    assert optimizer.overflow


def resume(mesh: DeviceMesh) -> None:
    """A state_dict goes on to the bit on its own rank's part, and on no other."""
    for name, stage in (("adam", 1), ("lamb", 0)):
        model = make("gpt").cut(mesh["tp"])
        optimizer = BUILDS[name](model, mesh=mesh["dp"], stage=stage)
        train(model, optimizer, range(FREEZE + 3))
        saved = through_a_file(optimizer.state_dict())
        weights = [part(one).clone() for one in model.parameters()]
        train(model, optimizer, range(FREEZE + 3, FREEZE + 6))
        again = make("gpt").cut(mesh["tp"])
        with torch.no_grad():
            for one, value in zip(again.parameters(), weights, strict=True):
                part(one).copy_(value)
        other = BUILDS[name](again, mesh=mesh["dp"], stage=stage)
        other.load_state_dict(saved)
        train(again, other, range(FREEZE + 3, FREEZE + 6))
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(part(one), part(two))
        everyone: list[Any] = [None] * mesh["tp"].size()
        dist.all_gather_object(everyone, saved, group=mesh["tp"].get_group())
        neighbour = everyone[1 - mesh.get_local_rank("tp")]
        refused(ValueError, "part . of 2 of it, and this rank has part", other.load_state_dict, neighbour)


def sharded(mesh: DeviceMesh) -> None:
    """FSDP2 inside nodes, "tp", whose ranks have data of their own, and ShardedOptimizer between them, "dp"."""

    def cut(kind: str) -> nn.Module:
        model = make(kind)
        for layer in model.model.transformer.h if kind == "gpt" else model.model.bert.encoder.layer:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["tp"])
        return fully_shard(model, mesh=mesh["tp"])

    rank, sent = dist.get_rank(), {}
    for kind in ("bert", "gpt"):
        expected = alone(kind, dist.get_world_size(), 6) if dist.get_rank() == 0 else []
        for codec, tolerance in ((None, 1e-5), (("int4", "int4"), 1e-2)):
            model, options = cut(kind), {"mesh": mesh["dp"], "max_norm": 1.0, "lr": 3e-3, "weight_decay": 0.1}
            if codec is None:
                with torch.no_grad():
                    model(words(rank, 0))
                refused(
                    ValueError, "call model.reshard", ShardedOptimizer, model.parameters(), torch.optim.AdamW, **options
                )
                model.reshard()  # type: ignore[operator]  # FSDP2 may be set up before or after the optimizer
            optimizer, found = ShardedOptimizer(model.parameters(), torch.optim.AdamW, codec=codec, **options), []
            for step in range(6):
                optimizer.zero_grad()
                loss = model(words(rank, step))
                loss.backward()
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                found.append((float(mean) / dist.get_world_size(), optimizer.last_step.grad_norm))
            of_both = [
                [one[: 1 if codec else 2] for one in run] for run in (found, expected)
            ]  # 4 bits have other norms
            close(*of_both, tolerance)
            sent[codec] = optimizer.bytes_sent
            for one in model.parameters():
                assert same_on_all_ranks(optimizer.comm, one.to_local().detach())  # type: ignore[attr-defined]
        assert sent["int4", "int4"] < 0.2 * sent[None]
    uneven = fully_shard(nn.Linear(4, 3), mesh=mesh["tp"])
    refused(ValueError, "goes on from a padded copy", ShardedOptimizer, uneven.parameters(), torch.optim.SGD, **options)


def refusals(mesh: DeviceMesh) -> None:
    """On every rank, by name, before anything has changed."""
    make_cut, given = lambda: make("gpt").cut(mesh["tp"]), {"mesh": mesh["dp"]}
    adam, named = thinwire.OneBitAdam, lambda: make_cut().named_parameters()
    refused(ValueError, "hold other elements than this one", adam, named())
    refused(TypeError, "steps whole matrices", thinwire.OneBitMuon, named(), **given)
    refused(TypeError, "DTensor: DiLoCo takes", thinwire.DiLoCo, named(), torch.optim.AdamW, **given)
    refused(ValueError, r"model.to\(torch.bfloat16\)", adam, named(), param_dtype=torch.bfloat16, **given)
    refused(ValueError, "model.to", ShardedOptimizer, named(), torch.optim.AdamW, param_dtype=torch.bfloat16, **given)
    apart = make_cut()
    apart.model.transformer.ln_f.weight.data.add_(dist.get_rank())  # type: ignore[operator, union-attr]
    refused(ValueError, "make the model from one seed", adam, apart.named_parameters(), **given)
    both = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    refused(ValueError, "mesh of 2 dimensions", adam, [both], **given)
    model = make_cut()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **given)
    loss = model(words(0, 0))
    loss.backward()
    model.model.transformer.h[0].attn.c_attn.weight.grad.mul_(2)  # type: ignore[union-attr, index]
    refused(RuntimeError, "was changed or dropped", optimizer.step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    grid = init_device_mesh("cpu", (int(sys.argv[1]), int(sys.argv[2])), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in sys.argv[3:]:
            globals()[task](grid)
    dist.barrier()
    dist.destroy_process_group()
