"""OneBitAdam and its kin on workers that come and go, as threads that meet at a store of their process."""

import copy
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

import thinwire
from tests.optim.diloco.tower import SETTINGS, Tower, flat, loss_of, meeting, quick, together
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, MembershipError, threads
from thinwire.optim.replicated.elastic_shards import ShardedWorkers, divide
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.zero.placement import Averaging

__all__ = ["meeting", "quick"]

_JOBS = count()


def exact(inner: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return thinwire.ShardedOptimizer, {"optimizer_class": inner, "stage": 0} | options


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (thinwire.OneBitAdam, {"freeze_step": 6}),
    "adam, clipped": (thinwire.OneBitAdam, {"freeze_step": 6, "max_norm": 0.5}),
    "adam, int4 warmup": (thinwire.OneBitAdam, {"freeze_step": 6, "warmup_wire": "int4"}),
    "lamb": (thinwire.OneBitLamb, {"freeze_step": 6}),
    "lion": (thinwire.OneBitLion, {}),
    "zero-one adam": (
        thinwire.ZeroOneAdam,
        {"var_freeze_step": 6, "local_step_scaler": 4, "local_step_clipper": 4, "var_update_scaler": 2},
    ),
    "sharded adamw": exact(torch.optim.AdamW),
    "sharded sgd, int4": exact(torch.optim.SGD, momentum=0.9, dampening=0.1, codec="int4"),
    "sharded muon": exact(thinwire.optim.Muon),
    "sharded muon, int4": exact(thinwire.optim.Muon, codec="int4"),
    "stage 1": exact(torch.optim.AdamW, stage=1),
    "1-bit muon": (thinwire.OneBitMuon, {"max_norm": 0.5, "rest_codec": "int4"}),
    "1-bit muon, stat2": (
        thinwire.OneBitMuon,
        {"codec": ("int4", "stat2"), "nesterov": True, "stage": 2, "bucket_bytes": 300},
    ),
}


FREEZING = [kind for kind, (_, options) in KINDS.items() if {"freeze_step", "var_freeze_step"} & options.keys()]
WITH_MATRICES = ("sharded muon, int4", "1-bit muon", "1-bit muon, stat2")
"""Of these plain ones have blocks of int4 end with each matrix, or owners of what is none."""


def make(model: Tower, kind: str, **options: Any) -> tuple[Any, ElasticWorkers]:
    made, usual = KINDS[kind]
    optimizer = made(model.named_parameters(), **{"lr": 0.01, "block_size": 64} | usual | options)
    return optimizer, optimizer._home.workers


def step(model: Tower, optimizer: Any, data: int) -> None:
    optimizer.zero_grad()
    loss_of(model, data, optimizer.steps + 1).backward()
    optimizer.step()


class Killed(BaseException):
    """The end of a worker, of which it tells nobody: its connections break."""


def vanish(workers: ElasticWorkers) -> None:
    """As at a process's exit."""
    workers.membership.heart.stop(gone=True)
    workers._part()


def kill_at(workers: ElasticWorkers, call: int, after: bool) -> None:
    """Have a worker die on its way into one of the next collectives, or out of it."""
    comm, left = workers._group, [call]
    issue = comm._issue

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0] and not after:
            raise Killed
        work = issue(*arguments, **options)
        if not left[0]:
            work.wait()
            raise Killed
        return work

    comm._issue = counted  # type: ignore[method-assign]


def run(
    kind: str,
    victim: Callable[[Tower, Any, ElasticWorkers], None] | None,
    *,
    stays: bool = False,
    workers: int = 3,
    model_of: Callable[[], Any] = Tower,
    **options: Any,
) -> Tensor:
    """The weights with which the workers end of whom the last one does as `victim` says, after which it is gone unless
    it `stays`, or as the others."""
    options["elastic"] = replace(SETTINGS, workers=workers, job=f"job {next(_JOBS)}")

    def body() -> Tensor | None:
        model = model_of()
        optimizer, workers = make(model, kind, **options)
        number = workers.dealt_to.index(workers.membership.name)
        while optimizer.steps < 20:
            if number == 2 and victim is not None:
                try:
                    victim(model, optimizer, workers)
                except Killed:
                    vanish(workers)
                if workers._is_over or not workers.membership.heart._thread.is_alive():
                    return None
            step(model, optimizer, number)
        optimizer.synchronize_weights()
        return flat(model.parameters())

    ends = [one for one in together([body] * workers) if one is not None]
    assert len(ends) == workers - 1 + (victim is None or stays)
    assert all(torch.equal(ends[0], one) for one in ends)
    return ends[0]


@cache
def undisturbed(kind: str) -> Tensor:
    return run(kind, None)


@cache
def left_after(steps: int, kind: str, workers: int = 3, model_of: Callable[[], Any] = Tower) -> Tensor:
    """The weights with which workers end of whom one has left after so many steps."""

    def leave(model: Tower, optimizer: Any, workers: ElasticWorkers) -> None:
        if optimizer.steps == steps:
            optimizer.close()

    return run(kind, leave, workers=workers, model_of=model_of)


def dies_in(steps: int, call: int, after: bool) -> Callable[[Any, Any, ElasticWorkers], None]:
    def die(model: Any, optimizer: Any, workers: ElasticWorkers) -> None:
        if optimizer.steps == steps:
            kill_at(workers, call, after)
            while True:
                step(model, optimizer, 2)

    return die


class Matrices(nn.Module):
    """Matrices of unlike sizes, one without elements, and nothing else; two have a leading direction."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((37, 5), (70, 37), (48, 70), (1, 48), (0, 3))
        generator = torch.Generator().manual_seed(7)
        self.matrices = nn.ParameterList(torch.randn(*size, generator=generator) * 0.2 for size in sizes)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        for matrix in self.matrices[:-1]:
            inputs = (inputs @ matrix.T).tanh()
        return inputs


OF_MATRICES: list[dict[str, Any]] = [
    {"bucket_bytes": 20_000},
    {"codec": "stat2", "nesterov": True, "weight_decay": 0.1, "stage": 1},
    {"codec": ("int4", "sign1"), "low_rank": 0, "max_norm": 0.3},
    {"low_rank": 1, "resync_interval": 7},
]


@pytest.mark.filterwarnings("ignore:OneBitMuon has ranks wait")
@pytest.mark.parametrize(
    ("kind", "workers", "model_of", "options"),
    [
        *((kind, 3, Tower, {}) for kind in KINDS if kind not in ("adam, clipped", *WITH_MATRICES)),
        ("stage 1", 2, Tower, {}),
        *(("1-bit muon", workers, Matrices, {"max_norm": 0.0} | one) for workers in (1, 2, 4) for one in OF_MATRICES),
    ],
    ids=str,
)
def test_undisturbed_it_is_the_plain_optimizer_bit_for_bit(
    kind: str, workers: int, model_of: Callable[[], Any], options: dict[str, Any]
) -> None:
    def plain(comm: Communicator) -> Tensor:
        model = model_of()
        made, usual = KINDS[kind]
        given = {"lr": 0.01, "block_size": 64} | usual | options
        optimizer = made(model.named_parameters(), comm=comm, **given)
        for _ in range(20):
            step(model, optimizer, comm.rank)
        optimizer.synchronize_weights()
        return flat(model.parameters())

    of_elastic = run(kind, None, workers=workers, model_of=model_of, **options)
    assert torch.equal(of_elastic, threads.run(plain, workers)[0])


# (kind, the step, at which of its collectives, on the way out of it): between them, before all is there and after
@pytest.mark.parametrize(
    ("kind", "at", "call", "after", "counts"),
    [
        ("adam", 3, 1, False, False),
        ("adam", 5, 3, True, True),  # the freeze
        ("adam", 9, 1, True, False),
        ("adam", 9, 2, True, True),
        ("adam, clipped", 3, 3, True, True),
        ("adam, clipped", 9, 3, False, False),
        ("adam, int4 warmup", 3, 2, False, False),
        ("lamb", 5, 3, False, True),
        ("lamb", 5, 4, False, True),
        ("lamb", 9, 3, True, True),
        ("lion", 9, 2, False, False),
        ("sharded adamw", 9, 2, True, True),
        ("sharded muon, int4", 9, 2, True, True),
        ("sharded sgd, int4", 1, 2, False, False),
        ("stage 1", 9, 2, False, False),
        ("stage 1", 9, 2, True, True),
        *(("stage 1", 9, call, after, True) for call in (3, 4) for after in (False, True)),  # new weights
        ("sharded sgd, int4", 9, 2, True, True),
        *(
            ("1-bit muon", 9, call, after, False) for call in (2, 4, 5) for after in (False, True)
        ),  # buddies, vote, steps
        ("1-bit muon", 9, 6, True, True),
        ("1-bit muon, stat2", 1, 5, True, False),
        ("1-bit muon, stat2", 9, 6, True, True),
        ("zero-one adam", 5, 4, True, True),  # the freeze
        ("zero-one adam", 9, 1, True, False),  # a local step before a sync
    ],
)
def test_a_death_costs_no_step(kind: str, at: int, call: int, after: bool, counts: bool) -> None:
    """Survivors end with the bits of a run whose worker left after that step, if its gradients count, or before it."""
    assert torch.equal(run(kind, dies_in(at, call, after)), left_after(at + counts, kind))


@pytest.mark.parametrize(
    ("workers", "call", "after"),
    [(3, 1, False), (5, 2, False), (3, 4, False), (5, 5, False), (3, 8, False), (5, 8, True), (3, 10, True)],
)
def test_a_death_costs_no_step_of_matrices_whose_leading_directions_leave_apart(
    workers: int, call: int, after: bool
) -> None:
    """1 to 4 are directions and what is left, for owners and for buddies; then the votes, and what owners send."""
    found = run("1-bit muon", dies_in(9, call, after), workers=workers, model_of=Matrices)
    assert torch.equal(found, left_after(10 if call == 10 else 9, "1-bit muon", workers, Matrices))


@pytest.mark.filterwarnings("ignore:step .* was skipped")
def test_a_step_of_1_bit_muon_that_is_skipped_changes_nothing() -> None:
    """Nor does one that other settings send again, nor one without a gradient for some matrix, of that matrix."""
    done = list[int]()

    def disturb(model: Tower, optimizer: Any, workers: ElasticWorkers) -> None:
        if optimizer.steps in (0, 9) and optimizer.steps not in done:
            done.append(optimizer.steps)
            (loss_of(model, 2, 1) * math.nan).backward()
            optimizer.step()
            assert optimizer.last_step.overflow
            optimizer.zero_grad()

    assert torch.equal(run("1-bit muon", disturb, stays=True), undisturbed("1-bit muon"))
    assert done == [0, 9]


def test_settings_of_1_bit_muon_count_as_they_are_at_the_step_and_weights_as_others_wrote_them() -> None:
    """And a matrix without a gradient stays where it is; one with it on some workers alone is an error on all."""

    def body(late: bool) -> Tensor:
        model = Tower()
        optimizer, workers = make(model, "1-bit muon", elastic=replace(SETTINGS, job=f"job {late}"))
        number = workers.dealt_to.index(workers.membership.name)
        for at in range(12):
            optimizer.zero_grad()
            left_out, before = model.layers[1], model.layers[1].weight.detach().clone()
            if at in (4, 5):
                model.layers[1] = nn.Identity()
            loss_of(model, number, at).backward()
            model.layers[1] = left_out
            for group in optimizer.param_groups if at == 7 else ():
                group["weight_decay"] = 0.5
            optimizer.step()
            assert torch.equal(left_out.weight, before) is (at in (4, 5))
            for group in optimizer.param_groups if at == 6 and not late else ():
                group["weight_decay"] = 0.5
            if at == 8:
                with torch.no_grad():
                    model.first.weight.fill_(0.25)
        assert (model.first.weight - 0.25).abs().max() < 0.2
        optimizer.zero_grad()
        model.layers[1] = left_out if number else nn.Identity()
        message = r"layers.1.weight.* on ranks \[1, 2\] but none on ranks \[0\]"
        refused(ValueError, message, step, model, optimizer, number)
        model.layers[1] = left_out
        optimizer.close()
        return flat(model.parameters())

    first, second = (together([lambda late=late: body(late)] * 3) for late in (False, True))  # type: ignore[misc]
    assert all(torch.equal(one, first[0]) for one in (*first, *second))


@pytest.mark.parametrize(("kind", "at"), [*((kind, 9) for kind in KINDS), *((kind, 3) for kind in FREEZING)])
def test_who_lacks_some_of_a_step_that_others_have_takes_it_over(kind: str, at: int) -> None:
    """One worker loses what leg 2 has brought, which the others apply: all end as if nothing had happened."""

    def lose(model: Tower, optimizer: Any, workers: ElasticWorkers) -> None:
        if optimizer.steps != at or at in lost:
            return
        lost.append(at)
        synchronizer = workers._synchronizer
        judge = synchronizer._judge

        def fail(*arguments: Any) -> Any:
            synchronizer._judge = judge  # type: ignore[method-assign]
            for exchange in synchronizer._sent():
                for leg in exchange.brought:
                    leg.received.random_()
            raise CommunicationError("lost")

        synchronizer._judge = fail  # type: ignore[method-assign]

    lost = list[int]()
    assert torch.equal(run(kind, lose, stays=True), undisturbed(kind))
    assert lost


@pytest.mark.parametrize(
    ("kind", "from_step", "disturbed"),
    [
        *product(["adam", "lamb", "zero-one adam"], [2, 9], [""]),
        ("adam", 9, "other bits"),
        ("lamb", 2, "other bits"),
        ("adam", 2, "no more is told"),
        ("adam", 9, "called for before it comes"),
        ("sharded sgd, int4", 9, ""),
        ("sharded muon, int4", 2, ""),
        ("stage 1", 9, ""),
        ("stage 1", 9, "its state is lost on the way"),
        ("1-bit muon", 9, ""),
        ("1-bit muon, stat2", 2, "its state is lost on the way"),
    ],
)
def test_who_joins_has_the_weights_and_the_state_of_the_others(
    kind: str, from_step: int, disturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the steps that the others take meanwhile, with what they decide, but for local ones, or if it could not
    look on: for these they wait."""
    options = {"elastic": replace(SETTINGS, workers=2), "resync_interval": 1}
    decided = set[int]()
    come, followed, follow = threading.Event(), list[int](), ElasticWorkers._follow

    def note(workers: ElasticWorkers, step: Any) -> int:
        followed.append(workers._brought)
        if disturbed == "no more is told":
            raise CommunicationError("lost")
        behind = follow(workers, step)
        for weights in workers._table.weights() if disturbed == "other bits" else ():
            weights.add_(0.1)
        return behind

    monkeypatch.setattr(ElasticWorkers, "_follow", note)
    move, lost = ShardedWorkers._move_between, list[str]()

    def lose(workers: ShardedWorkers, source: int, target: int, numbers: Any) -> None:
        if disturbed == "its state is lost on the way" and target == 2 and not lost:
            lost.append(workers.membership.name)
            raise CommunicationError("lost")
        move(workers, source, target, numbers)

    monkeypatch.setattr(ShardedWorkers, "_move_between", lose)

    def end(model: Tower, optimizer: Any, workers: ElasticWorkers) -> tuple[Tensor, dict[str, Any], dict[int, Any]]:
        optimizer.synchronize_weights()
        decided.add(workers.decisions.passed)
        divided = workers._shares.mine if isinstance(workers, ShardedWorkers) else ()
        held = {number: workers._steps.state_of(number) for number in divided}
        return flat(model.parameters()), optimizer.state_dict(), held

    def stays() -> tuple[Tensor, dict[str, Any], dict[int, Any]]:
        model = Tower()
        optimizer, workers = make(model, kind, **options)
        while optimizer.steps < 24 or workers.comm.size == 2:
            if optimizer.steps == from_step:
                if disturbed == "called for before it comes":
                    workers._telling.begin(workers._told())
                come.set()
            time.sleep(0.05 if workers.comm.size == 2 else 0)
            step(model, optimizer, workers.dealt_to.index(workers.membership.name))
        return end(model, optimizer, workers)

    def joins() -> tuple[Tensor, dict[str, Any], dict[int, Any]]:
        assert come.wait(60)
        model = Tower()
        with torch.no_grad():
            model.first.weight.zero_()  # its own weights do not count
        optimizer, workers = make(model, kind, lr=0.5, **options)
        assert optimizer.steps > from_step
        assert optimizer.param_groups[0]["lr"] == 0.01
        while optimizer.steps < 24:
            step(model, optimizer, workers.dealt_to.index(workers.membership.name))
        return end(model, optimizer, workers)

    (first, saved, held), (second, _, by_second), (late, of_late, by_late) = together([stays, stays, joins])
    assert torch.equal(first, second)
    assert torch.equal(first, late)
    assert len(decided) == 1
    assert bool(followed) is (kind not in ("zero-one adam", "stage 1", "1-bit muon", "1-bit muon, stat2"))
    for number, state in saved["state"].items():
        assert all(torch.equal(one, of_late["state"][number][name]) for name, one in state.items())
    for number, state in by_late.items():  # also held by one of the others
        same = next(one[number] for one in (held, by_second) if number in one)
        assert all(torch.equal(one, same[name]) for name, one in state.items())


def test_state_is_divided_evenly_and_what_need_not_move_stays() -> None:
    sizes = [50, 400, 70, 30, 400, 90, 120, 60, 20, 10, 300, 250]
    every = set(range(len(sizes)))

    def loads(holds: list[set[int]]) -> list[int]:
        return [sum(sizes[number] for number in one) for one in holds]

    four = divide([every] * 4, sizes)
    assert max(loads(four)) <= 1.1 * 2 * sum(sizes) / 4
    assert divide(four, sizes) == four
    three = divide(four[1:], sizes)
    moved = loads([after - before for before, after in zip(four[1:], three, strict=True)])
    assert sum(moved) <= 1.5 * loads(four)[0]
    again = divide([*three, set()], sizes)
    assert loads(again)[3] >= 0.9 * 2 * sum(sizes) / 4
    assert all(sum(number in one for one in again) == 2 for number in every)
    assert divide([every], sizes) == [every]


def test_what_no_worker_has_loaded_is_told_on_all() -> None:
    saved = list[dict[str, Any]]()

    def body(job: Any, *, saves: bool) -> str:
        model = Tower()
        optimizer, workers = make(model, "stage 1", elastic=job)
        number = workers.dealt_to.index(workers.membership.name)
        if not saves:
            with pytest.raises(MembershipError, match=r"no worker has loaded that of \d+ parameters, .* and "):
                optimizer.load_state_dict(saved[0])
            return ""
        step(model, optimizer, number)
        if number == 0:
            saved.append(optimizer.state_dict())
        optimizer.synchronize_weights()
        return ""

    first, second = (replace(SETTINGS, job=f"job {next(_JOBS)}") for _ in range(2))
    together([lambda: body(first, saves=True)] * 3)
    together([lambda: body(second, saves=False)] * 3)


@pytest.mark.parametrize("kind", ["stage 1", "1-bit muon"])
@pytest.mark.parametrize("at_once", [False, True])
def test_state_outlives_one_of_the_two_workers_that_hold_it_and_not_both(kind: str, at_once: bool) -> None:
    """Five share it. Two that hold some together die at once, or one and then the other."""
    options: dict[str, Any] = {"elastic": replace(SETTINGS, workers=5, silence=2.0)}
    dies = threading.Barrier(2)

    def body() -> str:
        model = Tower()
        optimizer, workers = make(model, kind, **options)
        number = workers.dealt_to.index(workers.membership.name)
        held = [set(one) for one in workers._holds]
        pair = next(pair for pair in product(range(5), range(5)) if pair[0] < pair[1] and held[pair[0]] & held[pair[1]])
        while optimizer.steps < 12:
            if number in pair and (optimizer.steps == 6 if at_once or number == pair[0] else optimizer.steps == 9):
                if at_once:
                    dies.wait(60)
                vanish(workers)
                return "dead"
            try:
                step(model, optimizer, number)
            except MembershipError as error:
                names = [workers._names_now[one] for one in pair]
                return str(error) if all(name in str(error) for name in names) else "nameless"
        on_all = {3} if kind == "1-bit muon" and not at_once else set()
        assert {sum(one in held for held in workers._holds) for one in range(len(workers._sizes))} == {2} | on_all
        optimizer.synchronize_weights()
        return str(flat(model.parameters()).tolist())

    ends = [one for one in together([body] * 5) if one != "dead"]
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert ("optimizer state is lost, as all are gone that held it: that of" in ends[0]) is at_once


@pytest.mark.parametrize("kind", ["adam", "stage 1"])
def test_a_step_that_the_others_have_ended_before_is_refused_and_they_end(kind: str) -> None:
    def go_on(model: Tower, optimizer: Any, workers: ElasticWorkers) -> None:
        if optimizer.steps == 19:
            step(model, optimizer, 2)
            refused(MembershipError, "have ended it after 20 common steps", step, model, optimizer, 2)
            vanish(workers)

    run(kind, go_on)


def test_a_worker_that_was_held_up_finds_itself_replaced_and_ends() -> None:
    options: dict[str, Any] = {"elastic": replace(SETTINGS, silence=2.0)}
    gone_on = threading.Event()

    def body() -> Tensor | None:
        model = Tower()
        optimizer, workers = make(model, "adam", **options)
        number = workers.dealt_to.index(workers.membership.name)
        while optimizer.steps < 12:
            if optimizer.steps == 6 and number == 1:
                workers.membership.heart.stop()
                assert gone_on.wait(60)
                with pytest.raises(MembershipError, match=r"took this one for dead.*start it again"):
                    step(model, optimizer, number)
                optimizer.close()
                return None
            step(model, optimizer, number)
        gone_on.set()
        optimizer.synchronize_weights()
        return flat(model.parameters())

    first, second = [one for one in together([body] * 3) if one is not None]
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["adam", "zero-one adam"])
def test_every_sample_counts_once_an_epoch_in_batches_of_one_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies, another comes, and gets its state at the second attempt only, when some have begun a step."""
    late, hand_over = set[int](), ElasticWorkers._hand_over

    def fail_once(workers: ElasticWorkers, members: list[int]) -> None:
        if threading.get_ident() in late:
            assert ahead.wait(60)
            late.clear()
            raise CommunicationError("lost")
        hand_over(workers, members)

    monkeypatch.setattr(ElasticWorkers, "_look_on", lambda workers: None)
    monkeypatch.setattr(ElasticWorkers, "_hand_over", fail_once)
    come, ahead, lock = threading.Event(), threading.Event(), threading.Lock()
    read = dict[tuple[str, int], list[int]]()  # by worker and step
    took_part = dict[int, list[str] | None]()  # in each step, as a survivor learns

    def body(begins: bool) -> str | None:
        assert begins or come.wait(60)
        late.update(() if begins else [threading.get_ident()])
        model = Tower()
        optimizer, workers = make(model, kind, elastic=SETTINGS)
        sampler = thinwire.ElasticBatchSampler(optimizer, 60, batch=12, micro_batch=2)
        name, number = workers.membership.name, workers.dealt_to.index(workers.membership.name)
        deal = workers.on_step

        def on_step(dealt_to: list[str], took: list[str] | None) -> None:
            if number == 0:
                took_part[optimizer.steps] = took
            deal(dealt_to, took)

        workers.on_step = on_step
        try:
            for one in sampler.steps(DataLoader(range(60), batch_sampler=sampler)):
                if begins and number == 2 and optimizer.steps == 7:
                    kill_at(workers, 1, after=False)
                if optimizer.steps == 9 and begins:
                    come.set()
                    while not workers.membership.wanted:
                        time.sleep(0.01)
                if late and len(workers.dealt_to) == 3 and optimizer.steps > 9:
                    ahead.set()
                samples = list[int]()
                for batch in one:
                    (one.weight * loss_of(model, int(batch[0]), 1)).backward()
                    samples += batch.tolist()
                with lock:
                    read[name, optimizer.steps] = samples
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.steps >= 30:
                    break
        except Killed:
            vanish(workers)
            return None
        assert sampler.state_dict()["owed"] == []
        optimizer.synchronize_weights()
        return name

    names = together([lambda: body(True)] * 3 + [lambda: body(False)])
    assert names.count(None) == 1
    assert not late
    counted, pending = Counter[int](), list[int]()
    for at, took in sorted(took_part.items()):
        pending.append(at)
        for one in pending if took is not None else ():
            counted.update(sample for name in took or () for sample in read[name, one])
        pending = [] if took is not None else pending
    assert max(counted.values()) - min(counted.values()) <= 1
    assert len(counted) == 60


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        *product(["adam", "adam, int4 warmup", "zero-one adam"], [4, 11]),
        *product(["sharded sgd, int4", "sharded muon"], [4]),
        *product(["stage 1", *WITH_MATRICES[1:]], [11]),
    ],
)
def test_a_job_resumes_in_another_bit_for_bit(kind: str, at: int) -> None:
    saved, weights = dict[int, dict[str, Any]](), dict[int, dict[str, Tensor]]()

    read = list[int]()

    def body(resumes: bool, until: int, elastic: Any) -> Tensor:
        model = Tower()
        if resumes:
            model.load_state_dict(weights[0])
        optimizer, workers = make(model, kind, elastic=elastic)
        number = workers.dealt_to.index(workers.membership.name)
        if resumes:
            optimizer.load_state_dict(saved[number])
            assert optimizer.steps == at
        read.extend(islice(thinwire.ElasticSampler(optimizer, 60, ahead=10), 10))
        while optimizer.steps < until:
            if optimizer.steps == at and not resumes:
                saved[number], weights[number] = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            step(model, optimizer, number)
        optimizer.synchronize_weights()
        return flat(model.parameters())

    def job() -> Any:
        return replace(SETTINGS, job=f"job {next(_JOBS)}")

    first, second = job(), job()
    whole = together([lambda: body(False, 20, first)] * 3)
    again = together([lambda: body(True, 20, second)] * 3)
    assert all(torch.equal(whole[0], one) for one in [*whole, *again])
    assert sorted(read) == list(range(60))


@pytest.mark.parametrize("kind", ["stage 1", "1-bit muon"])
def test_a_state_does_not_cross_between_elastic_workers_and_ranks_that_are_given(kind: str) -> None:
    made, usual = KINDS[kind]
    plain, model = made(Tower().named_parameters(), lr=0.01, **usual), Tower()
    elastic, _ = make(model, kind, elastic=replace(SETTINGS, workers=1, job=f"job {next(_JOBS)}"))
    step(model, elastic, 0)
    refused(ValueError, "with elastic workers, and this .* is without", plain.load_state_dict, elastic.state_dict())
    refused(ValueError, "without elastic workers, and this .* is with", elastic.load_state_dict, plain.state_dict())


def test_all_workers_begin_at_the_same_state() -> None:
    """Of three one has loaded nothing: it alone ends."""

    def body(number: int) -> str:
        model = Tower()
        optimizer, _ = make(model, "adam", elastic=SETTINGS)
        if number:
            optimizer.load_state_dict(alone)
        try:
            step(model, optimizer, 0)
        except MembershipError as error:
            return str(error)
        with pytest.raises(RuntimeError, match="load a state before the first step"):
            optimizer.load_state_dict(alone)
        optimizer.synchronize_weights()
        return f"{optimizer.steps}"

    model = Tower()
    optimizer, _ = make(model, "adam", elastic=replace(SETTINGS, workers=1, job="alone"))
    step(model, optimizer, 0)
    alone = optimizer.state_dict()
    optimizer.synchronize_weights()
    refused, *others = together([lambda: body(0), lambda: body(1), lambda: body(2)])
    assert re.match("this worker begins at step 0, and others at step 1, .*: load what one worker saved", refused)
    assert others == ["2", "2"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"elastic": {"workers": 2}}, TypeError, "elastic must be a thinwire.Elastic, got {'workers': 2}"),
        ({"stage": 1}, ValueError, "elastic goes with stage=0"),
        ({"comm": threads.single(1.0)}, ValueError, "a worker of an elastic job is one process"),
        ({"comm_backend_name": "mpi"}, ValueError, "a worker of an elastic job is one process"),
        ({"averaging": Averaging(op="sum")}, ValueError, "elastic workers take means"),
        ({"nodes": [0, 0, 1]}, ValueError, "a worker of an elastic job is one process, got nodes="),
    ],
)
def test_what_elastic_workers_cannot_have_is_refused_at_once(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make(Tower(), "adam", **{"elastic": SETTINGS} | options)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (torch.optim.AdamW, {"stage": 2}, "elastic= goes with stage 0, or with stage 1 where weights travel exactly"),
        (torch.optim.AdamW, {"stage": 1, "codec": "int4"}, "got stage=1, codec=('int4', 'int8')"),
        (torch.optim.AdamW, {"stage": 1, "param_dtype": torch.bfloat16}, "elastic= at stage 1 takes fp32 parameters"),
        (torch.optim.AdamW, {"offload": True}, "offload does not go with elastic="),
        (torch.optim.AdamW, {"comm": threads.single(1.0)}, "a worker of an elastic job is one process"),
        (torch.optim.AdamW, {"rest_codec": "int8"}, "rest_codec does not go with elastic="),
        (
            thinwire.optim.Muon,
            {"stage": 1, "codec": "sign1", "rest_codec": ("stat2", "int4")},
            "what has no owner has averages come back as gradients leave, got rest_codec=('stat2', 'int4')",
        ),
        (
            thinwire.optim.Muon,
            {"stage": 1, "codec": "sign1", "param_dtype": torch.bfloat16},
            "elastic= of owners takes fp32 parameters, in fp32, got torch.bfloat16: leave param_dtype out",
        ),
        (
            type("Factored", (torch.optim.Adafactor,), {}),
            {},
            "Factored keeps 'row_var' of shape (2, 1), torch.float32 for a parameter",
        ),
    ],
)
def test_what_elastic_workers_of_a_sharded_optimizer_cannot_have_is_refused_at_once(
    inner: Any, options: dict[str, Any], message: str
) -> None:
    given = {"stage": 0, "elastic": SETTINGS} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        thinwire.ShardedOptimizer(Tower().parameters(), inner, **given)


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_worker_with_other_data_or_without_any_ends_alone(micro_batch: int) -> None:
    """Of two, one of which brings samples of its own, or finds one micro-batch a step, which the first one gets."""
    dealt, ended, sizes = threading.Event(), threading.Event(), {"batch": 8, "micro_batch": micro_batch}

    def deals() -> int:
        model = Tower()
        optimizer, workers = make(model, "adam", elastic=replace(SETTINGS, workers=2 if micro_batch == 4 else 1))
        sampler = thinwire.ElasticBatchSampler(optimizer, 60, **sizes)
        dealt.set()
        for one in sampler.steps(DataLoader(range(60), batch_sampler=sampler)):
            if optimizer.steps >= 5 and ended.is_set():
                break
            for batch in one:
                (one.weight * loss_of(model, int(batch[0]), 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize_weights()
        return workers.comm.size

    def ends() -> None:
        assert micro_batch == 4 or dealt.wait(60)
        optimizer, _ = make(Tower(), "adam", elastic=replace(SETTINGS, workers=2 if micro_batch == 4 else 1))
        assert dealt.wait(60)
        if micro_batch == 4:
            told = "size of ElasticBatchSampler is 61 here and 60 on the job's first worker"
            refused(ValueError, told, thinwire.ElasticBatchSampler, optimizer, 61, **sizes)
        else:
            steps = thinwire.ElasticBatchSampler(optimizer, 60, **sizes).steps([])
            refused(ValueError, "1 micro-batches a step are too few for 2 workers", next, steps)
        optimizer.close()
        ended.set()

    assert together([deals, ends]) == [1, None]


def test_a_batch_that_a_step_goes_without_is_no_other_steps() -> None:
    model = Tower()
    optimizer, _ = make(model, "adam", elastic=replace(SETTINGS, workers=1))
    sampler = thinwire.ElasticBatchSampler(optimizer, 60, batch=8, micro_batch=4)
    dealt, read = list(islice(sampler, 6)), list[list[int]]()
    for one in islice(sampler.steps(DataLoader(range(60), batch_sampler=sampler)), 3):
        for batch in one:
            read.append(batch.tolist())
            loss_of(model, 0, 1).backward()
            break
        optimizer.step()
        optimizer.zero_grad()
    assert read == dealt[::2]
    optimizer.synchronize_weights()


def test_a_sampler_is_refused_where_it_could_not_deal() -> None:
    model = Tower()
    optimizer, _ = make(model, "adam", elastic=replace(SETTINGS, workers=1))
    sizes = {"batch": 8, "micro_batch": 4}
    with pytest.raises(ValueError, match="batch=8 is no multiple of micro_batch=3"):
        thinwire.ElasticBatchSampler(optimizer, 60, batch=8, micro_batch=3)
    with pytest.raises(TypeError, match="needs an optimizer with elastic="):
        thinwire.ElasticBatchSampler(torch.optim.SGD(model.parameters()), 60, **sizes)
    sampler = thinwire.ElasticBatchSampler(optimizer, 60, **sizes)
    refused(ValueError, "another sampler says", next, sampler.steps(DataLoader(range(60), batch_size=4)))
    refused(RuntimeError, "the loader of steps\\(\\) has ended", next, iter(next(sampler.steps([]))))
    with pytest.raises(TypeError, match="seed must be a whole number, the same on every worker, got 'a'"):
        thinwire.ElasticBatchSampler(optimizer, 60, **sizes, seed="a")
    steps = sampler.steps(DataLoader(range(60), batch_sampler=sampler))
    next(steps)
    with pytest.raises(RuntimeError, match="the optimizer took 0 steps for one of the sampler's"):
        next(steps)
    step(model, optimizer, 0)
    with pytest.raises(ValueError, match="before the optimizer's first step"):
        thinwire.ElasticBatchSampler(optimizer, 60, **sizes)
    optimizer.loss_scale = 4.0
    with pytest.raises(ValueError, match="elastic workers take no loss scale, got 4"):
        step(model, optimizer, 0)
    optimizer.zero_grad()
    optimizer.synchronize_weights()
    with pytest.raises(RuntimeError, match="this worker's part in the job has ended"):
        step(model, optimizer, 0)
