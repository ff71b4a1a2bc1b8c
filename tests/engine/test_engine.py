"""Training through the engine is training in plain torch, whatever the stage, the ranks and the accumulation; without
an optimizer it evaluates."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine import tiny
from tests.engine.tiny import BF16, MICRO, at_stages, batch, loss_of, make_engine, make_model, settings, train, weights
from tests.launching import on_threads
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import CallError

PRECISIONS = BF16 | {"fp16": {"enabled": True, "initial_scale_power": 8}}


@pytest.mark.parametrize(
    ("world", "steps", "accumulation", "max_norm"), [(1, 12, 1, 0.0), (4, 12, 1, 0.0), (1, 6, 3, 0.2), (3, 6, 3, 0.2)]
)
def test_losses_are_plain_torchs(world, steps, accumulation, max_norm) -> None:
    expected = torch.tensor(tiny.reference(world, steps, accumulation, max_norm))

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


@pytest.mark.parametrize(
    ("precision", "accumulation", "codec", "tolerance"),
    [("bf16", 1, None, 3e-3), ("fp16", 2, None, 3e-3), ("bf16", 2, "int4", 0.03), ("fp16", 1, "int8", 3e-3)],
)
@on_threads(2)
def test_16_bit_follows_fp32(comm, precision, accumulation, codec, tolerance) -> None:
    """With SGD: AdamW divides by what rounding adds, and comes to as good losses another way, several percent apart."""
    sgd = {"type": "SGD", "params": {"lr": 0.05}}
    common = {"optimizer": sgd, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5}
    exact = make_engine(comm, settings(0, **common))
    expected = train(exact, range(16))
    assert expected[-1] < 0.7 * expected[0]
    for stage in (0, 1, 2):
        config = settings(stage, communication_codec=codec, **common)
        engine = make_engine(comm, config | {precision: PRECISIONS[precision]})
        assert sum(train(engine, range(16))[-10:]) == pytest.approx(sum(expected[-10:]), rel=tolerance)
        dtypes = {value.dtype for value in engine.module.state_dict().values()}
        assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert engine.skipped_steps == 0
        assert (engine.optimizer.bytes_sent < 0.45 * exact.optimizer.bytes_sent) == (codec is not None)


@on_threads(2)
def test_counts_and_what_there_is_to_know(comm) -> None:
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_evaluation_has_rank_0s_means_of_a_batch_norm(comm, stage) -> None:
    """As under DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    engine = make_engine(comm, settings(stage), model=model)
    for step in range(3):
        engine.backward(engine(batch(comm.rank, step)[0]).square().mean())
        engine.step()
    of_rank_0 = model[1].running_mean.clone()
    comm.broadcast(of_rank_0)
    assert torch.equal(model[1].running_mean, of_rank_0) is (comm.rank == 0)
    engine.eval()
    assert torch.equal(model[1].running_mean, of_rank_0)


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


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(3)
def test_no_sync_adds_up_what_one_backward_gives(comm, stage) -> None:
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


def test_a_share_of_a_loss_comes_back_in_its_dtype() -> None:
    engine = make_engine(None, settings(gradient_accumulation_steps=3, **BF16))
    loss = engine(batch(0, 0)[0]).sum()
    share = engine.backward(loss)
    assert share.dtype == loss.dtype == torch.bfloat16
    assert torch.equal(share, loss.detach() / 3)
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
        shared.set_gradient_accumulation_boundary(None)
        assert not shared.is_gradient_accumulation_boundary()
        torch.testing.assert_close(shared.module.mix.weight, divided.module.mix.weight)
        divided.close()
        shared.close()

    at_stages(body, 0, 2)
    for stage in (0, 2):
        losses = [
            [float(line.split(",")[1]) for line in path.read_text().splitlines()[1:]]
            for name in ("divided", "shared")
            for path in (tmp_path / f"{name}-{stage}").glob("*loss.csv")
        ]
        assert len(losses) == 2
        assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_a_step_can_be_dropped(comm, stage) -> None:
    config = settings(stage, gradient_accumulation_steps=2)
    dropping, plain = make_engine(comm, config), make_engine(comm, config)
    for micro in range(2):
        dropping.backward(loss_of(dropping, comm.rank, 99 + micro))
        if micro == 0:
            dropping.step()
    dropping.zero_grad()
    assert dropping.micro_steps == 0
    assert train(dropping, range(3)) == train(plain, range(3))


def test_inputs_by_place_and_by_name_reach_the_model_in_its_dtype() -> None:
    class Scaled(tiny.Tiny):
        def forward(self, inputs, *, scale):
            assert inputs.dtype == scale.dtype == torch.bfloat16
            return super().forward(inputs) * scale

    engine, *_ = initialize(model=Scaled(), config=settings(**BF16))
    assert engine(torch.ones(MICRO, tiny.FEATURES), scale=torch.ones(1)).dtype == torch.bfloat16


# Without an optimizer


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("precision", [{}, BF16])
@on_threads(2)
def test_weights_of_a_training_job_are_evaluated(comm, stage, tmp_path, precision) -> None:
    trained = make_engine(comm, settings(stage, **precision))
    train(trained, range(2))
    assert trained.save_checkpoint(tmp_path / str(stage), "two")
    config = settings(stage, optimizer=None, **precision)
    engine, optimizer, loader, schedule = initialize(model=make_model(7), comm=comm, config=config)
    assert (optimizer, engine.optimizer, loader, schedule) == (None, None, None, None)
    assert engine.get_lr() == engine.get_mom() == []
    assert engine.load_checkpoint(tmp_path / str(stage))[0] is not None
    assert (engine.global_steps, engine.loaded_checkpoint_dp_world_size) == (2, comm.size)
    engine.eval()
    trained.eval()
    inputs, _ = batch(comm.rank, 0)
    with torch.no_grad():
        assert torch.equal(engine(inputs), trained(inputs))
    assert tiny.equal(weights(engine), weights(trained.module))
    engine.destroy()


def test_it_takes_and_saves_rank_0s_weights_which_others_load(tmp_path) -> None:
    def body(comm):
        model = make_model(3 + comm.rank).requires_grad_(False)  # there is nothing to train, and nothing has to be
        engine = make_engine(comm, settings(0, optimizer=None), model=model)
        expected = weights(make_model(3))
        assert engine.save_checkpoint(tmp_path / "checkpoints", client_state={"of": "evaluation"})
        assert engine.save_16bit_model(tmp_path, "model.safetensors")
        other = make_engine(comm, settings(1, optimizer=None), seed=5)
        assert other.load_checkpoint(tmp_path / "checkpoints")[1] == {"of": "evaluation"}
        trained = make_engine(comm, settings(1), seed=6)
        trained.load_checkpoint(tmp_path / "checkpoints", load_optimizer_states=False)
        with pytest.raises(ValueError, match="none"):
            trained.load_checkpoint(tmp_path / "checkpoints")
        assert all(tiny.equal(weights(one.module), expected) for one in (engine, other, trained))
        other.load_state_dict(make_model(7).state_dict())
        assert tiny.equal(weights(other.module), weights(make_model(7)))

    threads.run(body, 2)
    assert load_file(tmp_path / "model.safetensors").keys() <= tiny.Tiny().state_dict().keys()


def test_it_cannot_train() -> None:
    engine = make_engine(None, settings(0, optimizer=None))
    loss = engine(batch(0, 0)[0]).mean()
    for call in (lambda: engine.backward(loss), lambda: engine.scale(loss), engine.step, engine.end_backward):
        with pytest.raises(CallError, match="an engine without an optimizer, which evaluates only: to train, pass one"):
            call()
    loss.backward()
    with pytest.raises(AssertionError, match="without an optimizer"):
        engine.step()
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.parameters())
    with pytest.raises(AttributeError, match=r"no load_state_dict\(\)"):
        make_engine(None, settings()).load_state_dict({})
