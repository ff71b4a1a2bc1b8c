"""Stage 3 trains what stage 0 trains, and shares its checkpoints with every stage. FSDP2 needs real processes: as a
program, which takes a folder and names of parts, by default all, this is what every rank runs."""

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.engine.tiny import BF16, Tiny, batch, loss_of, make_engine, make_model, settings, train, train_same_data
from tests.refusing import refused
from thinwire import comm as communication
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine import CallError, Engine, NonFiniteError, optimizers
from thinwire.zero import tensor_on_disk
from thinwire.zero.fsdp import local_run
from thinwire.zero.piece_on_disk import PieceOnDisk

PROGRAM = ("-m", "tests.engine.test_stage3")
UNEVEN = (  # whose shards, or whose division by the number of ranks, 3 ranks try hardest
    "losses_are_those_of_stage_0",
    "layers_are_sharded_apart",
    "how_gradients_are_averaged",
    "state_apart_from_the_shards",
    "codecs",
    "checkpoints",
)
ANY = (
    "without_values",
    "one_model_of_two_engines",
    "sixteen_bits",
    "steps_ahead",
    "what_is_not_finite",
    "evaluation_in_between",
    "own_backwards",
    "evaluation_alone",
    "one_file",
    "user_optimizer_and_recomputed_layers",
    "bad_models",
    "another_rate_on_one_rank",
)


def main(folder: Path, *parts: str) -> None:
    torch.set_num_threads(1)
    comm = communication.init(quiet=True)
    for part in (globals()[name] for name in parts):
        part(comm, folder)
    comm.barrier()
    if comm.rank == 0:
        print(f"all held on {comm.backend} with {comm.size} ranks", flush=True)


def losses_are_those_of_stage_0(comm: Communicator, folder: Path) -> None:
    for steps, accumulation, max_norm in ((6, 1, 0.0), (4, 2, 0.2)):
        changes: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "gradient_clipping": max_norm}
        expected = torch.tensor(train(make_engine(comm, settings(0, **changes)), range(steps)))
        found = torch.tensor(train(make_engine(comm, settings(3, **changes)), range(steps)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        free = make_engine(comm, settings(3, managed_gradient_accumulation=False, **changes))
        for step in range(steps):
            losses = [loss_of(free, comm.rank, step * accumulation + micro) for micro in range(accumulation)]
            for loss in losses:
                free.backward(loss)
            free.step()
            mean = torch.stack(losses).mean().detach().reshape(1)
            comm.all_reduce(mean, op="mean")
            torch.testing.assert_close(mean, expected[step : step + 1], rtol=1e-5, atol=0)


def one_model_of_two_engines(comm: Communicator, folder: Path) -> None:
    """The second goes on from the weights that the first has left, sharded as they are, with state of its own."""
    for precision in ({}, BF16):
        config = settings(3, **precision)
        first, other = make_engine(comm, config), make_engine(comm, config)
        model = first.module
        for engine in (first, other):
            train(engine, range(2))
        with torch.no_grad():
            first(batch(comm.rank, 0)[0])  # which leaves the rest of the model gathered
        second = initialize(model=model, comm=comm, config=config)[0]
        assert second.module is model
        other.optimizer.reset_state()
        assert train(second, range(2, 5)) == train(other, range(2, 5))
        loss = loss_of(second, comm.rank, 5)
        first.backward(loss)
        refused(RuntimeError, "another optimizer of thinwire was built over parameters", first.step)


def without_values(comm: Communicator, folder: Path) -> None:
    """A model on the meta device gets them layer by layer, from files or as its modules begin."""
    path = folder / "begin.safetensors"
    if comm.rank == 0:
        save_model(make_model(), str(path))
    comm.barrier()
    for precision in ({}, BF16):
        expected = make_engine(comm, settings(3, **precision))
        with torch.device("meta"):
            model: nn.Module = Tiny()
        config = settings(3, initial_weights=str(path), **precision)
        found = initialize(model=model, comm=comm, config=config)[0]
        assert train(found, range(3)) == train(expected, range(3))
    with torch.device("meta"):
        bare, model = Tiny(), nn.Bilinear(2, 3, 4)
    told = "'frozen' is on the meta device, and nothing says"
    refused(ValueError, told, initialize, model=bare, comm=comm, config=settings(3))
    engine = initialize(model=model, comm=comm, config=settings(3))[0]
    engine.backward(engine(torch.ones(5, 2), torch.ones(5, 3)).square().mean())
    engine.step()
    whole = [one.full_tensor() for one in model.parameters()]  # type: ignore[operator]
    assert all(one.isfinite().all() and one.std() > 0 for one in whole)


def layers_are_sharded_apart(comm: Communicator, folder: Path) -> None:
    model = make_engine(comm, settings(3)).module
    assert isinstance(model, FSDPModule)
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    assert model.mix.weight is model.unmix.weight
    owned = sum(parameter.to_local().numel() for parameter in model.parameters() if hasattr(parameter, "to_local"))
    assert owned <= math.ceil(sum(parameter.numel() for parameter in model.parameters()) / comm.size) * 1.1

    engine = make_engine(comm, settings(3))
    train(engine, range(1))
    # A gathering for forward and one for backward, but for what is no layer, and the averaging: 3 times the model.
    numel, of_layers = (sum(one.numel() for one in part.parameters()) for part in (model, model.layers))
    least = 4 * (2 * numel + of_layers - 20 * comm.size) * (comm.size - 1) / comm.size
    assert least <= engine.optimizer.bytes_sent <= least * 1.1 + 1000 * comm.size * (comm.size > 1)
    owned = sum(one.numel() for one in model.parameters() if one.requires_grad) / comm.size
    expected_bytes = {"weights": 4 * owned, "master weights": 0, "gradients": 4 * owned, "optimizer state": 8 * owned}
    assert engine.optimizer.model_state_bytes() == pytest.approx(expected_bytes)

    class TiedLayers(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].up.weight = self.layers[0].up.weight

    tied = [initialize(model=seeded(TiedLayers()), comm=comm, config=settings(stage))[0] for stage in (0, 3)]
    assert [isinstance(layer, FSDPModule) for layer in tied[1].module.layers] == [False, True, False]
    expected, found = (torch.tensor(train(engine, range(8))) for engine in tied)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


def sixteen_bits(comm: Communicator, folder: Path) -> None:
    expected = sum(train(make_engine(comm, settings(0)), range(10))[-5:])
    for precision in (BF16, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        engine = make_engine(comm, settings(3, **precision))
        assert abs(sum(train(engine, range(10))[-5:]) / expected - 1) < 0.03
        assert {one.tensor.dtype for one in engine.optimizer.saved_slices() if one.kind == "master"} == {torch.float32}


def how_gradients_are_averaged(comm: Communicator, folder: Path) -> None:
    plain = make_engine(comm, settings(3))
    expected = torch.tensor(train(plain, range(3)))
    divided: list[dict[str, Any]] = [{"prescale_gradients": True}, {"gradient_predivide_factor": 5.0}]
    for changes in (*divided, {"data_types": {"grad_accum_dtype": "fp32"}}):
        found = torch.tensor(train(make_engine(comm, settings(3, **changes)), range(3)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    narrow = make_engine(comm, settings(3, communication_data_type="bf16"))
    torch.testing.assert_close(torch.tensor(train(narrow, range(3))), expected, rtol=0.02, atol=0)
    if comm.size > 1:
        assert 0.7 < narrow.optimizer.bytes_sent / plain.optimizer.bytes_sent < 0.9
    # What fp16 holds does not survive every division. FSDP2 divides by about the root of the number of ranks itself.
    cases: list[tuple[dict[str, Any], bool]] = [({}, True), ({"gradient_predivide_factor": 64.0}, False)]
    for changes, survives in cases:
        engine = make_engine(comm, settings(3, communication_data_type="fp16", **changes))
        engine.backward(engine(batch(comm.rank, 0)[0]).sum() * 0 + 2.0**-22 * engine.module.unmix.bias.sum())
        engine.step()
        assert (engine.get_global_grad_norm() > 0) == (survives or comm.size == 1)
    # A gradient of as many times the mean as there are ranks, with its norm and clipping.
    for max_norm in (0.0, 0.01):
        norms = []
        for operation in ("mean", "sum"):
            engine = make_engine(comm, settings(3, gradient_allreduce_op=operation, gradient_clipping=max_norm))
            train(engine, range(1))
            norms.append(engine.get_global_grad_norm())
        assert norms[1] == pytest.approx(comm.size * norms[0], rel=1e-5)


def state_apart_from_the_shards(comm: Communicator, folder: Path) -> None:
    """As on a GPU with `offload_optimizer` alone; here both lie in the same memory."""
    plain = make_engine(comm, settings(3))
    expected = train(plain, range(6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "_stepped_on", lambda zero, device: torch.device("cpu"))
        engine, other = make_engine(comm, settings(3)), make_engine(comm, settings(3), seed=5)
    assert train(engine, range(3)) == expected[:3]
    engine.save_checkpoint(folder / "apart", tag="apart")
    assert train(engine, range(3, 6)) == expected[3:]
    assert torch.equal(everything(engine), everything(plain))
    other.load_checkpoint(folder / "apart", tag="apart")
    assert train(other, range(3, 6)) == expected[3:]
    # And in files of a disk.
    nvme = {"device": "nvme", "nvme_path": str(folder / "disk")}
    on_disk = make_engine(comm, settings(3, zero_optimization={"stage": 3, "offload_optimizer": nvme}), seed=4)
    on_disk.load_checkpoint(folder / "apart", tag="apart")
    assert on_disk.save_checkpoint(folder / "disk saves", tag="apart")
    other.load_checkpoint(folder / "disk saves", tag="apart")
    assert train(on_disk, range(3, 6)) == expected[3:]
    assert train(other, range(3, 6)) == expected[3:]
    # What somebody writes into the parameters is what goes on from there.
    for one in (engine, plain, on_disk):
        with torch.no_grad():
            for parameter in one.module.parameters():
                parameter.mul_(0.5)
    assert torch.equal(everything(engine), everything(plain))
    assert train(engine, range(6, 8)) == train(plain, range(6, 8)) == train(on_disk, range(6, 8))
    on_disk.optimizer.close()


def parameters_on_a_disk(comm: Communicator, folder: Path) -> None:
    """Bit for bit what training in memory gives, in both precisions, with clipping, accumulation and checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_on_disk, "_FEWEST_NUMEL", 16)
        patch.setattr(tensor_on_disk, "PIECE_NUMEL", 500)
        clipped = {"gradient_clipping": 0.2, "gradient_accumulation_steps": 2}
        for changes in (BF16,) if comm.size == 1 else (clipped, BF16):
            nvme = {"device": "nvme", "nvme_path": str(folder / f"parameters of {len(changes)}")}
            on_disk = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
            plain = make_engine(comm, settings(3, **changes))
            engine = make_engine(comm, settings(3, zero_optimization=on_disk, **changes))
            expected = train(plain, range(4))
            assert train(engine, range(2)) == expected[:2]
            assert engine.save_checkpoint(folder / "from disk", tag="two")
            assert train(engine, range(2, 4)) == expected[2:]
            assert torch.equal(everything(engine), everything(plain))
            for one in (engine, plain):
                one.load_checkpoint(folder / "from disk", tag="two")
                assert train(one, range(2, 4)) == expected[2:]
                with torch.no_grad():  # what is written into parameters, and into views of them
                    for parameter in one.module.parameters():
                        parameter.mul_(0.5)
                        local_run(parameter)[1][1::2].add_(0.25)
            assert torch.equal(everything(engine), everything(plain))
            assert train(engine, range(4, 5)) == train(plain, range(4, 5))
            engine.optimizer.close()


def steps_ahead(comm: Communicator, folder: Path) -> None:
    """Whatever happens between backward and step; files beside become the step where nothing has."""
    kept: list[int] = []
    keep = PieceOnDisk.keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_on_disk, "_FEWEST_NUMEL", 16)
        patch.setattr(tensor_on_disk, "PIECE_NUMEL", 500)
        patch.setattr(PieceOnDisk, "keep", lambda piece: (kept.append(step), keep(piece))[1])
        for parameters_too in (False, True):
            nvme = {"device": "nvme", "nvme_path": str(folder / f"ahead {parameters_too}")}
            zero = {"stage": 3, "offload_optimizer": nvme} | ({"offload_param": nvme} if parameters_too else {})
            changes = {"gradient_clipping": 50.0, **BF16}
            engine = make_engine(comm, settings(3, zero_optimization=zero, **changes))
            plain = make_engine(comm, settings(3, **changes))
            for step in range(10):
                for one in (plain, engine):
                    loss = loss_of(one, comm.rank, step)
                    one.backward(1e4 * loss if step == 6 else loss)
                    weight = one.module.layers[1].up.weight
                    with torch.no_grad():
                        if step == 2:
                            one.optimizer.param_groups[0]["lr"] *= 0.5
                        elif step == 4:
                            local_run(weight.grad)[1].mul_(0.5)
                        elif step == 5:
                            local_run(weight)[1].mul_(0.5)
                    one.step()
                assert engine.get_global_grad_norm() == plain.get_global_grad_norm()
                assert torch.equal(everything(engine), everything(plain))
            assert sorted(set(kept)) == [1, 3, 4, 5, 8, 9]
            assert max(kept.count(4), kept.count(5)) < kept.count(3) == kept.count(1)
            kept.clear()
            engine.optimizer.close()


def parameters_on_a_disk_that_fails(comm: Communicator, folder: Path) -> None:
    """A file of parameters that others have changed ends the forward, one that cannot be written the step; the last
    checkpoint is whole."""

    def begin(path: Path, seed: int) -> Engine:
        nvme = {"device": "nvme", "nvme_path": str(path)}
        zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
        return make_engine(comm, settings(3, zero_optimization=zero), seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_on_disk, "_FEWEST_NUMEL", 16)
        engine = begin(folder / "damaged", 0)
        train(engine, range(2))
        engine.save_checkpoint(folder / "whole", tag="two")
        expected = everything(engine)
        for path in folder.glob("damaged/thinwire-parameters-*/*.weight.state"):  # all, as the first are read by now
            content = bytearray(path.read_bytes())
            content[5] ^= 1
            path.write_bytes(content)
        refused(RuntimeError, r"weight\.state holds other bytes", train, engine, range(2, 3))
        engine.optimizer.close()
        engine = begin(folder / "full", 1)
        engine.load_checkpoint(folder / "whole", tag="two")
        assert torch.equal(everything(engine), expected)

        def fail(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwritev", fail)
        refused(RuntimeError, "cannot be written: No space left on device", train, engine, range(2, 4))
        patch.undo()
        engine.optimizer.close()
        engine = begin(folder / "another", 2)
        engine.load_checkpoint(folder / "whole", tag="two")
        assert torch.equal(everything(engine), expected)
        engine.optimizer.close()


def everything(engine: Engine) -> torch.Tensor:
    return torch.cat([one.values().clone() for one in engine.optimizer.saved_slices() if one.kind == "weight"])


def what_is_not_finite(comm: Communicator, folder: Path) -> None:
    engine = make_engine(comm, settings(3))
    before = everything(engine)
    engine.backward(loss_of(engine, comm.rank, 0) + (math.inf if comm.rank == comm.size - 1 else 0))
    refused(NonFiniteError, f"loss was not finite on rank {comm.size - 1}", engine.step)
    assert torch.equal(everything(engine), before)
    train(engine, range(1, 3))
    assert not torch.equal(everything(engine), before)
    engine = make_engine(comm, settings(3, fp16={"enabled": True, "initial_scale_power": 8}))
    before = everything(engine)
    engine.backward(loss_of(engine, comm.rank, 0) * (1e30 if comm.rank == 0 else 1))
    engine.step()
    assert engine.skipped_steps == 1
    assert torch.equal(everything(engine), before)


def codecs(comm: Communicator, folder: Path) -> None:
    """A step that is skipped, and a checkpoint, leave nothing of the residuals; the mean loss is about that of stage 0,
    from which weights in int8 alone move single steps of so small a model by 3%."""
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    expected = train(make_engine(comm, settings(0)), range(6))
    engine = make_engine(comm, settings(3, zero_optimization=zero))
    losses = train(engine, range(4))
    engine.save_checkpoint(folder / "codecs")
    engine.load_checkpoint(folder / "codecs")
    found = train(engine, range(4, 6))
    assert sum([*losses, *found]) == pytest.approx(sum(expected), rel=0.02)
    again = make_engine(comm, settings(3, zero_optimization=zero), seed=1)
    again.load_checkpoint(folder / "codecs")
    engine.backward(loss_of(engine, comm.rank, 7) + (math.inf if comm.rank == 0 else 0))
    with pytest.raises(NonFiniteError):
        engine.step()
    assert train(again, range(4, 6)) == found
    assert all(one.residual is None for one in engine.optimizer._home.hooks.reduces.values())
    in_one_node = {"stage": 3, "weights_codec": "int4", "gradients_codec": "int4", "node_size": comm.size}
    assert train(make_engine(comm, settings(3, zero_optimization=in_one_node)), range(6)) == pytest.approx(expected)
    with pytest.raises(ValueError, match=f'"zero_optimization.node_size" is 7, and the job has {comm.size} ranks'):
        make_engine(comm, settings(3, zero_optimization={"stage": 3, "node_size": 7}))


def another_rate_on_one_rank(comm: Communicator, folder: Path) -> None:
    if comm.size == 1:
        return
    engine = make_engine(comm, settings(3))
    train(engine, range(2))
    before = everything(engine)
    engine.optimizer.param_groups[0]["lr"] *= 1 + comm.rank
    engine.backward(loss_of(engine, comm.rank, 2))
    refused(ValueError, r"rank 1 and rank 0 differ: parameter groups are", engine.step)
    assert torch.equal(everything(engine), before)


def evaluation_in_between(comm: Communicator, folder: Path) -> None:
    engines = [make_engine(comm, settings(stage)) for stage in (0, 3)]
    for step in range(4):
        losses = []
        for engine in engines:
            loss = loss_of(engine, comm.rank, step)
            engine.backward(loss)
            # Leaves the root's parameters gathered, before they change.
            engine.eval()
            with torch.no_grad():
                engine(batch(comm.rank, 0)[0])
            engine.train()
            engine.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def own_backwards(comm: Communicator, folder: Path) -> None:
    """A loss's own backward, scaled or not, and several before a step."""
    config = settings(3, gradient_accumulation_steps=2, gradient_clipping=0.3)
    expected, plain, scaled = (make_engine(comm, config) for _ in range(3))
    for micro in range(6):
        loss = loss_of(expected, comm.rank, micro)
        expected.backward(loss)
        own = loss_of(plain, comm.rank, micro)
        own.backward()
        plain.empty_partition_cache()
        scaled.scale(loss_of(scaled, comm.rank, micro)).backward()
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=0)
        for engine in (expected, plain, scaled):
            engine.step()
    assert plain.global_steps == 3
    for engine in (plain, scaled):
        torch.testing.assert_close(everything(engine), everything(expected), rtol=1e-4, atol=1e-5)


def evaluation_alone(comm: Communicator, folder: Path) -> None:
    trained = make_engine(comm, settings(3))
    train(trained, range(2))
    trained.save_checkpoint(folder / "to evaluate")
    engine, optimizer, *_ = initialize(model=seeded(Tiny()), comm=comm, config=settings(3, optimizer=None))
    assert optimizer is None
    engine.load_checkpoint(folder / "to evaluate")
    for one in (engine, trained):
        one.eval()
    inputs, _ = batch(comm.rank, 0)
    with torch.no_grad():
        assert torch.equal(engine(inputs), trained(inputs))
    engine.empty_partition_cache()
    whole, expected = engine.whole_state_dict(), trained.whole_state_dict()
    assert all(torch.equal(whole[name], expected[name]) for name in expected if name != "calls")
    refused(CallError, "evaluates only", engine.step)
    refused(AttributeError, "no load_state_dict", getattr, engine, "load_state_dict")


def one_file(comm: Communicator, folder: Path) -> None:
    for stage in (0, 3):
        engine = make_engine(comm, settings(stage, **BF16))
        assert engine.save_16bit_model(folder, f"stage-{stage}.safetensors")
        refused(TypeError, "cannot be copied or pickled", copy.deepcopy, engine.optimizer)
    expected, found = (load_file(folder / f"stage-{stage}.safetensors") for stage in (0, 3))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def user_optimizer_and_recomputed_layers(comm: Communicator, folder: Path) -> None:
    results = []
    for stage in (0, 3):
        model = seeded(Tiny())
        groups = [{"params": list(model.layers.parameters())}, {"params": [model.mix.weight], "lr": 0.002}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        config = settings(stage, optimizer=None, activation_checkpointing={"modules": ["Layer"]})
        engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, comm=comm)
        results.append((torch.tensor(train(engine, range(7))), engine.get_lr()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=0)
    assert results[1][1] == results[0][1] == [0.0025, 0.0005]


def bad_models(comm: Communicator, folder: Path) -> None:
    class Scalar(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.0))

    given: Any = {"comm": comm, "config": settings(3)}
    refused(ValueError, "'factor' has no dimension", initialize, model=Scalar(), **given)
    model = Tiny()
    refused(ValueError, "nothing to optimize", initialize, model=model, model_parameters=[{"params": []}], **given)
    named: Any = dict(model.named_parameters())
    refused(TypeError, "are tensors, or groups", initialize, model=model, model_parameters=named, **given)
    _, optimizer, *_ = initialize(model=model, model_parameters=[*named.values()] * 2, **given)
    assert len(optimizer.param_groups[0]["params"]) == len(named)
    engine = make_engine(comm, settings(3))
    with pytest.raises(ValueError, match="is sharded already, by fully_shard or an earlier"):
        initialize(model=engine.module, comm=comm, config=settings(1))
    with pytest.raises(ValueError, match=r"sharded by an earlier .*, in another precision"):
        initialize(model=engine.module, comm=comm, config=settings(3, **BF16))
    train(engine, range(1))
    engine.module.frozen.requires_grad_(True)
    refused(RuntimeError, "require gradients now but did not", train, engine, range(1))
    mixed = Tiny()
    mixed.layers[1].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"'layers.1.up.weight' is torch.bfloat16"):
        initialize(model=mixed, comm=comm, config=settings(3))
    if comm.size > 1:
        part = comm.split(comm.rank)
        refused(ValueError, "takes all ranks of the job", initialize, model=Tiny(), comm=part, config=settings(3))


def checkpoints(comm: Communicator, folder: Path) -> None:
    expected = {}
    for name, changes in (("fp32", {}), ("bf16", BF16)):
        engine = make_engine(comm, settings(3, **changes))
        train(engine, range(3))
        assert engine.save_checkpoint(folder / name, client_state={"name": name})
        expected[name] = train_same_data(engine, range(3, 6))
        for stage in (1, 3):
            resumed = make_engine(comm, settings(stage, **changes), seed=1)
            assert resumed.load_checkpoint(folder / name)[1] == {"name": name}
            found = train_same_data(resumed, range(3, 6))
            tolerance = 1e-5 if name == "fp32" else 0.02
            assert found == pytest.approx(expected[name], rel=tolerance)
            assert float(resumed.module.calls) == 6
        at_stage_2 = make_engine(comm, settings(2, **changes))
        train(at_stage_2, range(3))
        at_stage_2.save_checkpoint(folder / f"{name} of stage 2")
        resumed = make_engine(comm, settings(3, **changes), seed=1)
        resumed.load_checkpoint(folder / f"{name} of stage 2")
        again, found = (train_same_data(one, range(3, 6)) for one in (at_stage_2, resumed))
        assert found == pytest.approx(again, rel=1e-5 if name == "fp32" else 0.02)
    if comm.rank == 0:
        (folder / "expected.json").write_text(json.dumps(expected))


@pytest.mark.programs
def test_on_gloo(jobs, tmp_path) -> None:
    for size, parts in ((2, ANY), (3, UNEVEN)):
        done = jobs.torchrun(size, *PROGRAM, str(tmp_path), *parts)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"all held on gloo with {size} ranks" in done.stdout
    expected = json.loads((tmp_path / "expected.json").read_text())

    def resume(comm, name, changes):
        engine = make_engine(comm, settings(1, **changes), seed=1)
        assert engine.load_checkpoint(tmp_path / name)[1] == {"name": name}
        return train_same_data(engine, range(3, 6))

    for name, changes, tolerance in (("fp32", {}, 1e-5), ("bf16", BF16, 0.02)):
        for losses in threads.run(lambda comm, one=(name, changes): resume(comm, *one), 4):
            assert losses == pytest.approx(expected[name], rel=tolerance)


@pytest.mark.launch
@pytest.mark.parametrize(("backend", "size"), [("mpi", 2), ("single", 1)])
def test_on_other_backends(jobs, tmp_path, backend, size) -> None:
    parts = (UNEVEN[0], "parameters_on_a_disk", "what_is_not_finite", "checkpoints")
    alone = (
        ("without_values", "layers_are_sharded_apart", "steps_ahead", "parameters_on_a_disk_that_fails")
        if size == 1
        else ()
    )
    arguments = (*PROGRAM, str(tmp_path), *parts, *alone)
    done = jobs.mpirun(size, *arguments) if backend == "mpi" else jobs.alone(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all held on {backend} with {size} ranks" in done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
