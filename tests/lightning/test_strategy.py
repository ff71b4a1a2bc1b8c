"""Lightning as it is installed: on two processes that lightning.pytorch starts by itself, one launch for all, as
imports take longest; and on one, here, with the standalone pytorch_lightning."""

import sys
import threading
import time
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.launching import Jobs
from tests.lightning.tiny import BATCH, RATE, flat, loss_of, make_module_class, make_trainer
from tests.optim.diloco.tower import meeting, together
from tests.refusing import refused
from thinwire import OneBitAdam

__all__ = ["meeting"]


@pytest.mark.programs
def test_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = jobs.alone("-m", "tests.lightning.program", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held with 2 ranks" in done.stdout


@pytest.fixture
def standalone(monkeypatch: pytest.MonkeyPatch, own_process_group: None) -> ModuleType:
    """pytorch_lightning in a process that has not imported its twin; the process group that it makes goes with it."""
    package = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return package


def compressed(module: Any) -> OneBitAdam:
    return OneBitAdam(module.named_parameters(), lr=RATE, freeze_step=2, max_norm=1.0)


def test_the_standalone_package(standalone: ModuleType, tmp_path: Path) -> None:
    import thinwire.lightning

    assert issubclass(thinwire.lightning.ThinwireStrategy, standalone.strategies.DDPStrategy)
    assert thinwire.lightning.register() == ["pytorch_lightning"]
    kind = make_module_class(standalone)

    def train(seed: int, epochs: int, strategy: Any, checkpoint: Path | None = None) -> Any:
        module = kind(compressed, seed, batches=4)
        options = {"strategy": strategy, "max_epochs": epochs, "gradient_clip_val": 1.0}
        trainer = make_trainer(standalone, tmp_path, devices=1, **options)
        trainer.fit(module, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = train(0, 2, thinwire.lightning.ThinwireStrategy())
    train(0, 1, "thinwire")
    resumed = train(1, 2, "thinwire", tmp_path / "1.ckpt")
    assert torch.equal(flat(whole), flat(resumed))
    assert whole.losses[4:] == resumed.losses
    states = sorted(path.name.rsplit(".", 2)[0] for path in (tmp_path / "thinwire").glob("*.ckpt.*"))
    assert states == ["1.ckpt", "2.ckpt"]

    def torchs(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters())

    with pytest.raises(TypeError, match=r"returned AdamW.*return thinwire.OneBitAdam"):
        make_trainer(standalone, tmp_path, devices=1).fit(kind(torchs))
    message = r"gradient_clip_val is 0.5 and max_norm of OneBitAdam is 1.0: pass max_norm=0.5"
    with pytest.raises(ValueError, match=message):
        make_trainer(standalone, tmp_path, devices=1, gradient_clip_val=0.5).fit(kind(compressed))

    def rising(interval: str, rise: int) -> Any:
        def build(module: Any) -> Any:
            optimizer = compressed(module)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=rise)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

        return build

    for build, epochs, message in (
        (rising("step", 4), 1, r"freeze_step=2 .* warmup, which rises until step 5"),
        (rising("epoch", 1), 2, r"freeze_step=2 .* warmup, which rises until step 9"),
        (compressed, 2, r"freeze_step=2 .* too few of 16 steps.* Give freeze_step=4 or later"),
    ):
        module = kind(build)
        refused(ValueError, message, make_trainer(standalone, tmp_path, devices=1, max_epochs=epochs).fit, module)
        assert module.losses == []

    class ClipsBySelf(kind):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    with pytest.raises(ValueError, match=r"pass max_norm=0.1 to OneBitAdam"):
        make_trainer(standalone, tmp_path, devices=1).fit(ClipsBySelf(compressed))
    remote = standalone.callbacks.ModelCheckpoint("memory://folder")
    trainer = make_trainer(standalone, tmp_path, devices=1, callbacks=[remote], enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"ModelCheckpoint saves to memory://folder, .* that all ranks have mounted"):
        trainer.fit(kind(compressed))

    # A checkpoint of another strategy: of one rank's state, or of another optimizer.
    for build in (compressed, torchs):
        trainer = make_trainer(standalone, tmp_path, devices=1, strategy="auto")
        trainer.fit(kind(build, batches=4))
        trainer.save_checkpoint(tmp_path / "other.ckpt")
        resumed = kind(compressed, batches=4)
        trainer = make_trainer(standalone, tmp_path, devices=1, max_epochs=2)
        if build is torchs:
            refused(ValueError, r"it is not from OneBitAdam", trainer.fit, resumed, ckpt_path=tmp_path / "other.ckpt")
            continue
        trainer.fit(resumed, ckpt_path=tmp_path / "other.ckpt")
        assert trainer.optimizers[0].steps == 8
        with pytest.raises(
            ValueError, match=r"holds the state of 0 optimizers, and configure_optimizers\(\) returned 1"
        ):
            trainer.strategy.load_optimizer_state_dict({"optimizer_states": []})


def test_averaged_weights_take_no_step_while_means_are_found(standalone: ModuleType, tmp_path: Path) -> None:
    import thinwire.lightning

    callback = standalone.callbacks.StochasticWeightAveraging(swa_lrs=RATE, swa_epoch_start=1)
    module = make_module_class(standalone)(lambda one: OneBitAdam(one.named_parameters(), lr=RATE, stage=1), batches=4)
    changes = {"strategy": thinwire.lightning.ThinwireStrategy(), "max_epochs": 3, "callbacks": [callback]}
    make_trainer(standalone, tmp_path, devices=1, **changes).fit(module)
    assert torch.equal(flat(module), flat(callback._average_model))


@pytest.mark.parametrize("kind", ["DiLoCo", "OneBitAdam", "OneBitMuon", "ShardedOptimizer"])
def test_it_joins_an_elastic_job_late_and_ends_with_it(standalone: ModuleType, tmp_path: Path, kind: str) -> None:
    """The other worker trains in a loop of its own; who joins is told to resume, as whoever is started again."""
    import thinwire.lightning

    thinwire.lightning.register()
    come, rates, last = threading.Event(), [], 12

    def build(module: Any, job: str = "job") -> Any:
        elastic = thinwire.Elastic(workers=1, address="here:1", job=job)
        if kind == "OneBitAdam":
            return OneBitAdam(module.named_parameters(), lr=RATE, freeze_step=4, elastic=elastic)
        if kind == "OneBitMuon":
            return thinwire.OneBitMuon(module.named_parameters(), lr=RATE, elastic=elastic)
        options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0} if kind == "DiLoCo" else {"stage": 0}
        made = getattr(thinwire, kind)
        return made(module.named_parameters(), torch.optim.AdamW, lr=RATE, elastic=elastic, **options)

    class Late(make_module_class(standalone)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = build(self)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / last)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def train_dataloader(self) -> Any:
            sampler = thinwire.ElasticSampler(self.trainer.optimizers[0], len(self._data))
            return DataLoader(self._data, BATCH, sampler=sampler)

        def on_train_batch_start(self, *_: Any) -> None:
            rates.append((self.trainer.global_step, self.trainer.optimizers[0].param_groups[0]["lr"]))

    def other() -> torch.Tensor:
        module = make_module_class(standalone)(build)
        optimizer: Any = build(module)
        batches = iter(DataLoader(module._data, BATCH, sampler=thinwire.ElasticSampler(optimizer, len(module._data))))
        membership = optimizer._home.membership if kind == "DiLoCo" else optimizer._home.workers.membership
        while optimizer.steps < last:
            for group in optimizer.param_groups:
                group |= {"lr": RATE * (1 - optimizer.steps / last), "initial_lr": RATE}
            if optimizer.steps == 6:
                come.set()
                while not membership.wanted:
                    time.sleep(0.01)
            optimizer.zero_grad()
            loss_of(module.network, next(batches)).backward()
            optimizer.step()
        optimizer.synchronize_weights()
        return flat(module)

    def joins() -> torch.Tensor:
        assert come.wait(60)
        module = Late(build)
        options = {"devices": 1, "use_distributed_sampler": False, "limit_val_batches": 0, "strategy": "thinwire"}
        trainer = make_trainer(standalone, tmp_path, max_steps=last, max_epochs=-1, **options)
        trainer.fit(module, ckpt_path=tmp_path / "first.ckpt")
        assert trainer.global_step == last
        for _ in range(2):
            trainer.save_checkpoint(tmp_path / "first.ckpt")
        states = list((tmp_path / "thinwire").glob("first.ckpt.*"))
        assert len(states) == 2, "what another worker has saved under this name is its own"
        return flat(module)

    first = make_trainer(standalone, tmp_path, devices=1, max_steps=2, max_epochs=-1, strategy="thinwire")
    first.fit(make_module_class(standalone)(lambda module: build(module, "first")))
    first.save_checkpoint(tmp_path / "first.ckpt")
    alone, late = together([other, joins])
    begin = rates[0][0]
    assert begin == 8 if kind == "DiLoCo" else 6 < begin < last
    assert rates == [(step, pytest.approx(RATE * (1 - step / last))) for step in range(begin, last)]
    assert torch.equal(alone, late)
    message = "with elastic every worker is a Trainer of one process, devices=1, with max_steps="
    with pytest.raises(ValueError, match=message):
        make_trainer(standalone, tmp_path, devices=1).fit(
            make_module_class(standalone)(lambda module: build(module, "another"))
        )


@pytest.fixture
def strategy() -> ModuleType:
    """The room's, on the standalone package, as other tests here need it."""
    pytest.importorskip("pytorch_lightning")
    from thinwire.lightning import strategy

    return strategy


@pytest.fixture
def optimizer() -> OneBitAdam:
    return OneBitAdam(torch.nn.Linear(3, 2).named_parameters(), stage=2, max_norm=1.0)


class Algorithm(Enum):
    VALUE = "value"
    NORM = "norm"


def test_optimizers(strategy: ModuleType, optimizer: OneBitAdam) -> None:
    strategy.check_optimizers([optimizer], world_size=1, scaler=None)
    with pytest.raises(ValueError, match="OneBitAdam has 1 ranks and the Trainer 4"):
        strategy.check_optimizers([optimizer], world_size=4, scaler=None)
    with pytest.raises(ValueError, match='use stage=1, or precision="bf16-mixed"'):
        strategy.check_optimizers([optimizer], world_size=1, scaler=object())


def test_clipping(strategy: ModuleType, optimizer: OneBitAdam) -> None:
    for value, algorithm in ((None, None), (0, None), (1.0, None), (1, Algorithm.NORM), (1.0, "norm")):
        strategy.check_clipping(optimizer, value, algorithm)
    for algorithm in (Algorithm.VALUE, "value"):
        with pytest.raises(ValueError, match='gradient_clip_algorithm="value" clips every element'):
            strategy.check_clipping(optimizer, 1.0, algorithm)


def test_an_older_state_goes_last(strategy: ModuleType, optimizer: OneBitAdam, tmp_path: Path) -> None:
    path = tmp_path / f".{'x' * 300}.ckpt"
    files, other = (strategy.CheckpointFiles(one) for one in (path, tmp_path / "other.ckpt"))
    before = optimizer.param_groups[0]["lr"]
    (old,) = files.save([optimizer], "00000000")
    optimizer.param_groups[0]["lr"] = 0.5
    new, _ = files.save([optimizer, optimizer], "00000001")
    other.save([optimizer], "00000002")
    files.load(optimizer, old)
    assert optimizer.param_groups[0]["lr"] == before
    files.remove(but=["00000001"])
    files.load(optimizer, new)
    assert optimizer.param_groups[0]["lr"] == 0.5
    refused(RuntimeError, r"copy both. The weights alone load with load_from_checkpoint", files.load, optimizer, old)
    files.remove()
    assert [path.name for path in (tmp_path / "thinwire").glob("*.ckpt.*")] == ["other.ckpt.00000002.0"]
    assert strategy.CheckpointFiles.has_state(new)
    assert not strategy.CheckpointFiles.has_state({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match=r"cannot save or load the optimizers' state at s3://"):
        strategy.CheckpointFiles("s3://bucket/x.ckpt")
