"""DeepSpeed's checkpoints become thinwire's: the same bits, on any number of ranks, and training goes on as it would
have."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.deepspeed.files import deepspeed_files
from tests.deepspeed.files.deepspeed_files import Trained, write_sharded, write_universal, write_unsharded
from tests.engine.checkpoint.jobs import missing, same
from tests.pairwise import pairwise
from tests.refusing import refused
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.deepspeed.files.importing import Imported, import_checkpoint
from thinwire.deepspeed.files.pickles import read_pickle, take_answers
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError

WORDS, WIDTH = 7, 5


class Model(nn.Module):
    """With tied, frozen and scalar parameters, several of a shape, and buffers."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.tensor([1.5, 2.5]))
        self.register_buffer("count", torch.tensor(3))
        if frozen:
            self.still.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.still(self.words(tokens))
        return self.head(hidden + self.scale * self.down(torch.tanh(self.up(hidden))))


def make(seed: int, frozen: bool = True) -> tuple[Model, list[list[str]]]:
    """A model, and its trained parameters by name: matrices, and the rest."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(frozen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return model, [[name for name in names if (model.get_parameter(name).dim() > 1) == wide] for wide in (True, False)]


def groups_of(model: Model, groups: list[list[str]]) -> list[dict[str, Any]]:
    params = [[model.get_parameter(name) for name in names] for names in groups]
    return [{"params": params[0], "weight_decay": 0.1}, {"params": params[1], "weight_decay": 0.0, "lr": 2e-3}]


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    tokens = torch.randint(0, WORDS, (3, 4), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).float().reshape(-1, WORDS), tokens.flip(1).reshape(-1))


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_trained(seed: int, frozen: bool = True, **client_state: Any) -> Trained:
    model, groups = make(seed, frozen)
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=1e-2)
    train(model, optimizer, range(4))
    return Trained(model, optimizer, groups, {"epoch": 3, **client_state})


def read_here(files: Sequence[Path], folder: Path) -> list[Any]:
    """As `read_apart`, without a process."""
    return take_answers(files, [read_pickle(path, folder / f"{number}.pt") for number, path in enumerate(files)])


def imported(folder: Path, tag: str | None = None, **options: Any) -> Imported:
    return import_checkpoint(folder, folder.with_name("imported"), tag, read=read_here, **options)


def check_bits(folder: Path, trained: Trained, dtype: torch.dtype) -> None:
    """Weights, master weights, moments and step counts are those of the model, every bit."""
    with CheckpointStore(folder, threads.single(10.0)).load() or missing() as found:
        model = trained.model
        assert list(found.model.parameters) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            values = parameter.detach().flatten()
            numel = values.numel()
            assert found.model.parameters[name] == (tuple(parameter.shape), dtype)
            assert same(found.read("weight", name, 0, numel), values.to(dtype)), name
            if not parameter.requires_grad:
                continue
            if dtype != torch.float32:
                assert same(found.read("master", name, 0, numel), values), name
            for kind in ("exp_avg", "exp_avg_sq"):
                assert same(found.read(kind, name, 0, numel), trained.moment(kind, name).flatten()), (kind, name)
            assert float(found.read("scalar.step", name, 0, 1)) == 4
        buffers = found.buffers()
        assert same(buffers["seen"], model.seen)
        assert same(buffers["count"], model.count)


def settings(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40},
        **({"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}),
    }


def go_on(comm: Communicator, folder: Path, stage: int, dtype: torch.dtype, frozen: bool = True) -> list[float]:
    """The losses of four more steps, from the checkpoint in `folder`."""
    model, groups = make(9, frozen)
    engine, *_ = initialize(
        model=model, model_parameters=groups_of(model, groups), config=settings(stage, dtype), comm=comm
    )
    _, client_state = engine.load_checkpoint(folder)
    assert client_state["epoch"] == 3
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (4, 16, 1)
    assert engine.module.head.weight is engine.module.words.weight
    losses = []
    for step in range(4, 8):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def check_going_on(folder: Path, trained: Trained, frozen: bool = True) -> None:
    """On 1, 2 and 4 ranks, at stages 0, 1 and 2, as torch's AdamW goes on."""
    expected = torch.tensor(train(trained.model, trained.optimizer, range(4, 8)))
    for world, stage in ((1, 1), (2, 2), (4, 0), (4, 1)):
        go = partial(go_on, folder=folder, stage=stage, dtype=torch.float32, frozen=frozen)
        for losses in threads.run(go, world):
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=1e-6)


SHARDED = pairwise([torch.float32, torch.bfloat16, torch.float16], [1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        *((partial(write_sharded, stage=stage, world=world), dtype) for dtype, stage, world in SHARDED),
        (partial(write_sharded, stage=2, world=3, elastic=True), torch.float32),
        (partial(write_sharded, stage=3, world=3, sub_group=30), torch.float32),
        *((partial(write_universal, stage=s), dtype) for s in (1, 3) for dtype in (torch.float32, torch.bfloat16)),
        *((partial(write_unsharded, flat=False), dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((partial(write_unsharded, flat=True), dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_every_layout_and_precision(tmp_path, write, dtype) -> None:
    trained = make_trained(5, frozen=write.func is not write_unsharded or dtype != torch.float32)
    write(tmp_path / "in", trained, dtype=dtype)
    done = imported(tmp_path / "in")
    assert done.optimizer == "AdamW"
    assert done.notes == [] or write.func is not write_sharded
    check_bits(tmp_path / "imported", trained, dtype)


@pytest.mark.parametrize(
    "write",
    [
        *(partial(write_sharded, stage=stage, world=2) for stage in (1, 2, 3)),
        partial(write_sharded, stage=3, world=3, sub_group=30),
        write_unsharded,
    ],
)
def test_training_goes_on(tmp_path, write) -> None:
    trained = make_trained(3, frozen=write is not write_unsharded)
    write(tmp_path / "in", trained)
    imported(tmp_path / "in")
    check_going_on(tmp_path / "imported", trained, frozen=write is not write_unsharded)


def test_nothing_is_guessed_without_zero(tmp_path) -> None:
    """Numbered parameters, and a frozen layer that is as large as the trained one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    write_unsharded(tmp_path / "in", Trained(model, optimizer, [["1.weight", "1.bias"]]))
    refused(CheckpointError, r"more than one way .* ZeRO stage 1.*--weights-only", imported, tmp_path / "in")
    assert imported(tmp_path / "in", weights_only=True).optimizer is None
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine, *_ = initialize(model=other, config=settings(1, torch.float32))
    engine.load_checkpoint(tmp_path / "imported", load_module_only=True)
    assert all(same(one, model.state_dict()[name]) for name, one in engine.module.state_dict().items())


def test_the_optimizer_is_found_or_asked_for(tmp_path, monkeypatch) -> None:
    trained = make_trained(11)
    for number, (section, options, optimizer, note) in enumerate(
        [
            ({"type": "adam", "params": {"adam_w_mode": False}}, {}, "Adam", None),
            (None, {}, "AdamW", None),  # by the settings of its groups
            (None, {"optimizer": "Mine", "scheduler": "LambdaLR"}, "Mine", None),
            ({"type": "onebitadam"}, {}, None, "OneBitAdam keeps another state"),
            ({"type": "OneBitAdam"}, {"optimizer": "AdamW"}, "AdamW", None),
        ]
    ):
        monkeypatch.setattr(deepspeed_files, "config", lambda stage, dtype, section=section: {"optimizer": section})
        folder = tmp_path / f"{number}" / "in"
        write_sharded(folder, trained, 2, 2)
        done = imported(folder, **options)
        assert done.optimizer == optimizer
        assert ("the schedule's state is left out" in str(done.notes)) == ("scheduler" not in options)
        assert note is None or note in str(done.notes)
        with CheckpointStore(folder.with_name("imported"), threads.single(10.0)).load() or missing() as found:
            assert ("exp_avg" in found.kinds()) == (optimizer is not None)
            if optimizer == "Adam":
                # What the groups say themselves goes before the configuration.
                assert [group["decoupled_weight_decay"] for group in found.counters()["groups"]] == [True, True]
            if "scheduler" in options:
                assert found.shared["schedule"]["type"] == "LambdaLR"


def test_schedule_and_loss_scale(tmp_path) -> None:
    write_sharded(tmp_path / "in", make_trained(7), 2, 2, torch.float16)
    imported(tmp_path / "in")
    with CheckpointStore(tmp_path / "imported", threads.single(10.0)).load() or missing() as found:
        assert found.shared["schedule"] == {"type": "WarmupLR", "state": {"last_epoch": 4}}
        assert found.shared["loss_scale"] == {"value": 128.0, "forbearance": 1, "steps_without_overflow": 3}
        assert found.shared["frozen"] == ["still.weight", "still.bias"]
        assert found.shared["tied"] == {"head.weight": "words.weight"}
        groups = found.counters()["groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.1), (0.002, 0.0)]
