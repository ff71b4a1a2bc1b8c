"""Watches gradients arrive during backward and sends each bucket as soon as it is whole, so that communication
overlaps with computation; decides, the same on every rank, what became of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.exchange import Exchange, Outcome
from thinwire.compress.packet import Flags
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.zero import BucketLayout, Slot, bucket_numel, partition
from thinwire.zero.autograd_hooks import ArrivalHook, at_backward_end
from thinwire.zero.left_out_parameters import NothingToSend, agree_to_leave_out, has_gradient
from thinwire.zero.pipeline import Pipeline

__all__ = ["Bucket", "GradientSynchronizer", "Round"]

_FP32_BYTES = 4


@dataclass
class Bucket:
    """A flat run of parameters and the exchange that averages what they send.

    A `quiet` bucket is filled as others are, but sends nothing; all ranks agree on which are.
    """

    index: int
    layout: BucketLayout
    exchange: Exchange
    quiet: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Round:
    """One synchronised backward, the same on every rank.

    `absent`: the parameters that had no gradient on any rank. `unsent`: buckets that did not leave, since all of their
    parameters had been left out. `guilty`: where the averages are not finite, the ranks whose own gradients were not.
    """

    finite: bool
    absent: frozenset[int]
    unsent: frozenset[int]
    guilty: tuple[int, ...] = ()


class GradientSynchronizer:
    """Sends the gradients of the table's parameters bucket by bucket, in one fixed order on every rank.

    `fill(bucket, slot, gradient)` writes what a parameter contributes into `bucket.exchange.payload`; the gradient
    is None where this rank has none. `place(layouts)` makes the buckets for parameters that have none yet.

    Buckets hold the parameters in the order in which rank 0 saw their gradients arrive in the first backward, so
    that early buckets are whole early whatever order the parameter groups list them in. That first backward is
    therefore exchanged as a whole, at its end.

    Legs are issued in the pipeline's order, which is the same on every rank.
    """

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        *,
        bucket_bytes: int | None,
        block_size: int,
        place: Callable[[Sequence[BucketLayout], int], list[Bucket]],
        fill: Callable[[Bucket, Slot, Tensor | None], None],
    ) -> None:
        self.buckets: list[Bucket] = []
        self.step = 0
        self._comm = comm
        self._table = table
        self._bucket_bytes = bucket_bytes
        self._block_size = block_size
        self._place = place
        self._fill = fill
        self._places: dict[int, tuple[Bucket, Slot]] = {}
        self._unplaced: list[int] = []
        self._pipeline = Pipeline()
        self._enabled = True
        self._gates: list[Callable[[], bool]] = []
        self._round: Round | None = None
        self._unhooked: list[int] = []
        self._usually_absent: frozenset[int] = frozenset()
        self._left_out: frozenset[int] = frozenset()  # of the round that comes, or is under way
        self.end_round()

    # Setting up

    def watch(self, count: int) -> None:
        """Take charge of the gradients of the table's last `count` parameters, from the next backward on."""
        new = range(len(self._table) - count, len(self._table))
        self._unplaced += new
        self._unhooked += new
        self._hook_trainable()

    def follow(self, gate: Callable[[], bool]) -> None:
        """Send nothing while `gate()` is false: how another wrapper's `no_sync` is obeyed."""
        self._gates.append(gate)

    def restore(self, cohorts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Place the parameters as a checkpoint recorded them: for each call of `place`, each bucket's parameters."""
        self.buckets, self._places = [], {}
        self.end_round()
        placed = {index for cohort in cohorts for order in cohort for index in order}
        self._unplaced = [index for index in range(len(self._table.parameters)) if index not in placed]
        for cohort in cohorts:
            self._add_buckets([self._partition(order, whole=True)[0] for order in cohort])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate into `.grad`; the next one outside sends the sum."""
        if self._arrived:
            raise RuntimeError(
                "no_sync() was entered between a synchronised backward() and its step(): the gradients have left "
                "already. Call step() first, or put the earlier backward() inside no_sync() too"
            )
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    # A round: from the first gradient to `end_round`

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Expect no gradient of these in the next round, on any rank; buckets of nothing else stay here. Collective.

        Takes the place of what was left out before. Raises ValueError, on every rank, where ranks differ, and where one
        of the parameters has a gradient, and RuntimeError where gradients have left already.
        """
        error = RuntimeError("leave_out() comes before the synchronised backward()") if self._arrived else None
        self._left_out = agree_to_leave_out(self._comm, self._table.parameters, parameters, error)
        self._waiting = [self._awaited(bucket) for bucket in self.buckets]

    @property
    def in_round(self) -> bool:
        """Whether gradients of this round have arrived."""
        return bool(self._arrived)

    @property
    def finished(self) -> bool:
        """Whether `finish` has been called in this round, as the end of a backward that reached everything does."""
        return self._round is not None

    @property
    def changed_gradients(self) -> list[int]:
        """Parameters whose `.grad` somebody changed, or dropped, after it had been taken into this round."""
        return [
            index
            for index, (gradient, version) in self._arrived.items()
            if self._table.parameters[index].grad is not gradient or gradient._version != version
        ]

    def finish(self) -> Round:
        """Send what has not left yet, wait for everything and say what became of it. Collective.

        Raises PacketError where the ranks have lost step, and ValueError, on every rank, where some rank has no
        gradient for a parameter that has one on others.
        """
        if self._round is not None:
            return self._round
        try:
            self._hook_trainable()
            self._take_late_gradients()
            outcomes = self._exchange_rest()
            if not self.buckets or any(outcome.unplaced for outcome in outcomes):
                self._place_in_order_of_arrival()
                outcomes += self._exchange_rest()
            absent: frozenset[int] = frozenset()
            if any(outcome.incomplete for outcome in outcomes):
                absent = self._agree_on_absent()
            finite = all(outcome.finite for outcome in outcomes)
            guilty = () if finite else self._find_guilty()
        except BaseException:
            self.end_round()
            raise
        unsent = frozenset(bucket.index for bucket in self.buckets if not self._awaited(bucket))
        self._round = Round(finite, absent | self._left_out, unsent, guilty)
        self._usually_absent = absent - self._left_out
        return self._round

    def repeat(self) -> Round:
        """Send this round's gradients once more, as `fill` writes them now. Collective, after `finish`."""
        self._round = None
        self._pipeline.reset()
        self._heard = 0
        for index in self._arrived.keys() & self._places.keys():
            self._fill(*self._places[index], self._table.parameters[index].grad)
        return self.finish()

    def end_round(self) -> None:
        """Forget this round's gradients; the next backward starts another."""
        self._arrived: dict[int, tuple[Tensor, int]] = {}  # parameter -> gradient and its version, as they arrived
        self._left_out = frozenset()
        self._waiting = [self._awaited(bucket) for bucket in self.buckets]
        self._pipeline.reset()
        self._heard = 0
        self._round = None
        self._callback_queued = False

    def _hook_trainable(self) -> None:
        # A parameter that does not require a gradient yet takes no hook, no place in a bucket and no bytes.
        for index in self._unhooked:
            if self._table.parameters[index].requires_grad:
                ArrivalHook(self._on_gradient, index).register(self._table.parameters[index])
        self._unhooked = [index for index in self._unhooked if not self._table.parameters[index].requires_grad]

    def _on_gradient(self, index: int) -> None:
        if self._enabled and all(gate() for gate in self._gates):
            self._arrive(index)
            if not self._callback_queued:
                self._callback_queued = True
                # Twice: a callback queued by a callback runs after those that others, DDP for one, queued meanwhile.
                at_backward_end(lambda: at_backward_end(self._on_backward_end))

    def _on_backward_end(self) -> None:
        # A backward that leaves parameters without a gradient may be a part of a larger one (reentrant checkpointing,
        # or one loss of several over disjoint parameters): step() decides about those.
        self._callback_queued = False
        whole = all(
            index in self._arrived or index in self._usually_absent or index in self._left_out
            for index, parameter in enumerate(self._table.parameters)
            if parameter.requires_grad
        )
        if whole and not self.finish().finite:
            self._poison()
        # DDP writes gradients back, unchanged, after they have arrived here.
        for index in self._arrived:
            self._arrived[index] = self._seal(index)

    def _poison(self) -> None:
        """Make this rank's gradients non-finite, where another rank's are: a GradScaler must see it on every rank."""
        for index in self._arrived:
            gradient = self._table.parameters[index].grad
            if gradient is not None and gradient.numel():
                gradient[(0,) * gradient.dim()] = float("inf")
                return

    def _seal(self, index: int) -> tuple[Tensor, int]:
        gradient = self._table.parameters[index].grad
        assert gradient is not None
        return gradient, gradient._version

    def _arrive(self, index: int) -> None:
        gradient = self._table.parameters[index].grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ValueError(
                f"{self._table.name(index)} has a sparse gradient, which cannot be sent: build the embedding "
                "with sparse=False, or leave it to torch.optim.SparseAdam in a second optimizer"
            )
        if index in self._arrived:
            raise RuntimeError(
                f"a second backward() before step() reached {self._table.name(index)} whose gradient has left already. "
                "To accumulate gradients, put every backward() but the last inside `with optimizer.no_sync():`; to "
                "drop the first one, call optimizer.zero_grad()"
            )
        if self._round is not None:
            raise RuntimeError(
                f"{self._table.name(index)} got its gradient in a backward() of its own, after the step's gradients "
                "had left without it, as in the step before. Put every backward() but the last inside "
                "`with optimizer.no_sync():`"
            )
        if index in self._left_out:
            raise RuntimeError(
                f"{self._table.name(index)} was left out of this step, but this backward() reached it: leave out only "
                "what no rank's backward() reaches"
            )
        self._arrived[index] = self._seal(index)
        if index in self._places:
            bucket, slot = self._places[index]
            self._fill(bucket, slot, gradient)
            self._waiting[bucket.index] -= 1
            while (next_one := self._pipeline.started) < len(self.buckets) and not self._waiting[next_one]:
                self._launch(self.buckets[next_one])

    def _awaited(self, bucket: Bucket) -> int:
        return sum(slot.parameter not in self._left_out for slot in bucket.layout.slots)

    def _speaks(self, bucket: Bucket) -> bool:
        return not bucket.quiet and self._awaited(bucket) > 0

    def _launch(self, bucket: Bucket) -> None:
        if not self._awaited(bucket):
            self._pipeline.follow(NothingToSend())
            return
        missing = [slot for slot in bucket.layout.slots if slot.parameter not in self._arrived]
        for slot in missing:
            self._fill(bucket, slot, None)
        if bucket.quiet:
            self._pipeline.follow(NothingToSend())
            return
        unexpected = any(slot.parameter not in self._left_out for slot in missing)
        flags = Flags.INCOMPLETE if unexpected else Flags.NONE
        if any(self._table.parameters[index].requires_grad for index in self._unplaced):
            flags |= Flags.UNPLACED
        bucket.exchange.start(self.step, flags)
        self._pipeline.follow(bucket.exchange)

    def _exchange_rest(self) -> list[Outcome]:
        """Launch the buckets that have not left, wait for all, and return the outcomes of those not heard of yet."""
        for bucket in self.buckets[self._pipeline.started :]:
            self._launch(bucket)
        self._pipeline.drain()
        outcomes = [bucket.exchange.outcome() for bucket in self.buckets[self._heard :] if self._speaks(bucket)]
        self._heard = len(self.buckets)
        return outcomes

    def _take_late_gradients(self) -> None:
        # Gradients that no hook announced in this round: accumulated in no_sync, or set by hand.
        for index, parameter in enumerate(self._table.parameters):
            if index in self._left_out and not has_gradient(parameter):
                continue  # zeros that DDP has put there
            if index not in self._arrived and parameter.grad is not None:
                self._arrive(index)

    def _place_in_order_of_arrival(self) -> None:
        unplaced = [index for index in self._unplaced if self._table.parameters[index].requires_grad]
        arrived = [index for index in self._arrived if index in set(unplaced)]
        order = arrived + [index for index in reversed(unplaced) if index not in self._arrived]
        raw = self._comm.all_gather_bytes(torch.tensor(order, dtype=torch.int64).numpy().tobytes())
        orders = [torch.frombuffer(bytearray(one), dtype=torch.int64).tolist() if one else [] for one in raw]
        for rank, other in enumerate(orders):
            differing = sorted(set(other) ^ set(orders[0]))
            if differing:
                raise ValueError(
                    f"rank {rank} and rank 0 disagree on whether {self._table.name(differing[0])} requires a gradient: "
                    "set requires_grad alike on every rank"
                )
        if not orders[0]:
            return
        self._unplaced = [index for index in self._unplaced if index not in set(unplaced)]
        for bucket in self._add_buckets(self._partition(orders[0])):
            for slot in bucket.layout.slots:
                if slot.parameter in self._arrived:
                    self._fill(bucket, slot, self._table.parameters[slot.parameter].grad)

    def _partition(self, order: Sequence[int], *, whole: bool = False) -> list[BucketLayout]:
        """Buckets of the parameters `order`, of which no `bucket_bytes` are made where they stay `whole`."""
        numels = [parameter.numel() for parameter in self._table.parameters]
        numel = sum(numels[parameter] for parameter in order)
        return partition(
            numels,
            order,
            world_size=self._comm.size,
            block_size=self._block_size,
            bucket_numel=numel + 1 if whole else bucket_numel(self._bucket_bytes, numel, _FP32_BYTES),
        )

    def _add_buckets(self, layouts: Sequence[BucketLayout]) -> list[Bucket]:
        buckets = self._place(layouts, len(self.buckets))
        self.buckets += buckets
        for bucket in buckets:
            self._waiting.append(len(bucket.layout.slots))
            self._places |= {slot.parameter: (bucket, slot) for slot in bucket.layout.slots}
        return buckets

    def _find_guilty(self) -> tuple[int, ...]:
        mine = any(
            parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
            for parameter in self._table.parameters
        )
        of_rank = self._comm.all_gather_bytes(bytes([mine]))
        return tuple(rank for rank, answer in enumerate(of_rank) if answer[0])

    def _agree_on_absent(self) -> frozenset[int]:
        present = bytes(index in self._arrived for index in range(len(self._table.parameters)))
        of_rank = self._comm.all_gather_bytes(present)
        for index in range(len(self._table.parameters)):
            having = [rank for rank, mask in enumerate(of_rank) if mask[index]]
            if having and len(having) < self._comm.size:
                lacking = sorted(set(range(self._comm.size)) - set(having))
                raise ValueError(
                    f"{self._table.name(index)} got a gradient on ranks {having} but none on ranks {lacking}: every "
                    "rank must use the same parameters in a step. Nothing was applied"
                )
        return frozenset(index for index in range(len(self._table.parameters)) if not of_rank[0][index])
