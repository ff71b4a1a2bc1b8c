"""What an optimizer whose state every rank holds has of one parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.algorithm import Send
from thinwire.optim.algorithm_home import check_averages, check_in_sync, check_may_write, check_plain
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.replicated.freeze_groups import FreezeGroups
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import Synchronizer
from thinwire.zero import Slot
from thinwire.zero.parameter_state import Fragment, Held, ParameterState

__all__ = ["ReplicatedParameterState"]


class ReplicatedParameterState(ParameterState):
    """Weights in `table`, state and averages in the buckets of `layout`."""

    cuts_parameters = False

    def __init__(
        self, comm: Communicator, table: ParameterTable, layout: FreezeGroups, synchronizer: Synchronizer
    ) -> None:
        self.comm = comm
        self._table = table
        self._layout = layout
        self._synchronizer = synchronizer

    def parameter(self, number: int) -> Tensor:
        """See ParameterState."""
        return self._table.parameters[number]

    def weights(self, number: int) -> Held:
        """See ParameterState."""
        check_in_sync(all(group.algorithm.in_sync for group in self._layout.groups))
        return Held([Fragment(0, self._table.weight(number).detach().reshape(-1))], everywhere=True)

    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        """See ParameterState."""
        assert value is not None, "every rank has all of its weights"
        with torch.no_grad():
            self._table.weight(number).copy_(value)
        self._table.publish(number)

    def state(self, number: int, kind: str) -> Held:
        """See ParameterState."""
        found = self._find(number)
        if found is None:
            return Held([], everywhere=True, known=kind in self.kinds())
        group, bucket, slot = found
        check_plain(group.algorithm, group.clock, kind)
        values = bucket.state.get(kind)
        fragments = [] if values is None else [Fragment(0, values[place_of(slot)])]
        return Held(fragments, everywhere=True, known=values is not None)

    def check_may_write_state(self, kind: str) -> None:
        """See ParameterState."""
        for group in self._layout.groups:
            check_may_write(group.algorithm, group.clock, kind)

    def gradient(self, number: int) -> Held | None:
        """See ParameterState."""
        if not self._synchronizer.watcher.in_step:
            return None
        found = self._find(number)
        check_averages(found is None or found[0].send is Send.EXACT)
        self._synchronizer.finish()
        found = self._find(number)  # its first gradient gives it a place
        average = None if found is None else found[1].average()
        return None if found is None or average is None else Held([Fragment(0, average[place_of(found[2])])], True)

    def after_writing_gradient(self, number: int) -> None:
        """See ParameterState."""
        found = self._find(number)
        assert found is not None, "a parameter without a place has no averaged gradient"
        found[1].average_rewritten()
        self._synchronizer.hear_again()

    def kinds(self) -> list[str]:
        """See ParameterState."""
        return sorted({kind for bucket in self._layout.buckets for kind in bucket.state})

    def _find(self, number: int) -> tuple[FreezeGroup, AlgorithmBucket, Slot] | None:
        for group in self._layout.groups:
            for bucket in group.buckets:
                for slot in bucket.layout.slots:
                    if slot.parameter == number:
                        return group, bucket, slot
        return None
