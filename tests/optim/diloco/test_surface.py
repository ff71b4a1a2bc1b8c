"""What a training script meets: clipping, scalers, evaluation, 16 bits, nodes, skipped steps, bytes, memory, and a run
that is taken up again, on as many ranks or others, also while a fragment is under way."""

from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.launching import on_threads
from tests.optim.diloco.tower import Tower, flat, loss_of, make, outer_weights, spoil, train, trained
from tests.optim.training import through_a_file
from tests.refusing import refused
from tests.zero.saved import Saved, join, save
from thinwire.comm import Communicator, threads


def test_nodes_are_workers_that_average_gradients_exactly() -> None:
    """Two nodes of two ranks end as two workers do that see both ranks' batches."""

    def body(comm: Communicator) -> torch.Tensor:
        model = Tower()
        optimizer = make(comm, model, nodes=[0, 0, 1, 1], lr=0.05, fragments=2, overlap=1)
        assert optimizer.workers == 2
        train(model, optimizer, 1, 17)
        return outer_weights(model, optimizer)

    def alone(comm: Communicator) -> torch.Tensor:
        model = Tower()
        optimizer = make(comm, model, lr=0.05, fragments=2, overlap=1)
        for step in range(1, 18):
            optimizer.zero_grad()
            loss = sum(loss_of(model, 2 * comm.rank + place, step) for place in range(2)) / 2
            loss.backward()
            optimizer.step()
        return outer_weights(model, optimizer)

    by_node, by_rank = threads.run(body, 4), threads.run(alone, 2)
    for one in by_node:
        assert torch.equal(one, by_node[0])
        torch.testing.assert_close(one, by_rank[0], rtol=1e-5, atol=1e-6)


def test_nodes_of_other_sizes_count_by_their_ranks_and_one_can_be_left_out() -> None:
    """As in a job without the node that is."""
    options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0, "guard": 3.0, "lr": 0.05}

    def body(comm: Communicator, nodes: list[int], bad: int) -> torch.Tensor:
        model = Tower()
        optimizer = make(comm, model, nodes=nodes, **options)
        spoil(optimizer, nodes[comm.rank], {(bad, 4): float("nan")})
        train(model, optimizer, 1, 4)
        return outer_weights(model, optimizer)

    ran = threads.run(lambda comm: body(comm, [0, 0, 1, 2], 2), 4)
    assert all(torch.equal(one, ran[0]) for one in ran)
    torch.testing.assert_close(ran[0], threads.run(lambda comm: body(comm, [0, 0, 1], 2), 3)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [torch.optim.AdamW, thinwire.optim.Muon])
@pytest.mark.parametrize("stage", [1, 2])
def test_state_is_sharded_inside_a_node(stage: int, inner: Any) -> None:
    """With Muon each matrix lies whole on one rank."""

    def body(comm: Communicator, at: int) -> tuple[torch.Tensor, int]:
        model, optimizer = trained(comm, 13, inner, nodes=[0, 0, 1, 1], lr=0.01, stage=at)
        other = Tower()
        single = make(comm, other, nodes=[0, 0, 0, 0])
        train(other, single, 1, 5)
        assert (single.workers, single.bytes_sent_between_nodes) == (1, 0)
        return outer_weights(model, optimizer), optimizer.bytes_sent_between_nodes

    whole = threads.run(lambda comm: body(comm, 0), 4)
    for (sharded, sent), (wanted, others_sent) in zip(
        threads.run(lambda comm: body(comm, stage), 4), whole, strict=True
    ):
        assert torch.equal(sharded, wanted)
        assert sent == others_sent


def test_16_bit_parameters_have_master_weights() -> None:
    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, lr=1e-5, param_dtype=torch.bfloat16, codec="int8")
        before = outer_weights(model, optimizer)
        train(model, optimizer, 1, 40)
        shown = outer_weights(model, optimizer)
        assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
        own = flat(model.parameters()).clone()
        optimizer.eval()
        assert torch.equal(flat(model.parameters()), shown)
        optimizer.train()
        assert torch.equal(flat(model.parameters()), own)
        assert not torch.equal(own, shown)
        return before, shown

    (before, shown), (_, other) = threads.run(body, 2)
    assert torch.equal(shown, other)
    assert not torch.equal(before, shown), "updates below bf16's last bit were lost"


def test_evaluation_shows_the_outer_weights_while_a_fragment_is_under_way() -> None:
    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = trained(comm, 5, every=4, overlap=2, fragments=1)
        own = flat(model.parameters()).clone()
        optimizer.eval()
        shown = flat(model.parameters()).clone()
        refused(RuntimeError, "eval", optimizer.step)
        optimizer.train()
        assert torch.equal(flat(model.parameters()), own)
        train(model, optimizer, 6, 6)
        optimizer.eval()
        with torch.no_grad():
            model.first.weight.zero_()
        refused(RuntimeError, "synchronize_weights", optimizer.train)
        return shown, own

    (first, own), (second, others_own) = threads.run(body, 2)
    assert torch.equal(first, second)
    assert torch.equal(first, flat(Tower().parameters())), "nothing has arrived by then"
    assert not torch.equal(own, others_own)


def test_a_worker_skips_a_gradient_that_is_not_finite_alone() -> None:
    def body(comm: Communicator) -> int:
        model = Tower()
        optimizer = make(comm, model)
        for step in range(1, 9):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            (loss * float("nan") if (comm.rank, step) == (1, 3) else loss).backward()
            if (comm.rank, step) == (1, 3):
                with pytest.warns(RuntimeWarning, match="rank 1"):
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.synchronize()
        assert torch.isfinite(flat(model.parameters())).all()
        return optimizer.skipped_steps

    assert threads.run(body, 2) == [0, 1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_written_while_all_ranks_hold_the_same_are_the_outer_ones(dtype: torch.dtype | None) -> None:
    """Loaded before the first step, or after synchronize(), as the best checkpoint is at the end of a Trainer's run."""

    def body(comm: Communicator) -> torch.Tensor:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, param_dtype=dtype)
        for steps in (0, 6):
            train(model, optimizer, 1, steps)
            optimizer.synchronize()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.25 + steps)
            assert (outer_weights(model, optimizer) == 0.25 + steps).all()
            assert (flat(model.parameters()) == 0.25 + steps).all()
        train(model, optimizer, 7, 8)
        assert (outer_weights(model, optimizer) - 6.25).abs().max() < 0.1
        return outer_weights(model, optimizer)

    first, second = threads.run(body, 2)
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:the outer step", "ignore:step")
@pytest.mark.parametrize("touch", [None, 1.0])
def test_a_worker_whose_weights_are_lost_begins_again_from_the_outer_weights(touch: float | None) -> None:
    def body(comm: Communicator) -> torch.Tensor:
        model, optimizer = trained(comm, 6, codec="int8", overlap=1, touch=touch)
        if comm.rank == 1:
            with torch.no_grad():
                model.first.weight.fill_(float("inf"))
                optimizer.inner.zero_grad()
        for step in range(7, 14):
            optimizer.zero_grad()
            assert comm.rank or torch.isfinite(flat(model.parameters())).all()
            if torch.isfinite(flat(model.parameters())).all():
                loss_of(model, comm.rank, step).backward()
            optimizer.step()
        assert optimizer.dropped_outer_steps == 1
        assert torch.isfinite(flat(model.parameters())).all()
        return outer_weights(model, optimizer)

    first, second = threads.run(body, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("how", ["clipped", "scaled", "unscaled"])
@on_threads(2)
def test_gradients_are_clipped_and_scaled_by_each_worker(comm: Communicator, how: str) -> None:
    """Beside it trains one that torch clips, and whose loss nobody scales."""
    mine, plain = Tower(), Tower()
    optimizer, other = make(comm, mine, max_norm=0.01 if how == "clipped" else 0.0), make(comm, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how != "clipped")
    for step in range(1, 10):
        for one in (optimizer, other):
            one.zero_grad()
        scaler.scale(loss_of(mine, comm.rank, step)).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        loss_of(plain, comm.rank, step).backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        other.step()
    torch.testing.assert_close(flat(mine.parameters()), flat(plain.parameters()), rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == (1.0 if how == "clipped" else 256.0)


@on_threads(2)
def test_learning_rate_schedules_and_groups_are_the_inner_optimizers(comm: Communicator) -> None:
    model = Tower()
    optimizer = thinwire.DiLoCo(
        [{"params": model.first.parameters(), "lr": 0.5}, {"params": model.layers.parameters()}],
        torch.optim.AdamW,
        lr=0.1,
        comm=comm,
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.25, 0.05]


# Taken up again


OPTIONS: dict[str, Any] = {"lr": 0.01, "every": 6, "fragments": 2, "overlap": 2, "codec": "int4"}


NODES = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("workers", "stopped_at", "inner", "options"),
    [
        (1, 1, torch.optim.AdamW, {"codec": "int4"}),
        (3, 4, torch.optim.AdamW, {"codec": "stat2"}),
        (3, 12, torch.optim.AdamW, {"codec": "sign1"}),
        (2, 7, thinwire.optim.Muon, {"share": {"momentum_buffer": 1}}),
        (2, 19, torch.optim.AdamW, {"outer_lr": "auto"}),
        (3, 5, torch.optim.AdamW, {"mix": "carry"}),
        (3, 20, torch.optim.AdamW, {"guard": 3.0}),
        (3, 7, torch.optim.AdamW, {"touch": 0.3}),
        (4, 8, torch.optim.AdamW, {"touch": 0.5, "mix": "carry", "nodes": NODES}),
        (4, 10, torch.optim.AdamW, {"guard": 3.0, "tokens": 64, "nodes": [0, 0, 1, 2], "share": {"exp_avg": 1}}),
        (4, 4, torch.optim.AdamW, {"mix": "carry", "nodes": NODES, "param_dtype": torch.bfloat16}),
        (4, 20, torch.optim.AdamW, {"outer_lr": "auto", "nodes": NODES, "share": {"exp_avg": 2}}),
        (4, 14, thinwire.optim.Muon, {"nodes": NODES, "stage": 2, "share": {"momentum_buffer": 1, "exp_avg": 2}}),
        (4, 5, thinwire.optim.Muon, {"nodes": NODES, "stage": 1, "param_dtype": torch.bfloat16}),
    ],
)
@on_threads("workers")
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    comm: Communicator, workers: int, stopped_at: int, inner: Any, options: dict[str, Any]
) -> None:
    model = Tower()
    optimizer = make(comm, model, inner, **OPTIONS | options)
    spoils = {(0, 9): 1e3, (0, 12): 1e3, (1, 18): 40.0} if "guard" in options else {}
    worker = options["nodes"][comm.rank] if "nodes" in options else comm.rank
    spoil(optimizer, worker, spoils)
    train(model, optimizer, 1, stopped_at)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, stopped_at + 1, 26)

    other = Tower()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    resumed = make(comm, other, inner, **OPTIONS | options | {"lr": 0.5})
    spoil(resumed, worker, spoils)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.steps == stopped_at
    train(other, resumed, stopped_at + 1, 26)
    assert torch.equal(flat(other.parameters()), flat(model.parameters()))
    assert torch.equal(outer_weights(other, resumed), outer_weights(model, optimizer))
    sends_again = "touch" in options  # what is in flight when it is saved
    assert resumed.bytes_sent > optimizer.bytes_sent if sends_again else resumed.bytes_sent == optimizer.bytes_sent
    assert bool(spoils) == (optimizer.left_out > 0)


@pytest.mark.parametrize(("workers", "others"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_workers_goes_on_from_the_outer_weights_and_the_means(workers: int, others: int) -> None:
    def run(comm: Communicator) -> Any:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, **OPTIONS)
        train(model, optimizer, 1, 10)  # one fragment is under way
        parts = save(comm, optimizer)
        return parts, outer_weights(model, optimizer), flat(model.parameters()), optimizer

    ran = threads.run(run, workers)
    saved: Saved = join([one[0] for one in ran])
    mean_replica = torch.stack([one[2] for one in ran]).mean(0)

    def resume(comm: Communicator) -> None:
        model = Tower()
        resumed = make(comm, model, torch.optim.AdamW, **OPTIONS)
        resumed.load(saved)
        assert resumed.steps == 10
        assert torch.equal(outer_weights(model, resumed), ran[0][1])
        torch.testing.assert_close(flat(model.parameters()), mean_replica)
        moments = [ran[rank][3].inner.state[ran[rank][3].param_groups[0]["params"][0]] for rank in range(workers)]
        mean = torch.stack([one["exp_avg"] for one in moments]).mean(0)
        torch.testing.assert_close(resumed.inner.state[resumed.param_groups[0]["params"][0]]["exp_avg"], mean)
        train(model, resumed, 11, 30)
        resumed.synchronize()
        assert torch.isfinite(flat(model.parameters())).all()

    threads.run(resume, others)


def test_a_run_goes_on_with_other_fragments_and_intervals() -> None:
    def body(comm: Communicator, saved: Saved | None = None, **changed: Any) -> Any:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, **OPTIONS | changed)
        if saved is None:
            train(model, optimizer, 1, 10)
            return save(comm, optimizer)
        optimizer.load(saved)
        train(model, optimizer, 11, 20)
        return outer_weights(model, optimizer)

    saved = join(threads.run(body, 2))
    assert saved.names("arriving"), "no fragment was under way"
    first, second = threads.run(lambda comm: body(comm, saved, every=5, fragments=1, overlap=0), 2)
    assert torch.equal(first, second)


@on_threads(2)
def test_another_optimizers_state_is_refused(comm: Communicator) -> None:
    model = Tower()
    state = make(comm, model, torch.optim.AdamW, **OPTIONS).state_dict()
    refused(ValueError, "DiLoCo of AdamW", make(comm, model, torch.optim.SGD, **OPTIONS).load_state_dict, state)


def test_it_says_at_the_end_what_a_run_has_saved(capsys: pytest.CaptureFixture[str]) -> None:
    def body(comm: Communicator) -> None:
        comm.speaks = comm.rank == 0
        _, optimizer = trained(comm, 9, every=4, fragments=1)
        optimizer.close()

    threads.run(body, 2)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("thinwire: DiLoCo on 2 ranks: ")
    assert first.endswith(" a step uncompressed; its workers talk every 4 steps")
    assert last.startswith("thinwire: DiLoCo sent ")
    assert last.endswith(" less than uncompressed gradients")
