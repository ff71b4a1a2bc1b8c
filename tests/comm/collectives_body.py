"""The body that every backend must pass: each function takes a communicator and raises on a mismatch.

Every rank draws the inputs of all ranks from one seed, so that it can compute what it should receive.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator

MOVED_DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16)
REDUCED_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64)
LENGTHS = (0, 1, 7, 130)


def draw(comm: Communicator, seed: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Input of every rank: ``numel`` small random numbers, exact in ``dtype``, also when summed."""
    generator = np.random.default_rng(seed)
    numbers = generator.integers(0 if dtype == torch.uint8 else -9, 10, size=(comm.size, numel))
    return [torch.from_numpy(row).to(dtype) for row in numbers]


def turn(comm: Communicator, inputs: list[Tensor]) -> Tensor:
    """What an all-to-all of all ranks' ``inputs`` brings to this one."""
    return torch.cat([one.tensor_split(comm.size)[comm.rank] for one in inputs])


def check_copies(comm: Communicator, seed: int) -> None:
    for dtype in MOVED_DTYPES:
        for numel in LENGTHS:
            inputs = draw(comm, seed, comm.size * numel, dtype)
            exchanged, gathered = torch.empty_like(inputs[0]), torch.empty(comm.size, comm.size * numel, dtype=dtype)
            comm.all_to_all(exchanged, inputs[comm.rank])
            comm.all_gather(gathered, inputs[comm.rank])
            assert torch.equal(exchanged, turn(comm, inputs))
            assert torch.equal(gathered, torch.stack(inputs))
            gathered[torch.arange(comm.size) != comm.rank] = 0
            comm.all_gather(gathered, gathered[comm.rank])
            assert torch.equal(gathered, torch.stack(inputs))


def check_handles(comm: Communicator, seed: int) -> None:
    """Several in flight, of sizes at which backends change their ways, among small ones; waited for in any order."""
    flying, expected, found = [], [], []
    for number, chunk in enumerate([65535, 65536, 100_003, 3, 65537]):
        inputs = draw(comm, seed + number, comm.size * chunk, torch.uint8)
        floats = draw(comm, seed + number, chunk, torch.float32)
        mine = floats[comm.rank]
        exchanged, gathered = torch.empty_like(inputs[0]), torch.empty(comm.size, chunk)
        summed, rooted = mine[:130].clone(), mine.clone()
        flying.append(comm.all_to_all(exchanged, inputs[comm.rank], async_op=True))
        flying.append(comm.all_reduce(summed, "mean", async_op=True))
        within = gathered[comm.rank].copy_(mine)  # in place of a copy beside it
        flying.append(comm.all_gather(gathered, within if number % 2 else mine, async_op=True))
        flying.append(comm.broadcast(rooted, comm.size - 1, async_op=True))
        found += [exchanged, summed, gathered, rooted]
        every = torch.stack(floats)
        expected += [turn(comm, inputs), every[:, :130].sum(0) / comm.size, every, floats[-1]]
    for number in torch.randperm(len(flying), generator=torch.Generator().manual_seed(seed)).tolist():
        flying[number].wait()
        assert flying[number].is_completed()
        flying[number].wait()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def check_unequal_chunks(comm: Communicator, seed: int) -> None:
    """Of sizes by rank, some of them none, below and above those at which backends change their ways; all in flight."""
    generator = np.random.default_rng(seed)
    flying, found, expected = [], [], []
    for most in (0, 1, 5, 130, 65_536, 100_003):
        for dtype in (torch.uint8, torch.bfloat16, torch.int64):
            sizes = [int(one) for one in generator.integers(0, most + 1, comm.size)]
            sizes[int(generator.integers(comm.size))] = most
            if most and comm.size > 1:
                sizes[int(generator.integers(comm.size))] = 0
            inputs = draw(comm, seed + most, sum(sizes), dtype)
            gifts = [one[:size].clone() for one, size in zip(inputs, sizes, strict=True)]
            exchanged = torch.empty(comm.size, sizes[comm.rank], dtype=dtype)
            gathered = torch.empty(sum(sizes), dtype=dtype)
            flying.append(comm.all_to_all(exchanged, inputs[comm.rank], sizes=sizes, async_op=True))
            flying.append(comm.all_gather(gathered, gifts[comm.rank], sizes=tuple(sizes), async_op=True))
            found += [exchanged, gathered]
            expected += [torch.stack([one.split(sizes)[comm.rank] for one in inputs]), torch.cat(gifts)]
    for work in reversed(flying):
        work.wait()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def check_broadcast(comm: Communicator, seed: int) -> None:
    for root in range(comm.size):
        for numel in LENGTHS:
            inputs = draw(comm, seed + root, numel, torch.bfloat16)
            tensor = inputs[comm.rank].clone()
            comm.broadcast(tensor, root)
            assert torch.equal(tensor, inputs[root])
    parameter = torch.nn.Parameter(torch.full((2, 3), float(comm.rank)))
    comm.broadcast(parameter, comm.size - 1)
    assert parameter.requires_grad
    assert bool((parameter == comm.size - 1).all())


def check_all_reduce(comm: Communicator, seed: int) -> None:
    for dtype in (*REDUCED_DTYPES, torch.bfloat16, torch.float16):
        for numel in LENGTHS:
            inputs = draw(comm, seed, numel, dtype)
            stacked = torch.stack(inputs).double().numpy()
            expected = {"sum": stacked.sum(0), "max": stacked.max(0), "min": stacked.min(0)}
            if dtype.is_floating_point:
                expected["mean"] = stacked.mean(0)
            for op, numbers in expected.items():
                tensor = inputs[comm.rank].clone()
                comm.all_reduce(tensor, op)  # type: ignore[arg-type]
                assert torch.equal(tensor, torch.from_numpy(numbers).to(dtype)), (op, dtype, numel)
    scalar = torch.tensor(float(comm.rank))
    comm.all_reduce(scalar, "max")
    assert scalar.item() == comm.size - 1


def check_reductions_agree(comm: Communicator, seed: int) -> None:
    """Sums that need rounding still have the same bits on all ranks."""
    generator = torch.Generator().manual_seed(seed + comm.rank)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(1001, generator=generator).to(dtype)
        comm.all_reduce(tensor, "mean")
        gathered = torch.empty(comm.size, 1001, dtype=dtype)
        comm.all_gather(gathered, tensor)
        assert bool((gathered == gathered[0]).all())


def check_polling(comm: Communicator, seed: int) -> None:
    """Looking at a handle alone brings it to its end."""
    tensor = torch.ones(100)
    work = comm.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    assert bool((tensor == comm.size).all())


def check_control(comm: Communicator, seed: int) -> None:
    payloads = [bytes([rank]) * ((seed + rank) % 4) for rank in range(comm.size)]
    assert comm.all_gather_bytes(payloads[comm.rank]) == payloads
    assert comm.all_gather_bytes(b"") == [b""] * comm.size
    comm.barrier()


def check_purposes(comm: Communicator, seed: int) -> None:
    """Ranks at different calls say so on every rank, and nobody reads another's message as what it is not."""
    copy = comm.duplicate()
    purpose = "compare the weights" if comm.rank == comm.size - 1 else "find overflows"
    if comm.size == 1:
        assert copy.all_gather_bytes(b"x", purpose) == [b"x"]
    else:
        first, *_, last = comm.global_ranks
        wanted = f"rank {first} is about to find overflows, rank {last} to compare the weights"
        with pytest.raises(CommunicationError, match=wanted) as caught:
            copy.all_gather_bytes(b"x" * comm.rank, purpose)
        assert caught.value.ranks == (last,)
        refused(CommunicationError, "can no longer be used", copy.barrier)
    assert comm.all_gather_bytes(b"", purpose="compare the weights") == [b""] * comm.size


def check_split(comm: Communicator, seed: int) -> None:
    half = comm.split(comm.rank % 2)
    assert half is not None
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (half.size, half.rank) == (len(members), comm.rank // 2)
    gathered = torch.empty(half.size, dtype=torch.int64)
    half.all_gather(gathered, torch.tensor([comm.rank]))
    assert gathered.tolist() == members

    reverse = comm.split(7, key=-comm.rank)
    assert reverse is not None
    assert reverse.rank == comm.size - 1 - comm.rank

    first = comm.split(0 if comm.rank == 0 else None)
    assert (first is None) == (comm.rank != 0)

    # The ranks now hold different numbers of groups, from which new ones must still come out.
    for parent in (half, comm):
        copy = parent.duplicate()
        nested = copy.split(0)
        assert nested is not None
        assert (nested.rank, nested.size) == (parent.rank, parent.size)
        nested.barrier()
        copy.close()
        refused(CommunicationError, "closed", copy.barrier)
    half.close()
    half.close()


def check_duplicate(comm: Communicator, seed: int) -> None:
    """Messages on a duplicate pass those on the original."""
    copy = comm.duplicate()
    one, two = torch.ones(5), torch.full((5,), 2.0)
    first = comm.all_reduce(one, async_op=True)
    second = copy.all_reduce(two, async_op=True)
    second.wait()
    first.wait()
    assert (one[0].item(), two[0].item()) == (comm.size, 2 * comm.size)
    assert copy.traffic.calls == 1
    copy.close()


def check_traffic(comm: Communicator, seed: int) -> None:
    comm.traffic.reset()
    size = comm.size
    wide = torch.zeros(size * 12, dtype=torch.float32)
    comm.all_to_all(torch.empty_like(wide), wide)
    comm.all_gather(torch.empty(size * 5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))
    comm.all_reduce(wide)
    comm.broadcast(wide)
    assert comm.traffic.bytes_by_collective == {
        "all_to_all": (size - 1) * 48,
        "all_gather": (size - 1) * 5,
        "all_reduce": 2 * (size - 1) * 48,
        "broadcast": (size - 1) * 48,
    }
    assert comm.traffic.bytes_sent == (size - 1) * 197
    assert comm.traffic.calls == 4
    comm.traffic.reset()
    sizes = [3 * rank for rank in range(size)]
    own = torch.zeros(3 * comm.rank, dtype=torch.bfloat16)
    comm.all_to_all(own.repeat(size), own.new_empty(sum(sizes)), sizes=sizes)
    comm.all_gather(own.new_empty(sum(sizes)), own, sizes=sizes)
    sent = {"all_to_all": 2 * (sum(sizes) - sizes[comm.rank]), "all_gather": (size - 1) * own.nbytes}
    assert comm.traffic.bytes_by_collective == sent


def check_refusals(comm: Communicator, seed: int) -> None:
    """What is refused here fails before anything is sent, so that all ranks can go on."""
    ones, odd, both = torch.ones(comm.size), torch.ones(comm.size + 1), torch.ones(2 * comm.size + 1)
    refusals = [
        (ValueError, "contiguous", comm.all_reduce, torch.ones(4, 4).t()),
        (TypeError, "one dtype", comm.all_to_all, ones.double(), ones),
        (ValueError, "expected", comm.all_gather, ones[:0], ones),
        (ValueError, "share memory", comm.all_to_all, ones, ones),
        (ValueError, "share memory", comm.all_gather, both[:-1], both[1:3]),
        (ValueError, "root is", comm.broadcast, ones, comm.size),
        (TypeError, "root must be", comm.broadcast, ones, 0.0),
        (ValueError, "unknown op", comm.all_reduce, ones, "product"),
        (TypeError, "mean of", comm.all_reduce, torch.ones(3, dtype=torch.int64), "mean"),
        (TypeError, "cannot reduce", comm.all_reduce, torch.ones(3, dtype=torch.complex64)),
        (TypeError, r"torch\.Tensor", comm.all_reduce, [1.0]),
        (ValueError, "dense", comm.broadcast, torch.ones(3).to_sparse()),
    ]
    if comm.size > 1:
        refusals.append((ValueError, "do not divide", comm.all_to_all, odd.clone(), odd))
    every, of_two = torch.ones(2 * comm.size), [2] * comm.size
    for collective, output, input in ((comm.all_to_all, every.clone(), every), (comm.all_gather, every, ones[:1])):
        name = collective.__name__
        for error, message, sizes in (
            (ValueError, f"{name}: sizes must be {comm.size} numbers from 0, one a rank", [*of_two, 0]),
            (ValueError, f"{name}: sizes must be {comm.size} numbers from 0", [-1] * comm.size),
            (TypeError, f"{name}: sizes must be a list of whole numbers", [2.0] * comm.size),
            (TypeError, f"{name}: sizes must be a list of whole numbers", 2),
            (ValueError, f"{name}: .*expected", [3] * comm.size),
        ):
            refused(error, message, collective, output, input, sizes=sizes)
    refused(
        ValueError,
        f"input has 1 elements, expected 2 on rank {comm.rank}",
        comm.all_gather,
        every,
        ones[:1],
        sizes=of_two,
    )
    refused(ValueError, "share memory", comm.all_gather, every, every[:2], sizes=of_two)
    for error, message, call, *arguments in refusals:
        refused(error, message, call, *arguments)
    comm.barrier()


CHECKS = [one for name, one in globals().items() if name.startswith("check_")]


def check_everything(comm: Communicator, seed: int) -> None:
    """Run all checks in turn on one communicator."""
    for check in CHECKS:
        check(comm, seed)
