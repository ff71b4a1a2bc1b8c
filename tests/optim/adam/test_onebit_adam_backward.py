"""When gradients leave and when they must not: accumulation, dropped steps, overflow, GradScaler, missing gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import loss_of, make_model, make_optimizer, same, snapshot, train, weights
from thinwire.comm import CommunicationError, threads


@pytest.mark.parametrize("freeze_step", [100, 4])
def test_accumulation_in_no_sync_equals_one_large_batch(freeze_step) -> None:
    def rank(comm):
        results = []
        for accumulate in (True, False):
            model = make_model()
            optimizer = make_optimizer(model, comm, freeze_step=freeze_step)
            for step in range(20):
                optimizer.zero_grad()
                if accumulate:
                    with optimizer.no_sync():
                        (loss_of(model, comm.rank, 2 * step) / 2).backward()
                    (loss_of(model, comm.rank, 2 * step + 1) / 2).backward()
                else:
                    (loss_of(model, comm.rank, 2 * step) / 2 + loss_of(model, comm.rank, 2 * step + 1) / 2).backward()
                optimizer.step()
            results.append((weights(model), optimizer.bytes_sent))
        (first, first_bytes), (second, second_bytes) = results
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
        return first_bytes == second_bytes

    assert threads.run(rank, 2) == [True, True]


def test_gradients_accumulated_in_no_sync_leave_even_where_the_last_backward_does_not_reach_them() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        before = weights(model[0]).clone()
        with optimizer.no_sync():
            loss_of(model, comm.rank, 0).backward()
        model[4].bias.sum().backward()
        optimizer.step()
        return not torch.equal(before, weights(model[0]))

    assert threads.run(rank, 2) == [True, True]


@pytest.mark.parametrize("warm_steps", [0, 3, 15])
def test_a_second_backward_outside_no_sync_is_an_error_that_names_it(warm_steps) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(warm_steps))
        optimizer.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"second backward\(\) before step.*no_sync"):
            loss_of(model, comm.rank, 1).backward()
        with pytest.raises(RuntimeError, match="no_sync"), optimizer.no_sync():
            pass
        optimizer.zero_grad()  # drops the synchronised backward
        train(model, optimizer, range(5))
        return weights(model)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


def test_two_losses_over_different_parameters_may_have_their_own_backward() -> None:
    def rank(comm):
        heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        optimizer = make_optimizer(heads, comm)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(15):
            optimizer.zero_grad()
            heads[0](inputs).square().mean().backward()
            (heads[1](inputs) - 1).square().mean().backward()
            optimizer.step()
        return weights(heads)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("freeze_step", [100, 3])
def test_zero_grad_before_step_drops_the_step(freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=freeze_step)
        train(model, optimizer, range(6))
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        loss_of(model, comm.rank, 6).backward()
        optimizer.zero_grad()
        unchanged = same(before, snapshot(model, optimizer))
        train(model, optimizer, range(7, 12))
        return unchanged, weights(model)

    (unchanged, first), (_, second) = threads.run(rank, 2)
    assert unchanged
    assert torch.equal(first, second)


def test_step_without_any_gradient_changes_nothing() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=3)
        train(model, optimizer, range(6))
        optimizer.zero_grad()
        before = snapshot(model, optimizer)
        optimizer.step()
        return same(before, snapshot(model, optimizer))

    assert threads.run(rank, 2) == [True, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("freeze_step", [100, 3])
def test_one_rank_overflows_all_skip_nothing_changes_one_warning(bad, freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=freeze_step, bucket_bytes=400)
        train(model, optimizer, range(6))
        optimizer.zero_grad()
        before = snapshot(model, optimizer)
        loss = loss_of(model, comm.rank, 6) * (bad if comm.rank == 1 else 1.0)
        loss.backward()
        optimizer.step()
        unchanged = same(before, snapshot(model, optimizer))
        train(model, optimizer, range(7, 20))
        return unchanged, optimizer.skipped_steps, weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(rank, 3)
    assert [result[:2] for result in results] == [(True, 1)] * 3
    assert all(torch.equal(result[2], results[0][2]) for result in results)
    assert bool(torch.isfinite(results[0][2]).all())
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == 1
    assert "step 7 was skipped on every rank" in messages[0]
    assert "on ranks [1]" in messages[0]


@pytest.mark.parametrize("freeze_step", [1000, 5])
def test_grad_scaler_scales_skip_and_stay_alike_on_every_rank(freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=freeze_step)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
        scales = []
        for step in range(40):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            if step in (0, 12) and comm.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, optimizer.skipped_steps, weights(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        results = threads.run(rank, 2)
    assert results[0][0] == results[1][0]
    assert results[0][0][0] == 2.0**9  # rank 1's overflow in the very first step halves rank 0's scale too
    assert results[0][1] == 2
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("freeze_step", [1000, 5])
def test_a_scaler_gives_the_weights_of_no_scaler(freeze_step) -> None:
    def rank(comm):
        results = []
        for scaled in (True, False):
            model = make_model()
            optimizer = make_optimizer(model, comm, freeze_step=freeze_step)
            # Powers of two leave every bit of a gradient but its exponent.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=9, enabled=scaled)
            for step in range(30):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, comm.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            results.append(weights(model))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

    threads.run(rank, 2)


def test_an_overflow_that_other_ranks_scalers_cannot_see_is_an_error_on_every_rank() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu")
        before = weights(model).clone()
        loss = model[:2](torch.randn(4, 6)).sum() * (float("inf") if comm.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        with pytest.raises(RuntimeError, match=r"overflowed on ranks \[1\].*took no part in"):
            scaler.step(optimizer)
        return torch.equal(before, weights(model))

    assert threads.run(rank, 2) == [True, True]


def test_unscaling_before_step_is_an_error_that_says_what_to_do() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, comm.rank, 0)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) was called.*delete the call"):
            scaler.step(optimizer)

    threads.run(rank, 2)


def test_gradients_changed_after_backward_are_an_error() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, comm.rank, 0).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with pytest.raises(RuntimeError, match=r"changed or dropped between backward\(\) and step\(\)"):
                optimizer.step()

    threads.run(rank, 2)


def test_gradients_replaced_after_backward_are_an_error() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        loss_of(model, comm.rank, 0).backward()
        model[2].weight.grad = model[2].weight.grad * 0.5
        with pytest.raises(RuntimeError, match=r"parameter 2 of group 0.* was changed or dropped"):
            optimizer.step()

    threads.run(rank, 2)


def test_an_infinite_gradient_where_coordinates_stay_still_skips_the_step() -> None:
    def rank(comm, compress):
        weight = nn.Parameter(torch.ones(64))
        optimizer = thinwire.OneBitAdam([weight], freeze_step=2, block_size=64, compress=compress, comm=comm)
        for step in range(6):
            weight.grad = torch.ones(64)
            weight.grad[10] = float("inf") if step == 4 and comm.rank == 1 else 0.0
            optimizer.step()
        return optimizer.skipped_steps, bool(torch.isfinite(weight).all())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for compress in ("update", "momentum"):
            assert threads.run(lambda comm, compress=compress: rank(comm, compress), 2) == [(1, True)] * 2


@pytest.mark.parametrize("freeze_step", [100, 5])
def test_a_parameter_that_no_longer_requires_a_gradient_stays(freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=freeze_step, weight_decay=0.1)
        train(model, optimizer, range(8))
        model[2].requires_grad_(False)
        before = weights(model[2]).clone()
        train(model, optimizer, range(8, 14))
        return torch.equal(before, weights(model[2])), weights(model)

    first, second = threads.run(rank, 2)
    assert first[0]
    assert torch.equal(first[1], second[1])


def test_unfreezing_a_parameter_on_one_rank_only_is_an_error_on_every_rank() -> None:
    def rank(comm):
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(4))
        model[0].requires_grad_(comm.rank == 1)
        with pytest.raises(ValueError, match=r"disagree on whether parameter 0 of group 0.* requires a gradient"):
            train(model, optimizer, [4])

    threads.run(rank, 2)


def test_an_overflow_everywhere_with_an_unused_parameter_is_an_ordinary_skip() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + comm.rank))
            # Everywhere in the first step; later on one rank, which then ends within backward and reaches all scalers.
            bad = step == 0 or (step == 3 and comm.rank == 1)
            scaler.scale(model[:2](inputs).square().sum() * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), optimizer.skipped_steps, weights(model)

    first, second = threads.run(rank, 2)
    assert first[:2] == second[:2] == (2.0**8, 2)
    assert torch.equal(first[2], second[2])


def test_learning_rates_that_differ_between_ranks_are_an_error_at_the_next_look() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step="auto")
        train(model, optimizer, range(5))
        optimizer.param_groups[0]["lr"] *= 1 + comm.rank
        with pytest.raises(
            ValueError, match=r"rank 1 has learning rates .* every rank must use the same learning rates"
        ):
            train(model, optimizer, range(5, 20))

    threads.run(rank, 2)


@pytest.mark.parametrize("warm_steps", [0, 5, 15])
def test_a_parameter_skipped_on_one_rank_is_an_error_on_every_rank(warm_steps) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(warm_steps))
        optimizer.zero_grad()
        before = weights(model)
        inputs = torch.randn(4, 6)
        loss = (model[0](inputs) if comm.rank == 1 else model(inputs)).sum()

        def backward_and_step():  # the one raises where the gradients are complete, the other where they are not
            loss.backward()
            optimizer.step()

        with pytest.raises(ValueError, match=r"parameter 2 of group 0.*on ranks \[0, 2\] but none on ranks \[1\]"):
            backward_and_step()
        return torch.equal(before, weights(model))

    assert threads.run(rank, 3) == [True] * 3


@pytest.mark.parametrize("freeze_step", [100, 4])
def test_a_parameter_skipped_on_every_rank_is_left_alone_or_counts_as_zero(freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=freeze_step)
        train(model, optimizer, range(8))
        optimizer.zero_grad()
        before = weights(model[4]).clone()
        model[0](torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        moved = not torch.equal(before, weights(model[4]))
        train(model, optimizer, range(9, 14))
        return moved, weights(model)

    first, second = threads.run(rank, 2)
    assert first[0] == (freeze_step == 4)  # frozen, its momentum goes on
    assert torch.equal(first[1], second[1])


def test_reentrant_checkpointing() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=4, bucket_bytes=256)
        for step in range(10):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), requires_grad=True)
            hidden = torch.utils.checkpoint.checkpoint(model[:2], inputs, use_reentrant=True)
            model[2:](hidden).square().mean().backward()
            optimizer.step()
        return weights(model)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


def test_a_rank_that_drops_a_step_alone_is_found_out_at_the_next() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        loss_of(model, comm.rank, 3).backward()
        if comm.rank == 1:
            optimizer.zero_grad()
        else:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(CommunicationError, match=r"rank \d sent a packet of step \d where step \d was expected"):
            loss_of(model, comm.rank, 4).backward()

    threads.run(rank, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, ValueError, "amsgrad=True cannot work"),
        ({"lr": -1.0}, ValueError, "lr must be at least 0"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas must be"),
        ({"betas": (0.9,)}, ValueError, "betas must be"),
        ({"eps": 0.0}, ValueError, "eps must be above 0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be"),
        ({"freeze_step": 0}, ValueError, "freeze_step must be"),
        ({"freeze_step": -5}, ValueError, "freeze_step must be"),
        ({"freeze_step": 2.5}, ValueError, "freeze_step must be"),
        ({"freeze_step": "soon"}, ValueError, "freeze_step must be"),
        ({"compress": "gradient"}, ValueError, "compress must be"),
        ({"codec": "topk"}, ValueError, "codec must be"),
        ({"block_size": 100}, ValueError, "block_size must be"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be"),
        ({"warmup_wire": "fp8"}, ValueError, "warmup_wire must be"),
    ],
)
def test_bad_options_are_refused_at_construction(options, error, message) -> None:
    def rank(comm):
        with pytest.raises(error, match=message):
            thinwire.OneBitAdam(make_model().parameters(), comm=comm, **options)

    threads.run(rank, 2)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 1.5)}, "betas must be"),
        ({"exp_avg_mask": torch.ones(3, 5)}, r"exp_avg_mask of shape \(3, 5\) does not broadcast"),
    ],
)
def test_a_bad_group_is_refused_and_not_kept(group, message) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model[:2], comm)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [model[2].weight]} | group)
        optimizer.add_param_group({"params": [model[2].weight]})
        return len(optimizer.param_groups)

    assert threads.run(rank, 2) == [2, 2]


def test_the_optimizer_built_last_is_the_one_that_sends() -> None:
    def rank(comm):
        model = make_model()
        train(model, first := make_optimizer(model, comm), range(12))
        sent = first.bytes_sent
        train(model, make_optimizer(model, comm), range(12, 24))
        return first.bytes_sent == sent

    assert threads.run(rank, 2) == [True, True]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_unusable_dtypes_are_refused(dtype) -> None:
    def rank(comm):
        with pytest.raises(TypeError, match=f"is {dtype}: OneBitAdam takes fp32, bf16 and fp16"):
            thinwire.OneBitAdam([nn.Parameter(torch.zeros(3, dtype=dtype))], comm=comm)

    threads.run(rank, 2)


def test_mixed_devices_are_refused() -> None:
    def rank(comm):
        with pytest.raises(TypeError, match="parameter 1 is on meta but parameter 0 on cpu"):
            thinwire.OneBitAdam([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))], comm=comm)

    threads.run(rank, 2)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(3,), (4,)], {}, r"rank 1 and rank 0 differ: 2 parameters against 1 on rank 0"),
        ([(4,)], {}, r"parameter 0 has shape \(4,\).* against \(3,\)"),
        ([(3,)], {"freeze_step": 7}, r"freeze_step is 7 against 'auto'"),
        ([(3,)], {"lr": 0.5}, r"parameter groups are .*0.5"),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(shapes, options, message) -> None:
    def rank(comm):
        mine, mine_options = (shapes, options) if comm.rank == 1 else ([(3,)], {})
        with pytest.raises(ValueError, match=message):
            thinwire.OneBitAdam([nn.Parameter(torch.zeros(shape)) for shape in mine], comm=comm, **mine_options)

    threads.run(rank, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": []}, "empty parameter list"),
        ({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]}, "TypeError: parameter 0"),
        ({"lr": -1.0}, "lr must be at least 0"),
    ],
)
def test_bad_arguments_on_one_rank_are_told_on_every_rank(arguments, message) -> None:
    def rank(comm):
        mine = {"params": [nn.Parameter(torch.zeros(3))]} | (arguments if comm.rank == 1 else {})
        expected = (ValueError, TypeError) if comm.rank == 1 else ValueError
        with pytest.raises(
            expected, match=message.removeprefix("TypeError: ") if comm.rank == 1 else "rank 1 could not"
        ):
            thinwire.OneBitAdam(**mine, comm=comm)

    threads.run(rank, 3)


def test_masks_that_differ_between_ranks_are_an_error() -> None:
    def rank(comm):
        mask = torch.ones(3)
        mask[comm.rank] = 0
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ"):
            thinwire.OneBitAdam([{"params": [nn.Parameter(torch.zeros(3))], "exp_avg_mask": mask}], comm=comm)

    threads.run(rank, 2)


def test_sparse_gradients_are_refused() -> None:
    def rank(comm):
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = make_optimizer(embedding, comm)
        with pytest.raises(ValueError, match=r"has a sparse gradient.*sparse=False"):
            embedding(torch.tensor([1, 2])).sum().backward()
        assert not optimizer.frozen

    threads.run(rank, 2)


def test_requires_grad_that_differs_between_ranks_is_an_error() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        model[0].bias.requires_grad_(comm.rank == 0)
        with pytest.raises(ValueError, match=r"disagree on whether parameter 1 of group 0.* requires a gradient"):
            train(model, optimizer, [0])

    threads.run(rank, 2)
