"""Weights that every rank steps whole: the parameters themselves, or their fp32 master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.algorithm import Algorithm
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.formulas import AdamSettings
from thinwire.optim.group_weights import Change, GroupWeights
from thinwire.optim.members import Members
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.zero import Slot
from thinwire.zero.flat_bucket import Run

__all__ = ["RankZeros", "ReplicatedWeights", "weight_and_master"]


class ReplicatedWeights(GroupWeights):
    """What updates are applied to is in `table`, which rounds it into 16-bit parameters.

    While ranks take local steps master weights are those of the last sync, and parameters show the ranks' own.
    """

    def __init__(self, table: ParameterTable, buckets: Sequence[AlgorithmBucket]) -> None:
        super().__init__(table, buckets)
        self._table = table

    def weight(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """See GroupWeights."""
        return self._table.weight(slot.parameter)

    def change(self, change: Change, groups: Sequence[Members], steps: int) -> None:
        """See GroupWeights."""
        change(groups)

    def to_move(self, bucket: AlgorithmBucket) -> list[tuple[Tensor | None, Tensor | None]] | None:
        """See GroupWeights."""
        found: list[tuple[Tensor | None, Tensor | None]] = []
        for slot in bucket.layout.slots:
            parameter = self._table.parameters[slot.parameter]
            if not parameter.requires_grad:
                found.append((None, None))
                continue
            weight = self._table.weight(slot.parameter)
            replica = None if weight is parameter else parameter
            if not (weight.is_contiguous() and parameter.is_contiguous()):
                return None
            if replica is not None and replica.dtype not in (torch.bfloat16, torch.float16):
                return None
            found.append((weight, replica))
        return found

    def moved(self, bucket: AlgorithmBucket) -> None:
        """See GroupWeights."""
        for slot in bucket.layout.slots:
            self._table.accept(slot.parameter)

    def show_common(self) -> None:
        """See GroupWeights."""
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                self._table.publish(slot.parameter)

    def common(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """See GroupWeights."""
        master: Tensor = self._table.state(slot.parameter)["master"]
        return master.reshape(-1)

    def show(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> None:
        """See GroupWeights."""
        self._table.show(slot.parameter, weight.view(self._table.parameters[slot.parameter].shape))

    def stand_apart(self) -> None:
        """See GroupWeights."""
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                self._table.keep_apart(slot.parameter)

    def take_over_written(self, in_sync: bool) -> list[tuple[AlgorithmBucket, Slot]]:
        """See GroupWeights."""
        written = [(b, slot) for b in self._buckets for slot in b.layout.slots if self._table.changed(slot.parameter)]
        for _, slot in written if in_sync else ():
            self._table.make_master(slot.parameter)
        return [] if in_sync else written

    def holds(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> bool:
        """See GroupWeights."""
        parameter = self._table.parameters[slot.parameter]
        same = torch.equal(parameter.reshape(-1), weight.to(parameter.dtype))
        if same:
            self._table.accept(slot.parameter)
        return same

    def saved(self, bucket: AlgorithmBucket, run: Run, own: bool) -> dict[str, Tensor]:
        """See GroupWeights."""
        place = slice(run.start, run.start + run.numel)
        weight, master = weight_and_master(self._table, run.parameter, own)
        return {
            name: one.reshape(-1)[place] for name, one in (("weight", weight), ("master", master)) if one is not None
        }

    def show_state(self, algorithm: Algorithm) -> None:
        """Let every parameter's entry in the optimizer's state be views of the buckets' state."""
        shown = set(algorithm.state) | set(algorithm.frozen_state)
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                entry = self._table.state(slot.parameter)
                for name in shown - set(bucket.state):
                    entry.pop(name, None)
                entry |= {name: bucket.view(values, slot) for name, values in bucket.state.items()}


def weight_and_master(table: ParameterTable, index: int, own: bool) -> tuple[Tensor, Tensor | None]:
    """A parameter's weights as all ranks have them in common, and its master weight where there is one."""
    parameter = table.parameters[index].detach()
    master: Tensor | None = table.state(index).get("master")
    return (master.to(parameter.dtype) if own and master is not None else parameter), master


class RankZeros:
    """An Agreement on what every rank has found for whole parameters: rank 0's numbers.

    Norms are sums, which another CPU or number of threads adds up in another order: weights that must be the same bits
    on every rank cannot depend on each rank's own.
    """

    def __init__(self, comm: Communicator, numels: Sequence[int], settings: dict[int, AdamSettings]) -> None:
        self._comm = comm
        self.numels = numels
        self.settings = settings

    def zeros(self, kinds: int) -> Tensor:
        """See Agreement."""
        return torch.zeros(len(self.numels), kinds, dtype=torch.float64)

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Agreement."""
        together = torch.cat([sums, torch.zeros_like(sums[:, :1]) if greatest is None else greatest[:, None]], dim=1)
        self._comm.broadcast(together)
        return together[:, :-1], together[:, -1]
