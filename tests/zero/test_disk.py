"""Optimizer state on a disk: the bits of state in memory; whatever a file, a disk or another job does is an error that
names it, and no weights are stepped with anything else."""

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.training import loss_of, make_model, weights
from tests.refusing import refused
from tests.zero.saved import join, save
from tests.zero.training import ADAMW, MOMENTUM, SGD, build, train
from thinwire.comm import Communicator, threads
from thinwire.deepspeed import utils
from thinwire.optim import Muon
from thinwire.zero import ShardedOptimizer, gradients, tensor_on_disk
from thinwire.zero.piece_on_disk import PieceOnDisk

BF16 = torch.bfloat16
MUON = {"optimizer_class": Muon, "lr": 0.02}
ADAGRAD = {"optimizer_class": torch.optim.Adagrad, "lr": 0.02}  # whose state is there before the first step


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a bucket, and parameters in several."""
    monkeypatch.setattr(tensor_on_disk, "PIECE_NUMEL", 100)
    monkeypatch.setattr(gradients, "_PIECE_BYTES", 300)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("thinwire-optimizer-rank-*/*.state"))


def on_ranks(ranks: int, body: Callable[[Communicator], object]) -> list[str]:
    """What `body` raises on each rank."""

    def told(comm: Communicator) -> str:
        try:
            body(comm)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return threads.run(told, ranks)


@pytest.mark.filterwarnings("ignore:step 4 was skipped")
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "options"),
    [
        (0, 2, BF16, ADAMW),
        (1, 1, BF16, ADAMW),
        (1, 2, None, ADAMW),
        (1, 3, torch.float16, SGD),
        (2, 2, BF16, MOMENTUM),
        (2, 3, None, SGD | {"momentum": 0.0}),
        (2, 1, None, ADAGRAD),
        (1, 2, BF16, MUON),
    ],
)
def test_the_bits_are_those_of_state_in_memory(tmp_path: Path, stage: int, ranks: int, dtype, options: dict) -> None:
    def body(comm: Communicator, offload: bool | Path) -> tuple:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=dtype, max_norm=0.05, offload=offload, **options)
        train(optimizer, model, range(3))
        skipped = weights(model)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 3) * (float("nan") if comm.rank == 0 else 1.0)).backward()
        optimizer.step()
        assert torch.equal(weights(model), skipped)
        assert optimizer.last_step.overflow
        train(optimizer, model, range(4, 8), accumulation=2)
        with torch.no_grad():
            model[0].weight.mul_(0.5)  # which master weights follow
        train(optimizer, model, range(8, 10))
        comm.barrier()
        names = [path.name for path in files_in(tmp_path)]
        assert not names or any("-0.weight.state" in name for name in names)
        return weights(model), optimizer.last_step.grad_norm, save(comm, optimizer), optimizer.close()

    memory = threads.run(lambda comm: body(comm, False), ranks)
    disk = threads.run(lambda comm: body(comm, tmp_path), ranks)
    assert all(torch.equal(mine[0], other[0]) and mine[1] == other[1] for mine, other in zip(memory, disk, strict=True))
    kept, read = (join([one[2] for one in of_rank]) for of_rank in (memory, disk))
    assert kept.kinds() == read.kinds()
    for kind in kept.kinds():
        for name in kept.names(kind):
            numel = 1 if kind.startswith("scalar.") else dict(make_model().named_parameters())[name].numel()
            assert torch.equal(kept.read(kind, name, 0, numel), read.read(kind, name, 0, numel))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:step .* was skipped")
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "options"),
    [(1, 1, BF16, ADAMW), (2, 2, BF16, ADAMW), (2, 3, None, ADAMW), (1, 2, None, SGD), (1, 2, BF16, MOMENTUM)],
)
def test_steps_ahead_are_the_step_or_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, ranks: int, dtype, options: dict
) -> None:
    """Whatever happens between backward and step; `kept` is which steps were made of files beside."""
    kept: list[int] = []
    keep, now = PieceOnDisk.keep, [0]
    monkeypatch.setattr(PieceOnDisk, "keep", lambda piece: (kept.append(now[0]), keep(piece))[1])

    def backward(model: torch.nn.Module, rank: int, factor: float = 1.0, first: int = 0) -> None:
        (factor * loss_of(model[first:], rank, now[0]) if not first else model[4].weight.sum() * 0.01).backward()

    def body(comm: Communicator, offload: bool | Path) -> list:
        model, found = make_model(), []
        optimizer = build(comm, model, stage, param_dtype=dtype, max_norm=100.0, offload=offload, **options)

        def happen(step: int) -> None:
            if step == 2:
                optimizer.param_groups[0]["lr"] *= 0.5
            elif step == 7:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            elif step == 9:
                utils.safe_set_full_grad(model[2].weight, 0.1 * utils.safe_get_full_grad(model[2].weight))
            elif step == 10:
                optimizer.zero_grad()
                backward(model, comm.rank)
            elif step in (15, 17):
                found.append(utils.safe_get_full_fp32_param(model[2].weight))
            elif step in (12, 13) and stage == 2:
                backward(model, comm.rank)

        for step in range(19):
            comm.barrier()
            now[0] = step
            optimizer.zero_grad()
            backward(model, comm.rank, {4: float("nan"), 16: 1e4}.get(step, 1.0), first=4 * (step == 14))
            happen(step)
            optimizer.step()
            found += [weights(model), torch.tensor(optimizer.last_step.grad_norm)]
        optimizer.close()
        return found

    memory = threads.run(lambda comm: body(comm, False), ranks)
    torch.testing.assert_close(
        threads.run(lambda comm: body(comm, tmp_path), ranks), memory, rtol=0, atol=0, equal_nan=True
    )
    every, some = {1, 3, 6, 8, 10, 11, 13, 18} | ({12} if stage == 1 else set()), {2, 7, 9}
    counts = [kept.count(step) for step in range(19)]
    if options is MOMENTUM:  # a class of the user's, of which nothing is known
        assert not any(counts)
        return
    assert {step for step, count in enumerate(counts) if count} == every | some
    assert {step for step, count in enumerate(counts) if count == max(counts)} == every


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_backward_holds_few_buckets_of_gradients(tmp_path: Path, on_disk: bool) -> None:
    """Memory goes from one bucket to the next, and not to each its own."""

    def body(comm: Communicator) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(40, 40, bias=False) for _ in range(30)])
        optimizer = build(comm, model, 2, bucket_bytes=6400, offload=tmp_path if on_disk else False, **ADAMW)
        model(torch.ones(1, 40)).sum().backward()
        kept = {one.data_ptr(): one.nbytes for bucket in optimizer._home.gradients for one in bucket._spare}
        assert len(optimizer._home.gradients) == 30
        assert 0 < sum(kept.values()) <= 5 * 6400

    threads.run(body, 2)


@pytest.mark.parametrize(("saves_on_disk", "stage", "dtype"), [(True, 1, BF16), (False, 2, BF16), (True, 2, None)])
def test_what_one_saves_the_other_takes_up(tmp_path: Path, saves_on_disk: bool, stage: int, dtype) -> None:
    def first_half(comm: Communicator, offload: bool | Path) -> tuple:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=dtype, offload=offload, **ADAMW)
        train(optimizer, model, range(4))
        saved = save(comm, optimizer)
        again = make_model(seed=9)
        other = build(comm, again, stage, param_dtype=dtype, offload=tmp_path / "other", **ADAMW)
        train(other, again, range(2))
        other.load_state_dict(optimizer.state_dict())
        train(optimizer, model, range(4, 7))
        train(other, again, range(4, 7))
        assert torch.equal(weights(model), weights(again))
        optimizer.reset_state()
        other.reset_state()
        train(optimizer, model, range(7, 9))
        train(other, again, range(7, 9))
        assert torch.equal(weights(model), weights(again))
        optimizer.close()
        other.close()
        return saved

    saved = join(threads.run(lambda comm: first_half(comm, saves_on_disk and tmp_path), 2))

    def go_on(comm: Communicator, offload: bool | Path) -> Tensor:
        model = make_model(seed=5)
        optimizer = build(comm, model, 3 - stage, param_dtype=dtype, offload=offload, **(ADAMW | {"bucket_bytes": 300}))
        optimizer.load(saved)
        train(optimizer, model, range(4, 8))
        optimizer.load_weights(saved)
        train(optimizer, model, range(8, 10))
        optimizer.close()
        return weights(model)

    results = [threads.run(lambda comm, one=offload: go_on(comm, one), 3) for offload in (False, tmp_path)]
    assert all(torch.equal(one, results[0][0]) for of_rank in results for one in of_rank)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("change", [damage, lambda path: os.truncate(path, 4), Path.unlink])
def test_a_file_that_others_change_is_an_error_that_names_it_on_every_rank(tmp_path: Path, change) -> None:
    before: dict[int, Tensor] = {}

    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=BF16, offload=tmp_path, **ADAMW)
        train(optimizer, model, range(2))
        if comm.rank == 1:
            for path in files_in(tmp_path):
                if path.parent.name.endswith("1"):
                    change(path)
        comm.barrier()
        try:
            train(optimizer, model, range(2, 3))
        finally:
            refused(RuntimeError, "load a checkpoint", optimizer.step)
            optimizer.close()

    zero, one = on_ranks(2, body)
    assert one.startswith(f"SwapFileError: {tmp_path}/thinwire-optimizer-rank-00001/000")
    assert zero.startswith("ValueError: rank 1 could not keep optimizer state on its disk: SwapFileError: ")
    assert ".state" in zero
    del before


def test_a_damaged_file_is_not_saved(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build(threads.single(10.0), model, 1, param_dtype=BF16, offload=tmp_path, **ADAMW)
    train(optimizer, model, range(2))
    for path in files_in(tmp_path):
        damage(path)
    refused(RuntimeError, r"00000.*\.state holds other bytes", optimizer.state_dict)
    optimizer.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fails_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 2, param_dtype=BF16, offload=tmp_path, **ADAMW)
        train(optimizer, model, range(2))
        comm.barrier()
        monkeypatch.setattr(os, "pwritev", full)
        comm.barrier()
        try:
            train(optimizer, model, range(2, 3))
        finally:
            optimizer.close()

    for told in on_ranks(ranks, body):
        assert told.startswith("SwapFileError: ")
        assert "cannot be written: No space left on device. " in told
    assert not files_in(tmp_path)


def test_one_folder_has_one_owner(tmp_path: Path) -> None:
    stale = tmp_path / "thinwire-optimizer-rank-00000" / "000007-old.state"
    stale.parent.mkdir()
    stale.write_bytes(b"of a job that was killed")
    other = stale.with_name("notes.txt")
    other.touch()
    comm = threads.single(10.0)
    first = build(comm, make_model(), 1, **ADAMW, offload=tmp_path)
    assert not stale.exists()
    told = f"{stale.parent} holds the optimizer state of another job or optimizer, of process {os.getpid()} "
    refused(ValueError, told, build, comm, make_model(), 1, **ADAMW, offload=tmp_path)
    first.close()
    assert [*stale.parent.iterdir()] == [other]  # which is not ours
    build(comm, make_model(), 1, **ADAMW, offload=str(tmp_path)).close()


def test_what_is_no_folder_with_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    comm = threads.single(10.0)
    refused(
        ValueError,
        "Not a directory. offload= must be",
        build,
        comm,
        make_model(),
        1,
        **ADAMW,
        offload=tmp_path / "file",
    )
    refused(
        ValueError, "does not go with codec=", build, comm, make_model(), 1, **ADAMW, codec="int4", offload=tmp_path
    )
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(30_000))

    def body(comm: Communicator) -> None:
        build(comm, make_model(), 1, **ADAMW, offload=tmp_path)

    for told in on_ranks(2, body):
        assert "bytes of the disk of" in told
        assert "and 30,000 are free: make room" in told
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    monkeypatch.undo()
    model = make_model()  # nothing of what was refused is left
    optimizer = build(comm, model, 1, offload=tmp_path, **SGD)
    train(optimizer, model, range(2))
    optimizer.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_memory_is_no_disk() -> None:
    folder = Path("/dev/shm") / f"thinwire-test-{os.getpid()}"
    with pytest.warns(RuntimeWarning, match="is tmpfs: memory, not a disk"):
        optimizer = build(threads.single(10.0), make_model(), 1, **ADAMW, offload=folder)
    optimizer.close()
    folder.rmdir()


def test_values_by_parameter_are_read_from_the_files_and_weights_set_in_them(tmp_path: Path) -> None:
    def body(comm: Communicator, offload: bool | Path) -> list[Tensor]:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=BF16, offload=offload, **ADAMW)
        train(optimizer, model, range(2))
        weight = model[2].weight
        utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight) + 1e-3)
        train(optimizer, model, range(2, 4))
        read = [utils.safe_get_full_fp32_param(weight), utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")]
        if offload:
            setting = weight, torch.zeros_like(weight), "exp_avg"
            refused(RuntimeError, "exp_avg cannot be set", utils.safe_set_full_optimizer_state, *setting)
        assert isinstance(optimizer, ShardedOptimizer)
        optimizer.close()
        return read

    memory = threads.run(lambda comm: body(comm, False), 2)
    disk = threads.run(lambda comm: body(comm, tmp_path), 2)
    assert all(
        torch.equal(*pair) for mine, other in zip(memory, disk, strict=True) for pair in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("written", [False, True])
def test_at_stage_2_gradients_wait_in_files_too(tmp_path: Path, written: bool) -> None:
    def body(comm: Communicator, offload: bool | Path) -> list:
        model = make_model()
        optimizer = build(comm, model, 2, param_dtype=BF16, offload=offload, max_norm=0.05, **ADAMW)
        assert isinstance(optimizer, ShardedOptimizer)
        norms, read = [], []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            if written:
                gradient = utils.safe_get_full_grad(model[2].weight)
                read.append(gradient)
                utils.safe_set_full_grad(model[2].weight, 3 * gradient)
            else:
                held = [one._shard is not None for one in optimizer._home.gradients]
                assert not any(held) if offload else all(held)
            optimizer.step()
            norms.append(optimizer.last_step.grad_norm)
        if offload:
            assert optimizer.model_state_bytes()["gradients"] == 0.0
        comm.barrier()
        optimizer.close()
        return [norms, *read, weights(model)]

    memory = threads.run(lambda comm: body(comm, False), 2)
    disk = threads.run(lambda comm: body(comm, tmp_path), 2)
    for mine, other in zip(memory, disk, strict=True):
        assert mine[0] == other[0]
        assert all(torch.equal(*pair) for pair in zip(mine[1:], other[1:], strict=True))


def test_a_gradient_that_others_change_ends_the_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build(threads.single(10.0), model, 2, param_dtype=BF16, offload=tmp_path, **ADAMW)
    loss_of(model, 0, 0).backward()
    first = next(one for one in files_in(tmp_path) if "-gradient" in one.name)
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer._home.disk.ring.finish()
    damage(first)
    refused(RuntimeError, rf"{first.name} holds other bytes", optimizer.step)
    optimizer.close()


@pytest.mark.parametrize("offload", ["", 3, b"folder", []], ids=repr)
def test_what_is_no_folder_is_refused(offload: Any) -> None:
    message = "offload must be true or false, or for ShardedOptimizer a folder's name, got"
    refused(TypeError, message, build, threads.single(10.0), make_model(), 1, offload=offload, **ADAMW)
