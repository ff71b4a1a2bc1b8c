"""DiLoCo as a torch optimizer around any other; and the sampler of elastic jobs, whose number of workers is not
known."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks, Nodes, agree_on_nodes, check_same_on_every_rank, on_every_rank
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import Backend, join
from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.packet_layout import DEFAULT_BLOCK_SIZE, CodecName
from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.diloco.fragments import Fragment, Guard, Timetable
from thinwire.optim.diloco.home import LocalHome
from thinwire.optim.diloco.options import (
    COMMUNICATES,
    check_options,
    cut_trained,
    for_interval,
    listed,
    make_outer_optimizer,
    names_of,
    overlap_and_mix,
    tensors_in,
)
from thinwire.optim.diloco.outer import OuterStep, make_outer_step
from thinwire.optim.diloco.touches import Touches
from thinwire.optim.diloco.worker import NodeWorker, Worker
from thinwire.optim.elastic_job import enter_elastic_job, own_communicator
from thinwire.optim.muon import mark_matrices
from thinwire.optim.optimizer import SavingsReport
from thinwire.zero import ShardedOptimizer
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_parameters, check_same_kind
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

_PLAIN = (int, float, str, tuple, type(None))


class DiLoCo(SynchronizedOptimizer):
    """Local steps of any optimizer, and every now and then an outer step on the mean of what the workers did.

    DiLoCo (Douillard et al. 2023, arXiv 2311.08105), in fragments that overlap with training (Streaming DiLoCo,
    Douillard et al. 2025, arXiv 2501.18512), through a codec with error feedback on both legs, the outer momentum
    sharded over the ranks. Gradients never leave a worker, so that clipping, GradScaler and accumulation are the inner
    optimizer's own; a step in which a worker's gradient is not finite is skipped by that worker alone.

        opt = thinwire.DiLoCo(model.parameters(), torch.optim.AdamW, lr=4e-4, every=30)

    Every rank must call `step` equally often. Between outer steps ranks hold weights of their own: `eval()` shows the
    weights that all have in common, `train()` this worker's again, and `synchronize()` ends training with all alike.

    Args:
        params: parameters or groups, as the inner optimizer takes them, named or not; rank 0's values are given to all.
        inner_class: any torch.optim class, `thinwire.optim.Muon` or another one of ours, or a function that builds an
            optimizer from groups; one that does not communicate by itself. fp32 parameters are stepped as they are;
            16-bit ones get fp32 master weights.
        every: H, steps from one outer step of a fragment to its next.
        outer_lr: rate of the outer SGD. By default what scaling-law studies found best (arXiv 2503.09799, figure 7),
            by the number of workers: 0.6, beyond four of them 0.8; for one worker of a large model 0.4. "auto" holds
            η (1 + μ / (1 - μ rho)) (1 - mix) at 1, with rho the correlation of a fragment's successive outer gradients.
        outer_momentum: its Nesterov momentum.
        fragments: into how many the model is cut; "auto" is one for every three layers that the parameters' names show.
            Layer i is in fragment i modulo their number; embeddings and what else is in no layer fills them up to equal
            sizes. They leave at equal distances in time.
        overlap: τ, steps that a fragment is in flight while training goes on; by default 1, if `every` leaves room.
        mix: how much of a worker's own weights remains in them when an outer step is taken in, or "carry", which keeps
            what the worker has done since the fragment left (LOSCAR-SGD), and nothing else; by default 0.5 with
            overlap and 0 without.
        codec: what outer gradients go through: "none", "bf16", "fp16", "int8", "fp8", "int4", which lost nothing in
            published studies, "stat2" (2 bits), which cost about 1%, or "sign1", which does not hold. One worker sends
            nothing.
        block_size: elements that share one scale; of int4 256 at most.
        nodes: workers of several ranks, which average gradients exactly among themselves: "auto" makes each host of
            several ranks a worker where there are several hosts, "flat" every rank; else the node of each rank.
        stage: inside such a node, 0 keeps all state on every rank, 1 and 2 shard it (ZeRO).
        max_norm: a worker's gradients are clipped to this 2-norm; 0 and None do not clip.
        comm, comm_backend_name: as for every optimizer of ours; with `elastic` the ranks of this worker.
        named_parameters: names, where `params` has none: for fragments, checkpoints and errors.
        param_dtype: torch.bfloat16 or torch.float16 lays fp32 parameters out in it, with fp32 master weights.
        inside: of ShardedOptimizer, which averages gradients inside a worker and keeps master weights: `bucket_bytes`
            and `averaging`. A worker that is one rank with fp32 parameters does neither.
        share: kinds of the inner optimizer's state that workers average too, and each with every how manieth outer step
            of the weights, as {"exp_avg": 1, "exp_avg_sq": 6}, or {"momentum_buffer": 1} of Muon. They go through
            `codec`, those without negative values through bf16, and each worker goes on from the mean.
        touch: what part of fp32 weights to average over workers after every step too, while the next one is computed,
            as 0.03, in random blocks by a common seed (SPARTA, EXO Labs 2025), through `codec`, or "int4" in the place
            of "stat2" and "sign1".
        guard: leave workers out of an outer step whose outer gradient of a fragment is an outlier, by so many standard
            deviations of the norms so far, as 3, and twice their mean (EDiT, arXiv 2412.07210), by its direction, or as
            it is not finite; where all are, no outer step is taken. Those left out go on from the outer weights.
        tokens: that a step of this worker reads, where workers differ in that: each then weighs by their square, as all
            take equally many steps (Decoupled DiLoCo, arXiv 2604.21428).
        elastic: workers that come and go while the job runs, over Gloo: each one process or, with `comm`, its ranks, as
            of a whole node.
        options: for the inner class: lr, betas, ... QHAdamW has a beta by `every` where none are given.

    `workers`: how many there are, of an elastic job since the last outer step. `inner`: the inner optimizer.
    `outer_lr`, `outer_momentum`: may be set, on every rank alike; a rate ends "auto". `keeps_gradients`: whether
    gradients stay in `.grad` until `step`, for anybody to clip, as where a worker is one rank with fp32 parameters.
    `dropped_outer_steps`: outer steps that were not taken, as some worker's weights were not finite, or all were
    outliers. `left_out`: outer gradients that a guard has left out.

    Raises ValueError or TypeError, on every rank, for parameters or options that cannot work.
    """

    steps_alone = True
    _home: LocalHome

    _savings: SavingsReport | None = None

    def __init__(
        self,
        params: ParamsT,
        inner_class: Callable[..., torch.optim.Optimizer],
        *,
        every: int = 30,
        outer_lr: float | Literal["auto"] | None = None,
        outer_momentum: float = 0.9,
        fragments: int | Literal["auto"] = "auto",
        overlap: int | None = None,
        mix: float | Literal["carry"] | None = None,
        codec: CodecName = "int4",
        block_size: int = DEFAULT_BLOCK_SIZE,
        nodes: Nodes = "auto",
        stage: int = 0,
        max_norm: float | None = 0.0,
        comm: Communicator | None = None,
        mesh: DeviceMesh | None = None,
        comm_backend_name: Backend | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        inside: Mapping[str, Any] | None = None,
        share: dict[str, int] | None = None,
        touch: float | None = None,
        guard: float | None = None,
        tokens: float | None = None,
        elastic: Elastic | None = None,
        **options: Any,
    ) -> None:
        if elastic is not None:
            comm, nodes = own_communicator(elastic, comm, comm_backend_name, nodes, stage), "flat"
        self.comm = join(comm, mesh, comm_backend_name)
        self.stage, self.comes_and_goes, self.max_norm = stage, elastic is not None, max_norm or 0.0
        plan = {"every": every, "fragments": fragments, "stage": stage, **overlap_and_mix(every, overlap, mix)}
        wire = {"codec": codec, "block_size": block_size, "max_norm": self.max_norm, "guard": guard, "tokens": tokens}
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "share": share or {}, "touch": touch}

        def check() -> Any:
            check_options(inner_class, plan | wire | outer | {"nodes": nodes}, elastic)
            check_parameters(tensors_in(given := listed(params)), type(self).__name__, whole=True)
            return given

        given = on_every_rank(self.comm, check, "build its optimizer", (ValueError, TypeError))
        named_parameters = None if named_parameters is None else list(named_parameters)
        check_same_kind(self.comm, type(self).__name__, stage)
        by = nodes if isinstance(nodes, str) else list(nodes)
        settings = {**plan, **wire, **outer, "nodes": by, "tokens": tokens is not None}
        check_same_on_every_rank(self.comm, tensors_in(given), [], settings)
        broadcast_from_rank_0(self.comm, tensors_in(given))
        links = _find_nodes(self.comm, nodes)
        node = self.comm.duplicate() if elastic is not None and self.comm.size > 1 else getattr(links, "inside", None)
        options = for_interval(inner_class, every) | options
        worker = self._make_worker(given, inner_class, node, named_parameters, param_dtype, options, inside or {})
        self._become(worker)
        names = names_of(worker.optimizer.param_groups, worker.parameters, named_parameters)
        cuts = partial(cut_trained, worker.parameters, names, fragments)
        cut = on_every_rank(self.comm, cuts, "cut its fragments", (ValueError,))
        workers = elastic.workers if elastic is not None else self.comm.size if links is None else links.num_nodes
        self.outer = make_outer_optimizer(settings, workers, cut)
        self._move_in(self._make_home(worker, names, cut, links, elastic, settings, tokens), worker.times_mean)

    @property
    def workers(self) -> int:
        """How many workers there are; of an elastic job, since the last outer step."""
        return self._home.workers

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of this worker's own steps; its groups are this optimizer's."""
        return self._home.worker.optimizer

    @property
    def outer_lr(self) -> float:
        """Rate of the outer steps, with "auto" the mean of what fragments have now; may be set, on every rank alike."""
        if not self.outer.correlations:
            return self.outer.lr
        return statistics.fmean(self.outer.of(number, "").lr for number in range(self.fragments))

    @outer_lr.setter
    def outer_lr(self, lr: float) -> None:
        self.outer.lr = lr
        self.outer.correlations.clear()

    @property
    def outer_momentum(self) -> float:
        """Nesterov momentum of the outer steps; may be set, on every rank alike."""
        return self.outer.momentum

    @outer_momentum.setter
    def outer_momentum(self, momentum: float) -> None:
        self.outer.momentum = momentum

    @property
    def fragments(self) -> int:
        """Into how many the model is cut."""
        return self._home._timetable.fragments

    @property
    def dropped_outer_steps(self) -> int:
        """Outer steps of a fragment that were not taken, as some worker's weights were not finite."""
        return self._home.dropped_outer_steps

    @property
    def left_out(self) -> int:
        """Outer gradients of workers that `guard` has left out of outer steps."""
        return self._home.left_out

    def synchronize(self) -> None:
        """Take in what is in flight, and an outer step of every fragment, so that all ranks hold the outer weights: at
        the end of training, or before anybody changes weights. Collective; the same as `synchronize_weights`."""
        self.synchronize_weights()

    @override
    def close(self) -> None:
        if self._savings is not None:
            self._savings.end()
        super().close()

    def _make_worker(
        self,
        given: ParamsT,
        inner_class: Callable[..., torch.optim.Optimizer],
        node: Communicator | None,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        param_dtype: torch.dtype | None,
        options: dict[str, Any],
        inside_options: Mapping[str, Any],
    ) -> Worker:
        single = param_dtype in (None, torch.float32) and all(one.dtype == torch.float32 for one in tensors_in(given))
        if node is None and single and not getattr(inner_class, "whole_parameters", False):
            if self.stage:
                raise ValueError(
                    f"stage={self.stage} shards state among the ranks of a worker, and every worker is one rank here: "
                    "use stage=0, or say with nodes= which ranks are a worker"
                )

            def make() -> torch.optim.Optimizer:
                inner = inner_class(given, **options)
                if isinstance(inner, SynchronizedOptimizer) or type(inner).__module__.startswith("torch.distributed"):
                    raise ValueError(f"{type(inner).__name__} {COMMUNICATES}")
                return inner

            inner = on_every_rank(self.comm, make, "build its inner optimizer", (ValueError, TypeError))
            return Worker(inner, self.comm, self.max_norm)
        node = self.comm.split(self.comm.rank) if node is None else node
        assert node is not None
        if hasattr(inner_class, "arrange"):  # Muon, which tells matrices by their names, and may have got none
            mark_matrices(named_parameters or ())
        sharded = ShardedOptimizer(
            given,
            inner_class,
            stage=self.stage,
            comm=node,
            named_parameters=named_parameters,
            param_dtype=param_dtype,
            max_norm=self.max_norm,
            **inside_options,
            **options,
        )
        return NodeWorker(sharded, node)

    def _make_home(
        self,
        worker: Worker,
        names: Sequence[str],
        cut: Sequence[Fragment],
        links: NodeLinks | None,
        elastic: Elastic | None,
        settings: dict[str, Any],
        tokens: float | None,
    ) -> LocalHome:
        codec, positive_codec = make_codec(settings["codec"], settings["block_size"]), make_codec("bf16")

        def codec_of(positive: bool) -> Codec:
            # Blocks that share a scale would round the small ones of what is only positive, as a variance, to 0.
            return positive_codec if positive and settings["codec"] != "none" else codec

        timetable = Timetable(settings["every"], settings["overlap"], len(cut))
        ranks = 1 if links is None else links.inside.size
        mix, guard, weight = settings["mix"], settings["guard"], float(ranks) if tokens is None else float(tokens) ** 2

        def make_guard(numel: int) -> Guard | None:
            return None if guard is None and tokens is None else Guard(numel, guard, weight)

        if elastic is not None:
            job = {**settings, "lr": self.outer.lr, "momentum": self.outer.momentum}
            if share := settings["share"]:  # in this order; and state is averaged only with such as is made alike
                plain = {name: one for name, one in self.defaults.items() if name != "lr" and isinstance(one, _PLAIN)}
                job |= {"share": list(share.items()), "inner optimizer": [self._saved_name, plain]}
            membership = enter_elastic_job(elastic, self.comm, job, names, worker.parameters)
            of_job = self.comm, membership, worker, names, cut, codec_of, timetable, self.outer, mix
            return ElasticHome(*of_job, share, make_guard)
        device, exchange = worker.parameters[0].device, self.comm.duplicate()

        def make_step(fragment: Fragment, number: int, positive: bool) -> OuterStep:
            guard = make_guard(fragment.numel)
            return make_outer_step(exchange, links, fragment, codec_of(positive), number, device, guard)

        of_all = links, worker, names, cut, timetable, self.outer, mix
        home = LocalHome(self.comm, exchange, *of_all, settings["share"], make_step)
        if settings["touch"] is not None:
            home.touches = self._make_touches(settings["touch"], settings["codec"], worker, home, links)
        sends, pace = home.uncompressed_step_bytes, f"its workers talk every {settings['every']} steps"
        self._savings = SavingsReport(self, self.comm, recipe=None, uncompressed=sends, otherwise=pace)
        return home

    def _make_touches(
        self, part: float, codec: CodecName, worker: Worker, home: LocalHome, links: NodeLinks | None
    ) -> Touches:
        if home.workers == 1:
            raise ValueError(f"touch={part:g} averages weights over workers, and there is one: leave it out")
        if any(one.dtype != torch.float32 for one in worker.parameters):
            raise ValueError(f"touch={part:g} averages fp32 weights, and parameters here are of 16 bits: leave it out")
        worker_of = range(self.comm.size) if links is None else links.groups.node_of
        return Touches(part, self.comm.duplicate(), list(worker_of), home.weights, codec)

    def _become(self, worker: Worker) -> None:
        """Show the inner optimizer's groups and state as this optimizer's: schedulers then set its rates."""
        inner = worker.optimizer
        torch.optim.Optimizer.__init__(self, [torch.zeros(1)], inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        name = inner._saved_name if isinstance(inner, ShardedOptimizer) else type(inner).__name__
        self._saved_name = f"DiLoCo of {name}"
        self.keeps_gradients = not isinstance(worker, NodeWorker)

    def _take_scale(self) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and grad_scale is None and isinstance(self.inner, ShardedOptimizer):
            super()._take_scale()
        self._home.overflows = found is not None and bool(found)
        if found is not None:
            self.loss_scale = 1.0 if grad_scale is None else float(grad_scale)


def _find_nodes(comm: Communicator, nodes: Nodes) -> NodeLinks | None:
    """The workers of several ranks; None where every rank is one. Collective."""
    if nodes == "flat":
        return None
    groups = agree_on_nodes(comm, None if isinstance(nodes, str) else nodes)
    chosen = groups.hierarchical if isinstance(nodes, str) else len(groups.members) < comm.size
    return NodeLinks(comm, groups) if chosen else None
