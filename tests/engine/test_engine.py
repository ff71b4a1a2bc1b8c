"""Training through the engine is training in plain torch, whatever the stage, the ranks and the accumulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.tiny import FEATURES, MICRO, Tiny, batch, loss_of, make_engine, reference, settings, train
from thinwire import initialize
from thinwire.comm import threads

PRECISIONS = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 8}}


@pytest.mark.parametrize(
    ("world", "steps", "accumulation", "max_norm"),
    [(1, 25, 1, 0.0), (3, 25, 1, 0.0), (4, 15, 1, 0.0), (1, 15, 3, 0.2), (3, 15, 3, 0.2)],
)
def test_losses_are_plain_torchs(world, steps, accumulation, max_norm) -> None:
    expected = torch.tensor(reference(world, steps, accumulation, max_norm))

    def body(comm):
        losses = []
        for stage in (0, 1, 2):
            config = settings(stage, gradient_accumulation_steps=accumulation, gradient_clipping=max_norm)
            losses.append(torch.tensor(train(make_engine(comm, config), range(steps))))
        return losses

    for losses in threads.run(body, world):
        for of_stage in losses:
            torch.testing.assert_close(of_stage, expected, rtol=1e-5, atol=0)
        # Every stage gives the same bits, but that stage 2 adds averages where the others average sums.
        assert torch.equal(losses[0], losses[1])
        if accumulation == 1:
            assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_16_bit_follows_fp32(precision, accumulation) -> None:
    expected = reference(2, 25, accumulation, max_norm=0.5)

    def body(comm):
        results = []
        for stage in (0, 1, 2):
            config = settings(stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.5)
            engine = make_engine(comm, config | {precision: PRECISIONS[precision]})
            losses = train(engine, range(25))
            dtypes = {value.dtype for value in engine.module.state_dict().values()}
            results.append((losses, dtypes, engine.skipped_steps))
        return results

    for losses, dtypes, skipped in threads.run(body, 2)[0]:
        assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert skipped == 0
        assert abs(sum(losses[-10:]) - sum(expected[-10:])) < 0.03 * sum(expected[-10:])


def test_counts_and_what_there_is_to_know() -> None:
    def body(comm):
        config = settings(
            gradient_accumulation_steps=2, scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
        )
        engine = make_engine(comm, config)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4 * MICRO, MICRO)
        assert engine.gradient_accumulation_steps() == 2
        assert engine.get_global_grad_norm() is None
        before = engine.module.mix.weight.clone()
        loss = loss_of(engine, comm.rank, 0)
        assert not engine.is_gradient_accumulation_boundary()
        assert torch.equal(engine.backward(loss), loss.detach() / 2)
        engine.step()
        assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (1, 0, False)
        assert torch.equal(engine.module.mix.weight, before)
        assert engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine, comm.rank, 1))
        engine.step()
        assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (2, 1, 4 * MICRO)
        assert engine.was_step_applied()
        assert not torch.equal(engine.module.mix.weight, before)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert engine.get_lr() == [0.005]
        assert engine.get_global_grad_norm() > 0
        engine.close()

    threads.run(body, 2)


def test_what_the_engine_lacks_is_the_models() -> None:
    engine = make_engine(None, settings())
    assert isinstance(engine.layers, nn.ModuleList)
    assert [name for name, _ in engine.named_parameters()][:2] == ["frozen", "nothing"]
    engine.eval()
    assert not engine.module.layers[0].training
    engine.train()
    assert engine.module.layers[0].training
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = engine.nonsense
    with pytest.raises(AttributeError, match=r"no half\(\)"):
        engine.half()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_on_their_way_are_there_through_module_and_in_files(stage, tmp_path) -> None:
    def body(comm):
        zero = settings(stage)["zero_optimization"]
        waiting = make_engine(comm, settings(stage, zero_optimization=zero | {"overlap_comm": True}))
        plain = make_engine(comm, settings(stage))
        for step in range(4):
            assert train(waiting, [step]) == train(plain, [step])
            weights = [list(engine.module.parameters()) for engine in (waiting, plain)]
            assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        assert train(waiting, [4]) == train(plain, [4])
        waiting.save_16bit_model(tmp_path, "waiting.safetensors")
        plain.save_16bit_model(tmp_path, "plain.safetensors")

    threads.run(body, 3)
    assert (tmp_path / "waiting.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_no_sync_adds_up_what_one_backward_gives() -> None:
    def body(comm, stage):
        whole = make_engine(comm, settings(stage))
        split = make_engine(comm, settings(stage, train_micro_batch_size_per_gpu=MICRO // 2))
        for step in range(5):
            inputs, wanted = batch(comm.rank, step)
            with split.no_sync():
                split.backward((split(inputs[:2]) - wanted[:2]).square().sum() / wanted.numel())
                split.backward((split(inputs[2:3]) - wanted[2:3]).square().sum() / wanted.numel())
                with pytest.raises(RuntimeError, match="inside no_sync"):
                    split.step()
            split.backward((split(inputs[3:]) - wanted[3:]).square().sum() / wanted.numel())
            split.step()
            whole.backward((whole(inputs) - wanted).square().mean())
            whole.step()
        torch.testing.assert_close(split.module.mix.weight, whole.module.mix.weight)

    for stage in (0, 1, 2):
        threads.run(lambda comm, stage=stage: body(comm, stage), 3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_share_of_a_16_bit_loss_comes_back_in_fp32(precision) -> None:
    engine = make_engine(None, settings(gradient_accumulation_steps=3, **{precision: {"enabled": True}}))
    loss = engine(batch(0, 0)[0]).sum()
    share = engine.backward(loss)
    assert loss.dtype != torch.float32
    assert torch.equal(share, loss.detach().float() / 3)
    assert not share.requires_grad


def test_shares_of_a_step_are_not_divided_again(tmp_path) -> None:
    """Losses that the caller has divided, in steps of other lengths than configured: the same weights and logs."""

    def body(comm, stage):
        def make(accumulation, name):
            log = {"enabled": True, "output_path": str(tmp_path), "job_name": f"{name}-{stage}"}
            return make_engine(comm, settings(stage, gradient_accumulation_steps=accumulation, csv_monitor=log))

        divided, shared = make(2, "divided"), make(3, "shared")
        for step in range(4):
            for part in range(2):
                loss = loss_of(divided, comm.rank, 2 * step + part)
                divided.backward(loss)
                divided.step()
                shared.set_gradient_accumulation_boundary(part == 1)
                shared.backward(loss_of(shared, comm.rank, 2 * step + part) / 2, scale_wrt_gas=False)
                shared.step()
        assert shared.global_steps == divided.global_steps == 4
        torch.testing.assert_close(shared.module.mix.weight, divided.module.mix.weight)
        divided.close()
        shared.close()

    for stage in (0, 2):
        threads.run(lambda comm, stage=stage: body(comm, stage), 2)
        losses = [
            [float(line.split(",")[1]) for line in path.read_text().splitlines()[1:]]
            for name in ("divided", "shared")
            for path in (tmp_path / f"{name}-{stage}").glob("*loss.csv")
        ]
        assert len(losses) == 2
        assert losses[0] == pytest.approx(losses[1])


def test_a_step_can_be_dropped() -> None:
    def body(comm, stage):
        config = settings(stage, gradient_accumulation_steps=2)
        dropping, plain = make_engine(comm, config), make_engine(comm, config)
        for micro in range(2):
            dropping.backward(loss_of(dropping, comm.rank, 99 + micro))
            if micro == 0:
                dropping.step()
        dropping.zero_grad()
        assert dropping.micro_steps == 0
        assert train(dropping, range(3)) == train(plain, range(3))

    for stage in (0, 1, 2):
        threads.run(lambda comm, stage=stage: body(comm, stage), 2)


def test_boundaries_can_be_set() -> None:
    def body(comm):
        engine = make_engine(comm, settings(gradient_accumulation_steps=2))
        for micro in range(4):
            engine.set_gradient_accumulation_boundary(micro in (2, 3))
            engine.backward(loss_of(engine, comm.rank, micro))
            engine.step()
        assert (engine.micro_steps, engine.global_steps) == (4, 2)
        engine.set_gradient_accumulation_boundary(None)
        assert not engine.is_gradient_accumulation_boundary()

    threads.run(body, 2)


def test_inputs_of_many_kinds_reach_the_model_in_its_dtype() -> None:
    class Sum(Tiny):
        def forward(self, pair, *, scale):
            first, second = pair["both"]
            assert first.dtype == second.dtype == scale.dtype == torch.bfloat16
            assert pair["count"].dtype == torch.int64
            return super().forward(first + second) * scale

    engine, *_ = initialize(model=Sum(), config=settings(bf16={"enabled": True}))
    ones = torch.ones(MICRO, FEATURES)
    inputs = {"both": (ones, ones.double()), "count": torch.arange(3), "name": "x"}
    engine.backward(engine(inputs, scale=torch.ones(1)).float().mean())
    engine.step()
    assert engine.was_step_applied()
