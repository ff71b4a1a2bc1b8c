"""What follows from what elastic workers say of themselves at a meeting: whose state counts, who lacks what of it and
gets it, and in which order they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

from thinwire.comm.elastic import MembershipError
from thinwire.comm.membership import Record
from thinwire.comm.node_membership import WorkerGroup
from thinwire.optim.diloco.kept_momentum import KeptMomentum
from thinwire.optim.diloco.outer_weights import OuterWeights

__all__ = ["Plan", "Standing", "hand_over"]


@dataclass(frozen=True)
class Standing:
    """Where a worker is.

    `taken`: outer steps taken. `arrived`: how many after these are here, and not taken in yet. `steps`: its own.
    `dropped`: the last outer steps that were not taken as weights were not finite. `place`: its number among all.
    `checkpoint`: what tells the run apart from which the job was resumed, empty where it was not. `resumes`: how many
    workers that run had, on a worker that has just loaded its part; else 0. `claimed`: samples that run had given out.
    """

    taken: int = 0
    arrived: int = 0
    steps: int = 0
    dropped: list[int] = field(default_factory=list)
    place: int = 0
    checkpoint: str = ""
    resumes: int = 0
    claimed: int = 0

    def record(self) -> Record:
        """As a meeting takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """How a generation's workers go on, by their numbers in the generation.

    `standings`: None of those that have nothing of the job. `order`: in which they go on. `source`: who hands over what
    the workers `lacking` lack. `as_saved`: all of a saved run's workers have come back, with the same outer steps under
    way; else what has arrived on a worker counts as taken, and has to be taken in first.
    """

    standings: tuple[Standing | None, ...]
    order: tuple[int, ...]
    source: int
    lacking: tuple[int, ...]
    as_saved: bool

    @classmethod
    def of(cls, records: Sequence[Record | None]) -> Plan:
        """From what all have said. Raises MembershipError where they have loaded what was not saved at once."""
        said = [None if record is None else Standing(**record) for record in records]
        checkpoints = sorted({one.checkpoint for one in said if one is not None and one.checkpoint})
        if len(checkpoints) > 1:
            raise MembershipError(
                f"workers have loaded states of different runs or steps: {' and '.join(checkpoints)}. Load what all of "
                "a job's workers saved after the same step, in a new job"
            )
        # What was loaded counts, and what began before somebody loaded it does not.
        kept = [
            one if not checkpoints or (one is not None and one.checkpoint == checkpoints[0]) else None for one in said
        ]
        resuming = [one.place for one in kept if one is not None and one.resumes]
        if len(set(resuming)) < len(resuming):
            raise MembershipError(
                f"workers have loaded the states of workers {sorted(resuming)}: each loads a file of its own, and a "
                "worker without one loads nothing"
            )
        as_saved = all(one is not None and one.resumes == len(kept) and one.taken == kept[0].taken for one in kept)  # type: ignore[union-attr]
        if not as_saved:
            kept = [None if one is None else replace(one, taken=one.taken + one.arrived, arrived=0) for one in kept]
        taken = [-1 if one is None else one.taken for one in kept]
        source = max(range(len(kept)), key=lambda number: (taken[number], -number))
        lacking = tuple(number for number in range(len(kept)) if number != source and taken[number] < taken[source])
        if taken[source] < 0:  # a job's beginning
            lacking = tuple(range(1, len(kept)))
        order = sorted(range(len(kept)), key=lambda number: (taken[number] < 0, _place(kept[number]), number))
        return cls(tuple(kept), tuple(order), source, lacking, as_saved)

    @property
    def top(self) -> int:
        """Outer steps that all have taken in the end."""
        return self.of_source.taken

    @property
    def of_source(self) -> Standing:
        """Where the source is."""
        return self.standings[self.source] or Standing()

    @property
    def somebody_begins(self) -> bool:
        """Whether a worker that lacks something has nothing of the job."""
        return any(self.standings[number] is None for number in self.lacking)

    @property
    def first_lacked(self) -> int:
        """The first outer step that one of those lacks who have something of the job."""
        return min((one.taken for one in map(self.standings.__getitem__, self.lacking) if one), default=self.top)

    @property
    def claimed(self) -> int:
        """Samples that the run had given out from which this one was resumed, as far as anybody knows."""
        return max((one.claimed for one in self.standings if one is not None), default=0)

    @property
    def steps(self) -> int:
        """At which step a worker begins that has nothing of the job."""
        return min((one.steps for one in self.standings if one is not None), default=0)


def hand_over(
    group: WorkerGroup, plan: Plan, weights: OuterWeights, momentum: KeptMomentum, fragments: int
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The source's outer weights, of the fragments that somebody lacks, and its momentum where somebody has nothing.
    Collective of the source and of those who lack something."""
    first = plan.top - fragments if plan.somebody_begins else plan.first_lacked
    outer: dict[int, Tensor] = {}
    for fragment in sorted({number % fragments for number in range(first, plan.top)}):
        outer[fragment] = weights.outer(fragment).clone()
        group.broadcast(outer[fragment])
    copies = [momentum.of(fragment).clone() for fragment in range(fragments)] if plan.somebody_begins else []
    for one in copies:
        group.broadcast(one, inside=False)
    group.barrier()  # all have all of it before its sender may go
    return outer, copies


def _place(standing: Standing | None) -> int:
    return 0 if standing is None else standing.place
