"""``python -m tests.engine.parts_job TASK``: engines whose ranks hold parts of a model, against one process."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from tests.launching import same_on_all_ranks
from tests.parallel.training import MICRO_BATCHES, RATE, ROWS, Alone, batches, bert, gpt2
from tests.refusing import refused
from thinwire import comm, deepspeed, initialize
from thinwire.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from thinwire.engine import ConfigError
from thinwire.parallel import Pipeline

STEPS, FEW = 2, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
}


def parted(stages: int, cut: int, **config: Any) -> dict[str, Any]:
    return CONFIG | {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": cut}} | config


def check(make: Callable[[], Any], stages: int, cut: int, on: str = "cpu", **config: Any) -> None:
    """Losses and norms of every step, known on every rank, and of an evaluation. A gradient or a clipping that is wrong
    shows in the norm of its own step and in the loss of the next; further steps add rounding.

    A model `on` "meta" gets its values from files."""
    world = comm.init()
    with torch.device(on):
        model = make()
    if on == "meta":
        config["initial_weights"] = world.all_gather_bytes(tempfile.mkdtemp().encode(), "share files")[0].decode()
        if world.rank == 0:
            make().save_pretrained(config["initial_weights"], max_shard_size="10KB")
        world.barrier()
    engine, _optimizer, _, schedule = initialize(
        model=model,
        config=parted(stages, cut, gradient_clipping=1.0, gradient_accumulation_steps=FEW, **config),
        lr_scheduler=lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0),
    )
    assert engine.mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert engine.mesh.mesh.flatten().tolist() == [*range(world.size)]
    assert (engine.num_stages, engine.comm.size, engine.mp_world_size) == tuple(engine.mesh.mesh.shape)
    stream = batches(engine.comm.rank)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(stream))
        norms.append(engine.get_global_grad_norm())
    found = torch.stack([*losses, engine.eval_batch(stream), *torch.tensor(norms)])
    assert same_on_all_ranks(world, found)
    assert engine.module.training
    assert engine.global_steps == schedule.last_epoch == STEPS
    assert engine.micro_steps == STEPS * FEW
    assert engine.global_samples == STEPS * FEW * ROWS * engine.comm.size
    assert {name for name, _ in engine.module.named_parameters()} <= {*make().state_dict()}
    if world.rank == 0:
        alone = Alone(make(), engine.comm.size, 1.0, FEW)
        expected = [alone.step() for _ in range(STEPS)] + [float(alone.loss(alone.streams).detach())]
        assert found[: STEPS + 1].tolist() == pytest.approx(expected, rel=1e-5), (make, stages, cut)
        assert norms == pytest.approx(alone.norms, rel=1e-4), (make, stages, cut)


def two() -> None:
    for task in (own_loader, half, groups, layers, lossless, unbuilt, refusals):
        task()
    for make in (partial(bert, 2), gpt2):
        check(make, 1, 2)
        check(make, 2, 1)
    check(gpt2, 2, 1, zero_optimization={"stage": 1}, activation_checkpointing={"modules": ["GPT2Block"]})
    rounded()


def four() -> None:
    check(bert, 2, 1)
    check(gpt2, 2, 1, on="meta", zero_optimization={"stage": 1})
    check(gpt2, 1, 2, on="meta")
    check(partial(bert, 2), 1, 2, zero_optimization={"stage": 2})
    check(partial(bert, 2), 2, 2, on="meta")  # with replicas too: `cube` of tests/parallel


def rounded() -> None:
    """In bf16, with a frozen block, the same as where every rank has the whole model, but for rounding."""
    losses = []
    for stages, cut in ((1, 1), (2, 1), (1, 2)):
        model = bert(2)
        model.bert.encoder.layer[0].requires_grad_(False)
        engine, *_ = initialize(
            model=model, config=parted(stages, cut, bf16={"enabled": True}, gradient_accumulation_steps=FEW)
        )
        stream = batches()
        losses.append([float(engine.train_batch(stream)) for _ in range(STEPS)])
        assert losses[-1] == pytest.approx(losses[0], rel=5e-3), (stages, cut)


def own_loader() -> None:
    """Epoch after epoch, the last samples left out; all ranks of a model get the same ones."""
    samples = [next(batches()) for _ in range(4)]
    rows = [{name: value[row] for name, value in one.items()} for one in samples for row in range(ROWS)][:10]
    engine, _, loader, _ = initialize(model=gpt2(), config=parted(2, 1, steps_per_print=1), training_data=rows)
    for step in (1, 2):
        engine.train_batch()
        assert (loader.epoch, loader.consumed) == (step, 3 * step)  # of 9 that fill micro-batches
    refused(ValueError, "an iterator, not a list", engine.train_batch, samples)
    refused(ValueError, "only 3 micro-batches were left", engine.train_batch, iter(samples[1:]))


def half() -> None:
    """fp16's scale goes through the schedule: what overflows is skipped, and no loss is scaled."""
    scaled = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}, "gradient_accumulation_steps": FEW}
    engine, *_ = initialize(model=gpt2(), config=parted(2, 1, **scaled))
    whole, *_ = initialize(model=gpt2(), config=CONFIG | scaled)
    before = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    stream, same = batches(), batches()
    for step in range(10):
        loss, expected = engine.train_batch(stream), whole.train_batch(same)
        assert float(loss) == pytest.approx(float(expected), rel=1e-3)
        assert (engine.skipped_steps, engine.loss_scaler.value) == (whole.skipped_steps, whole.loss_scaler.value)
        if step == 0:
            assert not engine.was_step_applied()
            assert all(torch.equal(before[name], one) for name, one in engine.module.named_parameters())
    assert 1 < engine.skipped_steps < 8


def groups() -> None:
    """An optimizer of the user's, whose groups keep their rates on every stage, empty or not."""
    model, world = gpt2(), comm.init()
    ends = [one for name, one in model.named_parameters() if ".h." not in name]
    first = [one for name, one in model.named_parameters() if ".h.0." in name]
    optimizer = torch.optim.AdamW([{"params": ends, "lr": 0.0}, {"params": first, "lr": 0.5}], lr=RATE)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=parted(2, 1))
    before = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    engine.train_batch(batches())
    moved = {name for name, one in engine.module.named_parameters() if not torch.equal(before[name], one)}
    assert moved == ({name for name in before if ".h.0." in name} if world.rank == 0 else set())
    assert engine.get_lr() == [0.0, 0.5]


class Embedded(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) * 0.1)
        self.places = nn.Parameter(torch.randn(5, width) * 0.1)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.weight[given[0]] + self.places, given[1]


class Inner(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return given[0] + torch.tanh(super().forward(given[0])) * given[1].unsqueeze(-1), given[1]


def specs() -> list[Any]:
    embedded = TiedLayerSpec("words", Embedded, 50, 16)
    head = TiedLayerSpec("words", Embedded, 50, 16, forward_fn=lambda module, given: given @ module.weight.T)
    return [embedded, *[LayerSpec(Inner, 16, 16) for _ in range(4)], lambda given: given[0], head]


def layered(stages: int, **options: Any) -> PipelineModule:
    model = PipelineModule(specs(), num_stages=stages, loss_fn=entropy, **options)
    draws = torch.Generator().manual_seed(6)  # not the global one, which ranks on threads share
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.1, generator=draws)
    return model


class Entropy(nn.Module):
    """A loss that is a module, and none of the layers."""

    def forward(self, output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        losses = nn.functional.cross_entropy(output.flatten(0, 1), labels[0].flatten(), reduction="none")
        return (losses * labels[1].flatten()).mean()


entropy = Entropy()


def pairs() -> Iterator[Any]:
    draws = torch.Generator().manual_seed(7)
    while True:
        words = torch.randint(50, (ROWS, 5), generator=draws)
        yield (words, torch.rand(ROWS, 5, generator=draws)), (words, torch.ones(ROWS, 5))


def layers() -> None:
    """DeepSpeed's modules, whose layers pass tuples, and the same trained in one stage."""
    losses = []
    for stages, options, at in (
        (1, {}, 1),
        (2, {}, 3),
        (2, {"partition_method": "uniform", "activation_checkpoint_interval": 2}, 4),
        (2, {"partition_method": "type:inner"}, 3),
    ):
        model = layered(stages, **options)
        trained = [one for one in model.parameters() if one.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config={**CONFIG, "pipeline": {}})
        stream = pairs()
        losses.append(
            [float(engine.train_batch(data_iter=stream)) for _ in range(5)] + [float(engine.eval_batch(pairs()))]
        )
        assert engine.is_first_stage() == (engine.stage_id == 0)
        assert engine.is_last_stage() == (engine.stage_id == stages - 1)
        names = {int(name.partition(".")[0]) for name in engine.module.state_dict()}
        assert stages == 1 or (min(names) == at if engine.stage_id else max(names) == at - 1)
        assert losses[-1] == pytest.approx(losses[0], rel=1e-5), options
    grid = engine.grid
    assert engine.is_pipe_parallel
    assert (grid.get_stage_id(), grid.pipe_parallel_size, grid.is_last_stage) == (engine.stage_id, 2, engine.stage_id)
    assert grid.stage_to_global(grid.get_stage_id()) == grid.get_global_rank() == engine.global_rank
    engine.set_dataiterator(pairs())
    engine.train_batch()
    strange = iter([({"words": 1}, 1)] * MICRO_BATCHES)
    refused(ValueError, "tensors with a row a sample, and one is of class dict", engine.train_batch, strange)


def lossless() -> None:
    """DeepSpeed's modules without a loss function: what the last layer gives is the loss."""
    found = []
    for stages in (1, 2):
        ends = [nn.Linear(4, 4), nn.Linear(4, 4)]
        for one in (one for layer in ends for one in layer.parameters()):
            nn.init.constant_(one, 0.5)
        model = PipelineModule([*ends, lambda output: output.square().mean()], stages, partition_method="type:linear")
        engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "pipeline": {}})
        engine.set_batch_fn(lambda number: (torch.full((ROWS, 4), float(number)), None))
        numbers = list(range(engine.micro_batches))
        found.append([float(take(iter(numbers))) for take in (engine.train_batch, engine.eval_batch)])
    assert found[0] == pytest.approx(found[1])
    assert found[0][0] > found[0][1] > 0
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 1)
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "pipeline": {}})
    told = "without loss_fn has its last layer's output for its loss.* this one has shape"
    refused(ValueError, told, engine.train_batch, iter([(torch.ones(ROWS, 4), None)] * MICRO_BATCHES))


def unbuilt() -> None:
    """On the meta device, layers begin as their specs build them; others' modules as they reset themselves."""
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = PipelineModule(specs(), num_stages=2, loss_fn=entropy, seed_layers=True)
        kept = [*model.parameters()]
        engine, *_ = initialize(model=model, config={**CONFIG, "pipeline": {}})
        assert {*map(id, engine.module.parameters())} < {*map(id, kept)}
        stream = pairs()
        found.append([float(engine.train_batch(stream)) for _ in range(3)])
        assert device == "cpu" or {one.device.type for one in kept} == {"cpu", "meta"}
    assert found[0] == found[1]
    before = torch.get_rng_state()
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    pipeline = Pipeline(plain, 2, loss_fn=nn.functional.mse_loss)
    assert all(one.isfinite().all() for one in pipeline.parameters())
    assert not torch.equal(torch.get_rng_state(), before), "the next model would begin alike"
    file = f"{tempfile.mkdtemp()}/begin.safetensors"
    save_model(gpt2(), file)
    with torch.device("meta"):
        turned = gpt2()  # in a V, one rank holds both ends, and what they share
    losses = [
        Pipeline(one, MICRO_BATCHES, schedule="ZBVZeroBubble", weights=weights).train_batch(batches())
        for one, weights in ((gpt2(), None), (turned, file))
    ]
    assert losses[0] == losses[1]
    with torch.device("meta"):
        bare = nn.Sequential(*[Embedded(2, 2) for _ in range(2)])
    told = r"'\d.weight' is on the meta device, and nothing says what it begins with"
    refused(ValueError, told, Pipeline, bare, 2, loss_fn=nn.functional.mse_loss)


def refusals() -> None:
    rank = comm.init().rank
    for told, model, config in (
        ("no plan of how to cut a Linear", nn.Linear(2, 2), parted(1, 2)),
        ("Linear cannot be split", nn.Linear(2, 2), parted(2, 1)),
        ("this one has its values", gpt2(), parted(2, 1, initial_weights="nowhere")),
        ("give the model its values before", gpt2(), CONFIG | {"initial_weights": "nowhere"}),
        ("has no loss of its own: give loss_fn", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), parted(2, 1)),
        ("no stage can begin with 'h.1'", gpt2(), CONFIG | {"pipeline": {"stages": 2, "split": ["h.1"]}}),
        (
            '"pipeline.schedule" must be "1F1B" or "Eager1F1B" or .*got "2F2B"',
            gpt2(),
            CONFIG | {"pipeline": {"stages": 2, "schedule": "2F2B"}},
        ),
        ('"pipeline.stages" 3 .* = 3 ranks hold a model, and 2 ranks', gpt2(), parted(3, 1)),
        (
            '"pipeline.stages" does not go with zero_optimization.stage 2',
            gpt2(),
            parted(2, 1, zero_optimization={"stage": 2}),
        ),
    ):
        refused(ValueError, told, initialize, model=model, config=config)
    model = layered(2)
    refused(
        ConfigError,
        '"pipeline.stages" is 1',
        deepspeed.initialize,
        model=model,
        config=CONFIG | {"pipeline": {"stages": 1}},
    )
    model = gpt2()
    for one in [*model.transformer.h[2:].parameters(), *model.transformer.ln_f.parameters(), model.lm_head.weight]:
        one.requires_grad_(False)
    told = "nothing of the stage that is here" if rank else "rank 1 could not train its stage"
    refused(ValueError, told, initialize, model=model, config=parted(2, 1))
    engine, *_ = initialize(model=gpt2(), config=parted(2, 1))
    batch = next(batches())
    refused(RuntimeError, "stages of the model only.*call train_batch", engine, **batch)
    refused(
        RuntimeError,
        "backward.. was called on one micro-batch.*train_batch",
        engine.backward,
        torch.ones((), requires_grad=True),
    )
    refused(RuntimeError, "step.. was called on one micro-batch.*train_batch", engine.step)
    refused(RuntimeError, "are as initialize made them", engine.set_train_batch_size, 24)
    refused(ValueError, "no loader to take micro-batches from", engine.train_batch)


if __name__ == "__main__":
    comm.init(backend="gloo", timeout=60.0)
    globals()[sys.argv[1]](*sys.argv[2:])
