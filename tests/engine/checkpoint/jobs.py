"""Jobs with something to save: random values of a model, cut and dealt to ranks at random."""

import random
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.zero import SavedSlice

SHAPES = {"embedding": (17, 5), "layer/0.weight": (3, 1, 7), "bias": (1,), "scale": (), "empty": (0, 4)}


@dataclass
class Values:
    """What a whole job holds: flat values by kind and parameter, with non-finite ones among them."""

    seed: int
    world_size: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    kinds: dict[str, torch.dtype] = field(
        default_factory=lambda: {"weight": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32}
    )

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        self.model = ModelDescription({name: (shape, self.kinds["weight"]) for name, shape in self.shapes.items()})
        self.flat: dict[tuple[str, str], Tensor] = {}
        for kind, dtype in self.kinds.items():
            for name in self.shapes:
                values = torch.randn(self.model.numel(name), generator=generator)
                values[torch.rand(values.shape, generator=generator) < 0.1] = float("nan")
                self.flat[kind, name] = values.to(dtype)
        for name in self.shapes:
            self.flat["scalar.step", name] = torch.tensor([float(self.seed)], dtype=torch.float64)
        self.slices = self._cut()
        self.rank_tensors = [{"residual": torch.randn(3, rank, generator=generator)} for rank in range(self.world_size)]
        self.buffers = {"running_mean": torch.randn(4, generator=generator), "batches": torch.tensor(self.seed)}

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(
            self.slices[rank],
            self.model,
            rank_tensors=self.rank_tensors[rank],
            shared={"optimizer": {"seed": self.seed}, "progress": {"global_steps": self.seed}, "loss": float("inf")},
            rank_values={"rank": rank},
            buffers=self.buffers,
        )

    def check(self, checkpoint: LoadedCheckpoint, source: random.Random | None = None) -> None:
        """Assert that a checkpoint holds exactly these values, read in random runs."""
        source = source or self.source
        assert checkpoint.world_size == self.world_size
        assert checkpoint.model == self.model
        assert checkpoint.counters() == {"seed": self.seed}
        assert checkpoint.shared["loss"] == float("inf")
        assert checkpoint.kinds() == {kind for (kind, _), values in self.flat.items() if values.numel()}
        for (kind, name), values in self.flat.items():
            if values.numel() == 0:
                continue
            for start, stop in runs(values.numel(), source):
                assert same(checkpoint.read(kind, name, start, stop - start), values[start:stop])
        for rank, tensors in enumerate(self.rank_tensors):
            assert same(checkpoint.read_rank("residual", rank), tensors["residual"])
            assert checkpoint.rank_values(rank) == {"rank": rank}
        assert checkpoint.buffers().keys() == self.buffers.keys()
        assert all(same(buffer, self.buffers[name]) for name, buffer in checkpoint.buffers().items())

    def _cut(self) -> list[list[SavedSlice]]:
        """Every parameter in runs, each the slice of some rank."""
        slices: list[list[SavedSlice]] = [[] for _ in range(self.world_size)]
        for (kind, name), values in self.flat.items():
            for start, stop in runs(values.numel(), self.source):
                self.source.choice(slices).append(SavedSlice(kind, name, start, values[start:stop]))
        return slices


def runs(numel: int, source: random.Random) -> list[tuple[int, int]]:
    """Random runs that make up all the elements; none of no elements."""
    inner = sorted(source.sample(range(1, numel), source.randint(0, min(4, numel - 1)))) if numel > 1 else []
    cuts = [0, *inner, numel]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.numel() == 0 or torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def save(folder: Path, *jobs: tuple[str, Values], keep: int | None = None, continues: bool = False) -> None:
    """Save each under its tag, in this order, on as many ranks as it has, as jobs of their own or of one another."""
    for tag, values in jobs:

        def work(comm: Communicator, tag: str = tag, values: Values = values) -> None:
            store = CheckpointStore(folder, comm, keep)
            if continues and (found := store.load()):
                found.close()
            assert store.save(tag, values.snapshot(comm.rank))

        threads.run(work, values.world_size)


def load(folder: Path, expected: Values, size: int = 1) -> list[str]:
    """Load the newest whole checkpoint on `size` ranks, check its values, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def work(comm: Communicator) -> None:
            with CheckpointStore(folder, comm).load(description=expected.model) or missing() as checkpoint:
                expected.check(checkpoint, random.Random(comm.rank))

        threads.run(work, size)
    return [str(warning.message) for warning in caught]


def alone(folder: Path, keep: int | None = None, asynchronous: bool = False) -> CheckpointStore:
    """The store of a job of one rank."""
    return CheckpointStore(folder, threads.single(30.0), keep, asynchronous)


def opened(folder: Path, tag: str | None = None) -> LoadedCheckpoint:
    """What a job of one rank loads."""
    return alone(folder).load(tag) or missing()


def missing() -> LoadedCheckpoint:
    raise AssertionError("there is no checkpoint")


def tags(folder: Path) -> list[str]:
    """The names in a folder of checkpoints, hidden ones too, but for `latest` and the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("latest", ".lock"))
