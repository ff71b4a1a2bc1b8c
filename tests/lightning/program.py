"""What every rank runs against the real lightning.pytorch. Started once: Lightning starts the other rank. Takes a
folder."""

import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, Subset

from tests.launching import same_on_all_ranks
from tests.lightning.tiny import BATCH, RATE, batches_of, flat, loss_of, make_data, make_module_class, make_trainer
from thinwire import DiLoCo, OneBitAdam, ZeroOneAdam
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.lightning import ThinwireStrategy

RANKS = 2
FREEZE = 5
MAX_NORM = 0.3

Classifier = make_module_class(pl)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_trainer(pl, folder).fit(Classifier(compressed, ranks=RANKS))  # Lightning starts the other rank
    comm = communication.init(quiet=True)
    for body in (
        trains_as_a_plain_loop,
        manual_optimization,
        resumes_bit_for_bit,
        validates_and_keeps_the_best,
        mixed_precision,
        under_ddp,
        the_example,
    ):
        body(comm, folder / body.__name__)
    comm.barrier()
    if comm.rank == 0:
        print(f"all held with {comm.size} ranks", flush=True)


def compressed(module: Any, **options: Any) -> OneBitAdam:
    return OneBitAdam(module.named_parameters(), lr=RATE, **({"freeze_step": FREEZE} | options))


def local(module: Any) -> ZeroOneAdam:
    return ZeroOneAdam(module.named_parameters(), lr=RATE, var_freeze_step=4, local_step_scaler=3, local_step_clipper=4)


def workers(module: Any, **options: Any) -> DiLoCo:
    return DiLoCo(module.named_parameters(), torch.optim.AdamW, lr=RATE, every=4, **options)


def trains_as_a_plain_loop(comm: Communicator, folder: Path) -> None:
    for accumulation in (1, 2):
        steps = 12
        module = Classifier(lambda one: compressed(one, max_norm=MAX_NORM), batches=steps * accumulation, ranks=RANKS)
        trainer = make_trainer(pl, folder, accumulate_grad_batches=accumulation, gradient_clip_val=MAX_NORM)
        trainer.fit(module)
        assert isinstance(trainer.strategy, ThinwireStrategy)
        assert not isinstance(trainer.strategy.model, DistributedDataParallel)
        assert same_on_all_ranks(comm, flat(module))

        network = Classifier(compressed).network
        optimizer = compressed(network, max_norm=MAX_NORM)
        micro = batches_of(make_data(steps * accumulation, RANKS), comm.rank, comm.size)
        told = []
        for number, batch in enumerate(micro, 1):
            with nullcontext() if number % accumulation == 0 else optimizer.no_sync():
                (loss_of(network, batch) / accumulation).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                told.append((optimizer.bytes_sent, optimizer.last_step.grad_norm))
        torch.testing.assert_close(flat(module), flat(network), rtol=1e-5, atol=1e-7)
        found = module.steps[accumulation - 1 :: accumulation]
        assert [sent for sent, _ in found] == [sent for sent, _ in told]
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in told], rel=1e-5)
        assert max(norm for _, norm in told) > MAX_NORM
        assert sum(module.losses[-4:]) < 0.9 * sum(module.losses[:4])


class Manual(Classifier):
    """Its loop: two micro-batches a step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        last = number % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss_of(self.network, batch) / 2)
        if last:
            optimizer.step()
            optimizer.zero_grad()


class Adversaries(Manual):
    """Two optimizers, each with half of the module, in turn."""

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss_of(self.network, batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append((sum(one.bytes_sent for one in self.trainer.optimizers), 0.0))


def manual_optimization(comm: Communicator, folder: Path) -> None:
    automatic, manual = (kind(compressed, batches=16, ranks=RANKS) for kind in (Classifier, Manual))
    make_trainer(pl, folder, accumulate_grad_batches=2).fit(automatic)
    make_trainer(pl, folder).fit(manual)
    assert torch.equal(flat(automatic), flat(manual))
    assert manual.steps[-1][0] == automatic.steps[-1][0]

    def halves(module: Any) -> list[OneBitAdam]:
        layers = list(module.network)
        return [compressed(torch.nn.ModuleList(half)) for half in (layers[:2], layers[2:])]

    both = Adversaries(halves, batches=12, ranks=RANKS)
    before = flat(both)
    make_trainer(pl, folder).fit(both)
    after = flat(both)
    assert same_on_all_ranks(comm, after)
    assert all(not torch.equal(*pair) for pair in zip(before.split(300), after.split(300), strict=True))
    assert [one.frozen_at for one in both.trainer.optimizers] == [FREEZE, FREEZE]


def resumes_bit_for_bit(comm: Communicator, folder: Path) -> None:
    """With a checkpoint from the compressed stage, after the first of two epochs."""
    for number, build in enumerate((lambda one: compressed(one, stage=1), local, workers)):
        place = folder / str(number)

        def train(seed: int, checkpoint: Path | None = None, place: Path = place, build: Any = build) -> Any:
            module = Classifier(build, seed, batches=7, ranks=RANKS)
            keep = ModelCheckpoint(place, filename="{step}", save_top_k=-1)
            trainer = make_trainer(pl, place, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
            trainer.fit(module, ckpt_path=checkpoint)
            return module

        whole = train(0)
        saved = sorted((place / "thinwire").glob("step=7.ckpt.*"))
        assert len(saved) == 1
        assert len(list(saved[0].glob("rank-*"))) == comm.size
        resumed = train(1, place / "step=7.ckpt")
        assert len(resumed.losses) == 7
        assert resumed.losses == whole.losses[7:]
        assert torch.equal(flat(whole), flat(resumed))
        assert same_on_all_ranks(comm, flat(whole))
        expected, found = (one.trainer.optimizers[0].rank_tensors() for one in (whole, resumed))
        assert any("residual" in key or "error" in key for key in expected), expected.keys()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert resumed.trainer.optimizers[0].frozen_at == whole.trainer.optimizers[0].frozen_at


class Watching(Callback):
    """The value by which the best checkpoint is told: the third validation's."""

    def __init__(self) -> None:
        self.validations = 0

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.validations += 1
        module.log("quality", float(self.validations == 3), sync_dist=True)


def validates_and_keeps_the_best(comm: Communicator, folder: Path) -> None:
    """With optimizers whose ranks hold weights of their own between syncs, and batch norm, whose buffers differ."""
    module = Classifier(workers, batches=15, ranks=RANKS)
    keep = ModelCheckpoint(folder, monitor="quality", mode="max", filename="{step}", save_last=True)
    checks = {"limit_val_batches": 2, "num_sanity_val_steps": 1, "val_check_interval": 3}
    trainer = make_trainer(pl, folder, callbacks=[Watching(), keep], enable_checkpointing=True, **checks)
    trainer.fit(module)
    assert len(module.evaluated) == 6
    assert all(same_on_all_ranks(comm, one) for one in module.evaluated)
    own = torch.tensor(module.own_losses)
    assert not same_on_all_ranks(comm, own)  # each rank has its share of the samples
    assert same_on_all_ranks(comm, trainer.callback_metrics["val"].reshape(1))
    assert same_on_all_ranks(comm, flat(module))
    assert Path(keep.best_model_path).name == "step=6.ckpt"  # the sanity check was the first
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["last.ckpt", "step=6.ckpt"]
    states = sorted(path.name.rsplit(".", 2)[0] for path in (folder / "thinwire").glob("*.ckpt.*"))
    assert states == ["last.ckpt", "step=6.ckpt"]  # those of removed checkpoints are gone

    trainer.test(module, ckpt_path="best", verbose=False)
    best = Classifier.load_from_checkpoint(keep.best_model_path, build=workers, weights_only=True)
    assert torch.equal(flat(best), flat(module))
    seen = torch.cat([one.detach().double().reshape(-1) for one in best.state_dict().values()])
    assert torch.equal(seen, module.evaluated[2])
    tested = trainer.callback_metrics["test"].reshape(1)
    assert same_on_all_ranks(comm, tested)


def mixed_precision(comm: Communicator, folder: Path) -> None:
    module = Classifier(lambda one: compressed(one, stage=1), batches=12, ranks=RANKS)
    make_trainer(pl, folder, precision="bf16-mixed").fit(module)
    assert sum(module.losses[-4:]) < sum(module.losses[:4])
    assert same_on_all_ranks(comm, flat(module))

    # Lightning's own scaler is for GPUs. The first scale overflows, and every rank skips the step.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    plain, scaled = (Steep(lambda one: compressed(one, max_norm=MAX_NORM), batches=6) for _ in range(2))
    scaled._data = ConcatDataset([Subset(plain._data, range(BATCH)), plain._data])
    settings = {"gradient_clip_val": MAX_NORM, "use_distributed_sampler": False}  # both ranks see the same, in order
    make_trainer(pl, folder, precision="bf16-mixed", **settings).fit(plain)
    trainer = make_trainer(pl, folder, plugins=[Bfloat16WithScaler("16-mixed", "cpu", scaler)], **settings)
    trainer.fit(scaled)
    assert trainer.optimizers[0].skipped_steps == 1
    assert scaler.get_scale() == 2.0**7
    assert [norm for _, norm in scaled.steps[1:]] == pytest.approx([norm for _, norm in plain.steps], rel=1e-3)
    assert same_on_all_ranks(comm, flat(scaled))


class Steep(Classifier):
    def training_step(self, batch: Any, number: int) -> Tensor:
        return 64 * super().training_step(batch, number)


class Bfloat16WithScaler(MixedPrecision):
    """A GradScaler as with 16-mixed, around the arithmetic that a CPU has."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def under_ddp(comm: Communicator, folder: Path) -> None:
    ours, theirs = (Classifier(compressed, batches=12, ranks=RANKS) for _ in range(2))
    make_trainer(pl, folder, accumulate_grad_batches=2).fit(ours)
    wrapped: list[Any] = []

    class Looking(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            wrapped.append(trainer.strategy.model)

    trainer = make_trainer(pl, folder, strategy="ddp", accumulate_grad_batches=2, callbacks=[Looking()])
    trainer.fit(theirs)
    assert isinstance(wrapped[0], DistributedDataParallel)
    assert trainer.optimizers[0]._attached  # DDP sends nothing
    assert theirs.steps == [pytest.approx(one, rel=0, nan_ok=True) for one in ours.steps]
    assert torch.equal(flat(ours), flat(theirs))

    ours, theirs = (Classifier(build, batches=12, ranks=RANKS) for build in (partial(workers, max_norm=0.5), workers))
    make_trainer(pl, folder, gradient_clip_val=0.5).fit(ours)
    make_trainer(pl, folder, strategy="ddp", gradient_clip_val=0.5).fit(theirs)  # gradients are that worker's alone
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)
    assert not same_on_all_ranks(comm, flat(theirs))

    clipped = Classifier(compressed, ranks=RANKS)
    before = flat(clipped)
    with pytest.raises(RuntimeError, match=r"pass max_norm= .*gradient_clip_val.* ThinwireStrategy"):
        make_trainer(pl, folder, strategy="ddp", gradient_clip_val=1e-3).fit(clipped)
    assert torch.equal(flat(clipped), before)


def the_example(comm: Communicator, folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lightning_module.py"
    trainer = runpy.run_path(str(example))["main"](str(folder), devices=RANKS, epochs=2)
    assert float(trainer.callback_metrics["accuracy"]) > 0.8
    assert trainer.optimizers[0].frozen
    assert same_on_all_ranks(comm, flat(trainer.lightning_module))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
