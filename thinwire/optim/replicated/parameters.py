"""An optimizer's parameters under one running number, whatever group they are in, and the weights that every rank
steps whole: the parameters themselves, or their fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.codecs import resized, zeros_with_room
from thinwire.optim.bucket import Bucket, Shared
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.step import Members, Parameters
from thinwire.optim.storage import Change, Storage
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.master_weights import Run
from thinwire.zero.replica import local_part
from thinwire.zero.saved_state import SliceSource, read_weight


class ParameterTable(Parameters):
    """The parameters of `optimizer`, numbered in the order of its groups, with their group, state and name.

    16-bit parameters get an fp32 master weight, in their state as `master`: an update far below a weight's last bit
    would otherwise be lost.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: HomeOptions, recipe: Recipe) -> None:
        super().__init__([], [], optimizer.param_groups, recipe.hyperparameters, self._description)
        self.names: list[str] = []  # in checkpoints
        self.states: dict[Tensor, dict[str, Any]] = optimizer.state
        self._published: list[tuple[int, Tensor]] = []  # see `accept`
        self._param_dtype = options.param_dtype
        self._given_names = {id(local_part(parameter)): name for name, parameter in options.named_parameters or ()}
        self._called: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.parameters)

    def new_parameters(self) -> list[tuple[Tensor, int]]:
        """Parameters, with their group's number, that the optimizer holds and this table does not yet."""
        held = [(parameter, number) for number, group in enumerate(self.groups) for parameter in group["params"]]
        for group in self.groups:
            for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False):
                self._given_names.setdefault(id(parameter), name)
        return held[len(self) :]

    def known_name(self, parameter: Tensor) -> str | None:
        """What it is called in `named_parameters`, or in torch's named form of its group; None where in neither."""
        return self._given_names.get(id(parameter))

    def add(self, parameter: Tensor, group_number: int) -> None:
        """Give `parameter` the next number."""
        index = len(self)
        self.parameters.append(parameter)
        self.group_of.append(group_number)
        self._published.append((parameter._version, parameter.detach()))
        position = index - self.group_of.index(group_number)
        name = self.known_name(parameter)
        if name is not None:
            self._called[index] = name
        self.names.append(name or f"group{group_number}.{position}")
        self.make_master(index)
        if self._param_dtype not in (None, parameter.dtype) and parameter.dtype == torch.float32:
            self._copy_to_master(index)
            parameter.data = parameter.data.to(self._param_dtype)
            self.accept([index])

    def call(self, names: Mapping[int, str]) -> None:
        """Call parameters, by id, as `names` does, in error messages."""
        self._called |= {index: names[id(one)] for index, one in enumerate(self.parameters) if id(one) in names}

    def _description(self, index: int) -> str:
        """How an error message calls a parameter."""
        number = self.group_of[index]
        position = index - self.group_of.index(number)
        called = f" {self._called[index]!r}" if index in self._called else ""
        return f"parameter {position} of group {number}{called}, shape {tuple(self.parameters[index].shape)},"

    def state(self, index: int) -> dict[str, Any]:
        """A parameter's entry in the optimizer's state."""
        return self.states[self.parameters[index]]

    # Master weights

    def make_master(self, index: int) -> None:
        """(Re)build the master weight of a 16-bit parameter, or of one that has been given one, from the parameter."""
        if self.parameters[index].dtype != torch.float32 or "master" in self.state(index):
            self._copy_to_master(index)

    def keep_apart(self, index: int) -> None:
        """Give the parameter a master weight whatever its dtype, so that the two may come to differ."""
        if "master" not in self.state(index):
            self._copy_to_master(index)

    def weight(self, index: int) -> Tensor:
        """What updates are applied to: the fp32 master weight where there is one, else the parameter."""
        state = self.state(index)
        if "master" not in state:
            return self.parameters[index]
        if self.written([index]):
            self.make_master(index)  # weights were loaded into the model since
        weight: Tensor = state["master"]
        return weight

    def publish(self, index: int) -> None:
        """Round the master weight, where there is one, into the parameter."""
        weight = self.weight(index)
        if weight is not self.parameters[index]:
            self.show(index, weight)

    def weights(self) -> list[Tensor]:
        """What updates are applied to, of all parameters."""
        return [self.weight(index).detach() for index in range(len(self))]

    def publish_all(self) -> None:
        """Round all master weights into their parameters."""
        for index in range(len(self)):
            self.publish(index)

    def show(self, index: int, weight: Tensor) -> None:
        """Round `weight` into the parameter, and leave the master weight as it is."""
        self.parameters[index].copy_(weight)
        self.accept([index])

    def written(self, indices: Iterable[int]) -> list[int]:
        """Those that other code has written to, or whose `.data` it replaced, since they were last published."""
        found = []
        for index in indices:
            (version, values), parameter = self._published[index], self.parameters[index]
            if parameter._version != version or parameter.data_ptr() != values.data_ptr():
                found.append(index)
        return found

    def accept(self, indices: Iterable[int]) -> None:
        """Take parameters as they are for what was published: master weights stay until other code changes them."""
        for index in indices:
            # Values are held, so that their memory is not another tensor's when addresses are compared.
            self._published[index] = (self.parameters[index]._version, self.parameters[index].detach())

    @torch.no_grad()
    def read_weights(self, source: SliceSource) -> None:
        """Copy the weights of a checkpoint into the parameters that train, and in fp32 into their master weights."""
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue
            name, numel = self.names[index], parameter.numel()
            parameter.copy_(read_weight(source, parameter.dtype, name, 0, numel).view(parameter.shape))
            self.make_master(index)
            if "master" in self.state(index):
                exact = read_weight(source, torch.float32, name, 0, numel)
                self.state(index)["master"].copy_(exact.view(parameter.shape))

    @torch.no_grad()
    def read_masters(self, source: SliceSource) -> None:
        """Take master weights over where there are any; parameters that have none become their own again."""
        for index, name in enumerate(self.names):
            self.make_master(index)
            weight = self.weight(index)
            try:
                weight.copy_(source.read("master", name, 0, weight.numel()).view(weight.shape))
            except KeyError:
                continue

    def _copy_to_master(self, index: int) -> None:
        self.state(index)["master"] = self.parameters[index].detach().float().clone()
        self.accept([index])


class WholeStorage(Storage):
    """All state on every rank. What updates are applied to is in `table`, which rounds it into 16-bit parameters.

    While ranks take local steps master weights are those of the last sync, and parameters show the ranks' own.
    """

    shapes = True

    def __init__(
        self, table: ParameterTable, shared: Shared, layouts: Mapping[int, BucketLayout], *, bare: bool = False
    ) -> None:
        """`bare`: without state, for `take_over`."""
        self._table, self._bare = table, bare
        super().__init__(shared, layouts)
        self._slots = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots}
        self._copies: list[tuple[int, Tensor]] = []  # by number, of weights that a kernel cannot move where they lie
        if not bare:
            self._show_state()

    @override
    def new_state(self, name: str, bucket: int, layout: BucketLayout) -> Tensor:
        numel = 0 if self._bare else self._wire.padded_numel(layout)
        make = zeros_with_room if self._wire.changes else torch.zeros
        return make(numel, device=self._table.parameters[0].device)

    def take_over(self, before: Sequence[Bucket]) -> None:
        """Go on with the state of the same buckets, cut for other ranks."""
        self._bare = False
        for old, new in zip(before, self.buckets, strict=True):
            padded = self._wire.padded_numel(new.layout)
            new.state = {name: resized(values, new.layout.numel, padded) for name, values in old.state.items()}
            old.state.clear()
        self._show_state()

    @override
    def begin_frozen_state(self) -> None:
        super().begin_frozen_state()
        self._show_state()

    @override
    def weight(self, bucket: Bucket, slot: Slot) -> Tensor:
        return self._table.weight(slot.parameter)

    @override
    def change(self, change: Change, groups: Sequence[Members]) -> None:
        change(groups, self._clock)

    @override
    def receive_and_move(self, bucket: Bucket) -> None:
        bucket.receive_and_move(*self.to_move(bucket))
        self.accept_moved(bucket)

    def to_move(self, bucket: Bucket) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The weights of each slot that trains, fp32 and contiguous, and the 16-bit replicas that show them, for the
        form to move; copies of those that lie otherwise, which `accept_moved` takes back."""
        weights: list[Tensor | None] = []
        replicas: list[Tensor | None] = []
        self._copies = []
        state = self._table.states
        for slot in bucket.layout.slots:
            parameter = self._table.parameters[slot.parameter]
            if not parameter.requires_grad:
                weights.append(None)
                replicas.append(None)
                continue
            weight: Tensor = state[parameter].get("master", parameter)
            replica = None if weight is parameter else parameter
            rounds = replica is None or replica.dtype in (torch.bfloat16, torch.float16)
            if not (rounds and weight.is_contiguous() and parameter.is_contiguous()):
                weight, replica = weight.detach().clone(memory_format=torch.contiguous_format), None
                self._copies.append((slot.parameter, weight))
            weights.append(weight)
            replicas.append(replica)
        return weights, replicas

    def accept_moved(self, bucket: Bucket) -> None:
        """Take over what was done to the last `to_move`'s weights and replicas."""
        self._table.accept(slot.parameter for slot in bucket.layout.slots)
        for number, weight in self._copies:
            self._table.weight(number).copy_(weight)
            self._table.accept([number])
            self._table.publish(number)

    def moves_in_place(self) -> bool:
        """Whether the form moves all weights where they lie."""
        for bucket in self.buckets if self._algorithm.form.update is not None else ():
            self.to_move(bucket)
            if self._copies or not bucket.compressed.codec.has_kernels:
                return False
        return self._algorithm.form.update is not None

    @override
    def show_common(self) -> None:
        for number in self._slots:
            self._table.publish(number)

    @override
    def common(self, bucket: Bucket, slot: Slot) -> Tensor:
        master: Tensor = self._table.state(slot.parameter)["master"]
        return master.reshape(-1)

    @override
    def show(self, bucket: Bucket, slot: Slot, weight: Tensor) -> None:
        self._table.show(slot.parameter, weight.view(self._table.parameters[slot.parameter].shape))

    @override
    def keep_common(self) -> None:
        for number in self._slots:
            self._table.keep_apart(number)

    @override
    def take_over_written(self, in_sync: bool) -> list[tuple[Bucket, Slot]]:
        written = self._table.written(self._slots)
        if not in_sync:
            return [self._slots[number] for number in written]
        for number in written:
            self._table.make_master(number)
        return []

    @override
    def holds(self, bucket: Bucket, slot: Slot, weight: Tensor) -> bool:
        parameter = self._table.parameters[slot.parameter]
        same = torch.equal(parameter.reshape(-1), weight.to(parameter.dtype))
        if same:
            self._table.accept([slot.parameter])
        return same

    @override
    def saved(self, bucket: Bucket, run: Run, own: bool) -> dict[str, Tensor]:
        place = slice(run.start, run.start + run.numel)
        weight, master = weight_and_master(self._table, run.parameter, own)
        return {
            name: one.reshape(-1)[place] for name, one in (("weight", weight), ("master", master)) if one is not None
        }

    def _show_state(self) -> None:
        """Let every parameter's entry in the optimizer's state be views of the buckets' state."""
        shown = set(self._algorithm.state) | set(self._algorithm.frozen_state)
        for bucket, slot in self._slots.values():
            entry = self._table.state(slot.parameter)
            for name in shown - set(bucket.state):
                entry.pop(name, None)
            entry |= {name: self._view(values, slot) for name, values in bucket.state.items()}


def weight_and_master(table: ParameterTable, index: int, own: bool) -> tuple[Tensor, Tensor | None]:
    """A parameter's weights as all ranks have them in common, and its master weight where there is one."""
    parameter = table.parameters[index].detach()
    master: Tensor | None = table.state(index).get("master")
    return (master.to(parameter.dtype) if own and master is not None else parameter), master
