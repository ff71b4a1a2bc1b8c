"""DiLoCo against its published algorithms in float64 and its inner optimizer; how a model is cut, when its fragments
leave, and what is refused."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.diloco.tower import (
    NUMEL,
    Tower,
    flat,
    follows_the_published_algorithms,
    long_run,
    loss_of,
    make,
    outer_weights,
    outer_weights_agree,
    places_of,
    relative_error,
    spoil,
    streaming,
    train,
    trained,
)
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, Elastic, threads
from thinwire.optim.diloco.fragments import (
    Correlation,
    OuterSettings,
    Timetable,
    auto_fragments,
    cut_fragments,
    layers_of,
)

QHADAMW = partial(thinwire.optim.QHAdamW, betas=(0.98, 0.999))


@pytest.mark.parametrize(
    ("workers", "momentum", "fragments", "overlap", "mix"),
    [
        *((workers, momentum, 1, 0, 0.0) for workers, momentum in ((1, 0.9), (2, 0.0), (3, 0.9))),
        *((workers, 0.9, 2, overlap, mix) for workers, overlap, mix in ((1, 1, 0.5), (3, 2, 0.25), (4, 5, 0.0))),
        *((workers, 0.5, 2, workers, "carry") for workers in (1, 2, 3, 4)),
    ],
)
def test_it_is_algorithm_1_and_with_fragments_under_way_algorithm_2(
    workers: int, momentum: float, fragments: int, overlap: int, mix: float | str
) -> None:
    threads.run(lambda comm: follows_the_published_algorithms(comm, momentum, fragments, overlap, mix), workers)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        *((workers, (0.9, 2, 2, 0.5)) for workers in (1, 3)),
        *((workers, (0.9, 1, 0, 0.0)) for workers in (2, 4)),
        *((workers, (0.0, 1, 1, 0.5)) for workers in (1, 2)),
        *((workers, (0.9, 2, 3, "carry")) for workers in (3, 4)),
    ],
)
def test_an_outer_rate_follows_the_correlation_of_outer_gradients(workers: int, options: tuple[Any, ...]) -> None:
    threads.run(lambda comm: follows_the_published_algorithms(comm, *options, outer_lr="auto"), workers)


def test_the_correlation_of_many_values_is_that_of_an_even_sample_of_them() -> None:
    """Of rows of which one column in 1024 differs, too."""
    rows, momentum, lr = 512, 0.9, 0.4
    correlation, generator = Correlation(rows * 1024), torch.Generator().manual_seed(1)
    gradient, velocity, gradients = torch.zeros(rows, 1024), torch.zeros(rows, 1024), list[Tensor]()
    for _ in range(12):
        gradient = 0.6 * gradient + torch.randn(rows, 1024, generator=generator)
        gradient[:, 0] = 100.0
        velocity = momentum * velocity + gradient
        correlation.follow((lr * (gradient + momentum * velocity)).view(-1), OuterSettings(lr, momentum))
        gradients.append(gradient.view(-1).double().clone())
    assert correlation.gain(momentum) == pytest.approx(long_run(gradients, momentum), rel=0.05)
    assert correlation.gain(0.0) == 1


@pytest.mark.parametrize(
    "inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, thinwire.optim.Muon, QHADAMW]
)
def test_one_worker_that_syncs_at_every_step_is_the_inner_optimizer(inner: Any) -> None:
    def body(comm: Communicator) -> Tensor:
        model, _ = trained(comm, 40, inner, lr=0.01, every=1, outer_lr=1.0, outer_momentum=0.0)
        return flat(model.parameters())

    plain = Tower()
    optimizer = inner(plain.parameters(), lr=0.01)
    for step in range(1, 41):
        optimizer.zero_grad()
        loss_of(plain, 0, step).backward()
        optimizer.step()
    assert torch.equal(threads.run(body, 1)[0], flat(plain.parameters()))


@pytest.mark.parametrize(
    ("workers", "inner", "share"),
    [
        (1, torch.optim.AdamW, {"exp_avg": 1, "exp_avg_sq": 2}),
        (4, torch.optim.AdamW, {"exp_avg": 1, "exp_avg_sq": 2}),
        (2, thinwire.optim.Muon, {"momentum_buffer": 1, "exp_avg": 3}),
        (3, QHADAMW, {"exp_avg": 1}),
    ],
)
def test_shared_state_is_averaged_as_weights_are(workers: int, inner: Any, share: dict[str, int]) -> None:
    """In float64, 5 outer steps."""
    mean = {"every": 4, "overlap": 0, "mix": 0.0, "outer_lr": 1.0}

    def body(comm: Communicator) -> Tensor:
        model, _ = trained(comm, 20, inner, lr=0.01, outer_momentum=0.0, share=share, fragments=1, **mean)
        return flat(model.parameters())

    found = threads.run(body, workers)
    options: dict[str, Any] = {**mean, "momentum": 0.0}
    everything = [torch.arange(NUMEL)]
    named = lambda weights: inner(list(weights), lr=0.01)  # noqa: E731
    expected, _ = streaming(Tower(), workers, 20, named, loss_of, everything, share=share, **options)
    apart, _ = streaming(Tower(), workers, 20, named, loss_of, everything, **options)
    assert all(relative_error(one, expected) < 1e-6 for one in found)
    assert workers == 1 or relative_error(apart, expected) > 1e-3


# By worker and step, of an outer step
SPOILS: dict[str, dict[tuple[int, int], float]] = {
    "none": {},
    "scaled": {(0, 8): 1e3, (0, 14): -1e3, (1, 16): 40.0},
    "flipped": {(0, 4): -1.0, (0, 6): -1.0},
    "not finite": {(0, 8): float("nan"), (1, 10): float("inf")},
    "all": {(worker, step): 50.0 for worker in range(4) for step in (8, 12, 14)},
}


@pytest.mark.parametrize(("codec", "error"), [("none", 0.0), ("int8", 1 / 127), ("int4", 1 / 7), ("stat2", 1 / 7)])
@pytest.mark.parametrize(("workers", "nodes"), [(2, None), (3, None), (3, [0, 1, 1])])
def test_touched_weights_become_the_mean_of_what_they_were_a_step_before(
    workers: int, nodes: list[int] | None, codec: str, error: float
) -> None:
    """Each once in as many steps as `touch` takes for all. What a codec loses of the way from the outer weights, which
    are zero here, at most half of `error` times its largest in both directions, stays where it is."""
    turns, numel = 9, 64 * 63 + 64

    def body(comm: Communicator) -> list[Tensor]:
        model = nn.Linear(63, 64).requires_grad_(True)
        worker = comm.rank if nodes is None else nodes[comm.rank]
        draws, found = torch.Generator().manual_seed(worker), [torch.zeros(numel)]
        for one in model.parameters():
            one.data.zero_()
        options = {"codec": codec, "touch": 2 / 17, "nodes": "flat" if nodes is None else nodes}
        optimizer = make(comm, model, lr=1.0, every=1000, **options)
        for step in range(2 * turns + 1):
            for one in model.parameters():
                one.grad = torch.randn(one.shape, generator=draws) * (step < turns)
            optimizer.step()
            found.append(flat(model.parameters()).clone())
        return found

    ran = [one for rank, one in enumerate(threads.run(body, workers)) if nodes is None or rank < 2]
    taken = torch.zeros(numel)
    for step in range(turns, 2 * turns):
        before, after = (torch.stack([one[at] for one in ran]).double() for at in (step, step + 1))
        touched = (before != after).any(0)
        taken += touched
        most = error * before.abs().max() + 4e-6
        torch.testing.assert_close(after[:, touched], before.mean(0)[touched].expand(len(ran), -1), rtol=0, atol=most)
        # Of their sum only the second leg loses something.
        torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=most / 2)
    assert bool((taken <= 1).all())
    assert taken.mean() > (0.98 if error < 0.1 else 0.9)  # but for means that are what was there
    assert bool((after.std(0) < max(error, 0.01) * before.abs().max()).all())


@pytest.mark.parametrize(
    ("workers", "kind"),
    [*((3, kind) for kind in SPOILS), (1, "scaled"), (1, "all"), (2, "flipped"), (2, "not finite"), (4, "flipped")],
)
@pytest.mark.filterwarnings("ignore:the outer step")
def test_workers_whose_outer_gradients_are_outliers_are_left_out(workers: int, kind: str) -> None:
    """In float64, 5 outer steps of each of two fragments, of workers that read different numbers of tokens."""
    options: dict[str, Any] = {"every": 4, "overlap": 0, "mix": 0.5, "outer_lr": 0.7, "guard": 3.0}
    tokens = [512.0, 1024.0, 512.0, 768.0][:workers]

    def body(comm: Communicator) -> tuple[Tensor, Tensor, int]:
        model = Tower()
        inner, given = torch.optim.AdamW, {"tokens": tokens[comm.rank], "fragments": 2, "outer_momentum": 0.5}
        optimizer = make(comm, model, inner, lr=0.01, **options, **given)
        spoil(optimizer, comm.rank, SPOILS[kind])
        train(model, optimizer, 1, 20)
        fragments = optimizer._home.fragments
        return places_of(model, fragments), outer_weights(model, optimizer), flat(model.parameters()), optimizer

    ran = threads.run(body, workers)
    outer, replicas = streaming(
        Tower(),
        workers,
        20,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        loss_of,
        ran[0][0],
        momentum=0.5,
        weigh=[one**2 for one in tokens],
        spoils=SPOILS[kind],
        **options,
    )
    for (_, common, own, _), wanted in zip(ran, replicas, strict=True):
        assert torch.equal(common, ran[0][1])
        assert relative_error(common, outer) < 1e-6
        assert relative_error(own, wanted) < 1e-6
    told = SPOILS[kind] if kind != "flipped" or workers > 2 else {}  # of two nobody knows who is right
    least = sum(worker < workers for worker, _ in told)
    assert len({one[3].left_out for one in ran}) == 1
    assert ran[0][3].left_out == least if kind in ("none", "all") else ran[0][3].left_out >= least
    steps = [step for worker, step in told if worker < workers]
    assert ran[0][3].dropped_outer_steps == sum(steps.count(step) == workers for step in set(steps))


class Renaming(torch.optim.SGD):
    """Keeps its momentum under another name from some step on."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        for state in self.state.values() if self.steps >= 7 else ():
            state["velocity"] = state.pop("momentum_buffer")


@pytest.mark.parametrize(
    ("inner", "share", "message"),
    [
        (torch.optim.SGD, {"exp_avg": 1}, "share has 'exp_avg', and the inner optimizer has none"),
        (torch.optim.AdamW, {"exp_avg": 1, "ex_avg": 2}, "'ex_avg', and the inner optimizer has exp_avg, exp_avg_sq"),
        (torch.optim.AdamW, {"step": 1}, "'step', which has no fp32 value for each element"),
        ("apart", {"exp_avg": 1}, "'exp_avg', which worker 1 has of 10 parameters and worker 0 of 12"),
        ("renaming", {"momentum_buffer": 1}, "no longer has one of every parameter|other hyperparameters"),
    ],
)
@on_threads(2)
def test_state_that_cannot_be_shared_is_an_error_on_every_rank(
    comm: Communicator, inner: Any, share: dict[str, int], message: str
) -> None:
    model, options = Tower(), {"share": share, "overlap": 1}
    if inner == "renaming":
        options["momentum"] = 0.9
        inner = Renaming if comm.rank == 1 else torch.optim.SGD
    optimizer = make(comm, model, torch.optim.AdamW if inner == "apart" else inner, **options)
    if inner == "apart" and comm.rank == 1:
        optimizer.register_step_pre_hook(lambda *_: model.last.zero_grad())
    refused((ValueError, CommunicationError), message, train, model, optimizer, 1, 20)


def test_a_quasi_hyperbolic_momentum_outlives_the_interval() -> None:
    comm = threads.single(60.0)
    group = make(comm, Tower(), thinwire.optim.QHAdamW, every=30).param_groups[0]
    assert group["betas"][0] ** 150 == pytest.approx(0.5)
    assert make(comm, Tower(), thinwire.optim.QHAdamW, betas=(0.9, 0.95)).param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("how", ["named", "names beside", "marked"])
@on_threads(1)
def test_muon_inside_knows_an_embedding_by_its_name_or_its_mark(comm: Communicator, how: str) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "hidden": nn.Linear(4, 4, bias=False)})
    named = None if how == "marked" else list(model.named_parameters())
    if how == "marked":
        model["embed"].weight.use_muon = False
    given = named if named and how == "named" else model.parameters()
    optimizer = thinwire.DiLoCo(given, thinwire.optim.Muon, comm=comm, named_parameters=named)
    matrices, rest = optimizer.param_groups
    assert (matrices["use_muon"], matrices["params"]) == (True, [model["hidden"].weight])
    assert (rest["use_muon"], rest["params"]) == (False, [model["embed"].weight])


@pytest.mark.parametrize(("workers", "codec"), [(3, "sign1"), (4, "bf16"), (2, "int4")])
def test_outer_weights_are_the_same_bits_on_every_rank(workers: int, codec: str) -> None:
    threads.run(lambda comm: outer_weights_agree(comm, codec), workers)


# Fragments

BERT = ["embeddings.word.weight", *(f"encoder.layer.{n}.{one}" for n in range(5) for one in ("w", "b")), "head.weight"]


def test_layers_are_the_entries_of_the_largest_numbered_list() -> None:
    assert layers_of(BERT) == [[1 + 2 * n, 2 + 2 * n] for n in range(5)]
    assert layers_of(["a", "b.weight"]) == []
    assert layers_of(["0.weight", "0.bias", "2.weight"]) == [[0, 1], [2]]


def test_layers_are_strided_and_the_rest_fills_up() -> None:
    numels = {0: 1000, **dict.fromkeys(range(1, 11), 50), 11: 13}
    fragments = cut_fragments(BERT, numels, 2)
    sizes = [one.numel for one in fragments]
    assert sum(sizes) == sum(numels.values())
    assert abs(sizes[0] - sizes[1]) <= 1
    assert {piece.parameter for piece in fragments[0].pieces} >= {1, 2, 5, 6, 9, 10}
    assert {piece.parameter for piece in fragments[1].pieces} >= {3, 4, 7, 8}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_element_is_in_one_fragment_once(count: int) -> None:
    numels = {0: 777, **{number: 10 * number + 3 for number in range(1, 11)}, 11: 1}
    fragments = cut_fragments(BERT, numels, count)
    places = sorted(
        (piece.parameter, element)
        for one in fragments
        for piece in one.pieces
        for element in range(piece.start, piece.start + piece.numel)
    )
    assert places == [(number, element) for number, numel in numels.items() for element in range(numel)]
    for one in fragments:
        ends = [0, *itertools.accumulate(piece.numel for piece in one.pieces)]
        assert [piece.offset for piece in one.pieces] == ends[:-1]


def test_frozen_layers_are_none() -> None:
    refused(ValueError, "fragments=3 for 2 layers", cut_fragments, BERT, {1: 4, 3: 4, 11: 9}, 3)


def test_auto_is_a_fragment_for_three_layers() -> None:
    assert auto_fragments([f"h.{number}.w" for number in range(24)]) == 8
    assert auto_fragments(BERT) == 1
    assert auto_fragments(["weight"]) == 1


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (30, 1), (30, 3), (7, 3), (2, 5), (100, 8)])
def test_each_fragment_leaves_once_in_every_interval(every: int, fragments: int) -> None:
    table = Timetable(every, 0, fragments)
    left = [(step, one) for step in range(1, 5 * every + 1) for one in table.leaving(step)]
    for fragment in range(fragments):
        steps = [step for step, one in left if one == fragment]
        assert len(steps) == 5
        assert {later - earlier for earlier, later in itertools.pairwise(steps)} <= {every}
    assert (every, fragments - 1) in left


# Refusals

BAD = [
    ({"every": 0}, ValueError, "every must be a whole number of at least 1"),
    ({"every": 2.5}, ValueError, "every must be a whole number"),
    ({"every": 4, "overlap": 4}, ValueError, "overlap must be a number of steps from 0 up to, not including, every=4"),
    ({"overlap": -1}, ValueError, "overlap"),
    ({"fragments": 5}, ValueError, "fragments=5 for 4 layers"),
    ({"fragments": 0}, ValueError, "fragments"),
    ({"mix": 1.0}, ValueError, 'mix must be a number from 0 up to, not including, 1, or "carry", got 1.0'),
    ({"mix": "carry", "overlap": 0}, ValueError, "wants overlap from 1 on, and does not go with elastic"),
    ({"mix": "carry", "elastic": Elastic(workers=1, address="here:1")}, ValueError, "does not go with elastic"),
    ({"outer_lr": -0.1}, ValueError, "outer_lr"),
    ({"outer_lr": "best"}, ValueError, "outer_lr must be a number .*, or \"auto\", got 'best'"),
    ({"outer_lr": "auto", "every": 1}, ValueError, "got every=1: single steps"),
    ({"outer_lr": "auto", "codec": "stat2"}, ValueError, "'stat2' leaves of outer steps, which is too coarse"),
    ({"outer_lr": "auto", "elastic": Elastic(workers=1, address="here:1")}, ValueError, "does not go with elastic"),
    ({"outer_lr": float("nan")}, ValueError, "outer_lr"),
    ({"outer_momentum": 1.0}, ValueError, "outer_momentum"),
    ({"codec": "int3"}, ValueError, "codec must be"),
    ({"guard": 0.5}, ValueError, "guard must be a number from 1 up to, not including, inf, or None, got 0.5"),
    ({"max_norm": -1.0}, ValueError, "max_norm must be a number from 0 up to, not including, inf, or None, got -1.0"),
    ({"tokens": -1}, ValueError, "tokens must be a number from"),
    ({"share": {"exp_avg": 0}}, ValueError, r"share\['exp_avg'\] must be a whole number of at least 1"),
    ({"touch": 0.0}, ValueError, "touch must be a part of the weights, above 0 and up to 1"),
    ({"touch": 0.1, "elastic": Elastic(workers=1, address="here:1")}, ValueError, "None with elastic"),
    ({"touch": 0.1, "param_dtype": torch.bfloat16}, ValueError, "parameters here are of 16 bits"),
    ({"touch": 0.1, "nodes": [0, 0]}, ValueError, "averages weights over workers, and there is one"),
    ({"share": ["exp_avg"]}, TypeError, "share must say of kinds"),
    ({"stage": 1}, ValueError, "nodes="),
    ({"stage": 3}, ValueError, "stage must be 0, 1 or 2"),
    ({"nodes": [0]}, ValueError, "nodes must name the node of each"),
    ({"lr": -1.0}, ValueError, "learning rate"),
    ({"no_such_option": 1}, TypeError, "no_such_option"),
    ({"inner": thinwire.OneBitAdam}, ValueError, "OneBitAdam communicates by itself"),
    ({"inner": thinwire.ShardedOptimizer}, ValueError, "ShardedOptimizer communicates by itself"),
    ({"inner": "AdamW"}, TypeError, "inner_class must be an optimizer class"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(one[0]) for one in BAD])
@on_threads(2)
def test_options(comm: Communicator, options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = dict(options)
    refused(error, message, make, comm, Tower(), given.pop("inner", torch.optim.SGD), **given)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("every", (4, 6)),
        ("overlap", (1, 2)),
        ("fragments", (1, 2)),
        ("outer_lr", (0.6, 0.7)),
        ("outer_lr", (0.6, "auto")),
        ("codec", ("int8", "none")),
        ("block_size", (64, 128)),
        ("mix", (0.0, 0.5)),
        ("mix", (0.0, "carry")),
        ("guard", (None, 3.0)),
        ("tokens", (None, 512)),
        ("share", ({"exp_avg": 1}, {"exp_avg": 2})),
    ],
)
@on_threads(2)
def test_ranks_that_differ_are_told(comm: Communicator, name: str, values: tuple[Any, Any]) -> None:
    refused(ValueError, f"{name} is .* on rank 0", make, comm, Tower(), **{name: values[comm.rank]})


@on_threads(2)
def test_a_fragment_that_does_not_exist_on_some_rank(comm: Communicator) -> None:
    model = Tower()
    if comm.rank == 1:
        del model.layers[3]
    refused(ValueError, "number of parameters is 10 against 12 on rank 0", make, comm, model)


@on_threads(2)
def test_outer_settings_that_differ_later_are_found_at_the_next_outer_step(comm: Communicator) -> None:
    model, optimizer = trained(comm, 2, overlap=0)
    if comm.rank == 1:
        optimizer.outer_lr = 0.3
    refused(Exception, "other hyperparameters", train, model, optimizer, 3, 4)


@pytest.mark.parametrize(("codec", "outer_lr"), [("none", 0.7), ("int4", 0.7), ("none", "auto")])
@on_threads(2)
def test_a_fragment_in_flight_keeps_the_outer_settings_with_which_it_left(
    comm: Communicator, codec: str, outer_lr: Any
) -> None:
    found = []
    for changed_after in (4, 6):
        model, optimizer = trained(comm, changed_after, overlap=2, fragments=1, codec=codec, outer_lr=outer_lr)
        optimizer.outer_momentum = 0.5
        if outer_lr != "auto":  # which a rate would end
            optimizer.outer_lr = 0.3
        train(model, optimizer, changed_after + 1, 15)
        found.append(outer_weights(model, optimizer))
    assert torch.equal(*found)


def test_parameters_are_not_added_later() -> None:
    optimizer = make(threads.single(60.0), Tower())
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
