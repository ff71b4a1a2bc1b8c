"""The time that failing nodes cost: with elastic steps, which go on without them, and with checkpoints, from which all
start again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.plan.recommendation import Plan
from thinwire.plan.units import seconds_in_words

_STATE_BYTES = 12  # a parameter's weight and two moments in fp32: what is saved, and what a newcomer gets
_SILENCE = 10.0  # seconds after which thinwire.Elastic takes a worker for dead
_STEPS_LOST = 1  # that send again what a dead worker was missed in, at most
STORAGE_RATE = 1e9  # bytes a second of what checkpoints are written to, where no disk is named
RESTART = 120.0  # seconds until processes are up again, without the loading


@dataclass(frozen=True)
class Failures:
    """Shares of the time that are lost.

    Attributes:
        every: seconds between two failures somewhere in the job, on average.
        elastic: with 1-bit optimizers at stage 0 that are `elastic`: a death is noticed, a step sent again, and
            others wait while one that joins gets weights and state over its link.
        restarting: with checkpoints as often as is best: saving, half an interval lost a failure, and starting again.
        interval: seconds between these checkpoints (Young, 1974: the square root of 2 x saving x every).
    """

    every: float
    elastic: float
    restarting: float
    interval: float

    @classmethod
    def of(cls, plan: Plan, of_a_node: float) -> Failures:
        """For nodes that fail every `of_a_node` seconds, each by itself."""
        cluster, state = plan.cluster, _STATE_BYTES * plan.workload.model.parameters
        every = of_a_node / cluster.nodes
        step = 0.0 if plan.best is None else plan.best.step_seconds
        joining = state / cluster.between.speed.bytes_per_second if cluster.nodes > 1 else 0.0
        host = cluster.host
        moving = state / (host.disk_rate if host is not None and host.disk else STORAGE_RATE)
        interval = math.sqrt(2 * moving * every)
        restarting = moving / interval + (interval / 2 + RESTART + moving) / every
        elastic = (_SILENCE + _STEPS_LOST * step + joining) / every
        return cls(every, min(elastic, 1.0), min(restarting, 1.0), interval)

    def in_words(self) -> str:
        """A line of an answer."""
        every, interval = map(seconds_in_words, (self.every, self.interval))
        elastic, restarting = 100 * self.elastic, 100 * self.restarting
        return (
            f"a node every {every}: elastic 1-bit steps lose {elastic:.2g}% of the time, starting again from "
            f"checkpoints every {interval} {restarting:.2g}%"
        )
