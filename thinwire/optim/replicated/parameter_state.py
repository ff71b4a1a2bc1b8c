"""The state of one parameter, and the bytes of all, where every rank holds all of it."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.optim.bucket import Bucket, place_of
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.home import check_averages, check_in_sync, check_may_write, check_plain
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import FreezeGroups, Synchronizer
from thinwire.optim.step import Send
from thinwire.zero import Slot
from thinwire.zero.home import Fragment, Held, ParameterState


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

    @override
    def parameter(self, number: int) -> Tensor:
        return self._table.parameters[number]

    @override
    def weights(self, number: int) -> Held:
        check_in_sync(all(group.in_sync for group in self._layout.groups))
        return Held([Fragment(0, self._table.weight(number).detach().reshape(-1))], everywhere=True)

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        assert value is not None, "every rank has all of its weights"
        with torch.no_grad():
            self._table.weight(number).copy_(value)
        self._table.publish(number)

    @override
    def state(self, number: int, kind: str) -> Held:
        found = self._find(number)
        if found is None:
            return Held([], everywhere=True, known=kind in self.kinds())
        group, bucket, slot = found
        check_plain(group.algorithm, group.clock, kind)
        values = bucket.state.get(kind)
        fragments = [] if values is None else [Fragment(0, values[place_of(slot)])]
        return Held(fragments, everywhere=True, known=values is not None)

    @override
    def check_may_write_state(self, kind: str) -> None:
        for group in self._layout.groups:
            check_may_write(group.algorithm, group.clock, kind)

    @override
    def gradient(self, number: int) -> Held | None:
        if not self._synchronizer.watcher.in_step:
            return None
        found = self._find(number)
        check_averages(found is None or found[0].send is Send.EXACT)
        self._synchronizer.finish()
        found = self._find(number)  # its first gradient gives it a place
        average = None if found is None else found[1].average()
        return None if found is None or average is None else Held([Fragment(0, average[place_of(found[2])])], True)

    @override
    def after_writing_gradient(self, number: int) -> None:
        found = self._find(number)
        assert found is not None, "a parameter without a place has no averaged gradient"
        found[1].rewritten = True
        self._synchronizer.outcome = None  # to be found out again

    @override
    def kinds(self) -> list[str]:
        return sorted({kind for bucket in self._layout.buckets for kind in bucket.state})

    def _find(self, number: int) -> tuple[FreezeGroup, Bucket, Slot] | None:
        for group in self._layout.groups:
            for bucket in group.buckets:
                for slot in bucket.layout.slots:
                    if slot.parameter == number:
                        return group, bucket, slot
        return None
