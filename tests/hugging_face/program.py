"""What every rank of a job under torchrun runs against the real transformers and accelerate. Takes a folder."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.hugging_face import adapters_and_workers
from tests.hugging_face.adapters_and_workers import OPTIONS, WORKERS, the_lora_example, trains_adapters
from tests.hugging_face.tiny import (
    BATCH,
    KEEP_BEST,
    RATE,
    batches,
    flat,
    logged,
    make_arguments,
    make_model,
    make_samples,
    plain_loop,
    run_all,
    same_tensors,
)
from tests.launching import same_on_all_ranks
from tests.refusing import refused
from thinwire import DiLoCo, OneBitAdam, OneBitMuon, ZeroOneAdam
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.hugging_face import Trainer, TrainerMixin, adapt
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

FREEZE = 5
COMPRESSED = (OneBitAdam, {"freeze_step": FREEZE})
LOCAL = (ZeroOneAdam, {"var_freeze_step": 4, "local_step_scaler": 3, "local_step_clipper": 4})
MAX_NORM = 0.3


def optimizer_of(trainer: transformers.Trainer) -> SynchronizedOptimizer:
    return trainer.optimizer.optimizer


def trains_as_a_plain_loop(comm: Communicator, folder: Path) -> None:
    samples = make_samples(192)
    for accumulation in (1, 2):
        arguments = make_arguments(
            folder,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=MAX_NORM,
            max_steps=12,
            lr_scheduler_type="linear",
        )
        trainer = Trainer(make_model(), arguments, train_dataset=samples, optimizer_cls_and_kwargs=COMPRESSED)
        sent: list[int] = []
        trainer.add_callback(Counting(sent))
        trainer.train()
        found = flat(trainer.model)
        assert same_on_all_ranks(comm, found)

        model = make_model()
        decay = trainer.get_decay_parameter_names(model)
        groups: list[dict[str, Any]] = [
            {"params": [one for name, one in model.named_parameters() if (name in decay) == decays]}
            for decays in (True, False)
        ]
        named = list(model.named_parameters())
        optimizer = OneBitAdam(groups, lr=RATE, freeze_step=FREEZE, max_norm=MAX_NORM, named_parameters=named)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, arguments.max_steps)
        norms, bytes_sent = [], []
        micro = batches(samples, comm.rank, comm.size)[: accumulation * arguments.max_steps]
        for _ in plain_loop(model, optimizer, micro, accumulation, schedule):
            norms.append(optimizer.last_step.grad_norm)
            bytes_sent.append(optimizer.bytes_sent)
        torch.testing.assert_close(found, flat(model), rtol=1e-4, atol=1e-6)
        assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-3)
        assert sent == bytes_sent
        steps = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
        assert [entry["bytes_sent"] for entry in steps] == bytes_sent
        frozen_at = optimizer.frozen_at
        assert [entry["frozen"] for entry in steps] == [float(step >= frozen_at) for step in range(1, len(steps) + 1)]
        curve = logged(trainer)
        assert sum(curve[-4:]) < 0.95 * sum(curve[:4]), curve


def resumes_bit_for_bit(comm: Communicator, folder: Path) -> None:
    """With dropout, shuffled data, and a checkpoint from the compressed stage."""
    samples = make_samples(160)
    kinds = ((OneBitAdam, {"freeze_step": 4, "stage": 1}), LOCAL, WORKERS, (OneBitMuon, {"stage": 1}))
    for number, (kind, options) in enumerate(kinds):
        arguments = make_arguments(
            folder / str(number),
            max_steps=8,
            save_strategy="steps",
            save_steps=5,
            train_sampling_strategy="random",
            lr_scheduler_type="cosine",
        )

        def make(seed: int, arguments: Any = arguments, chosen: Any = (kind, options)) -> Trainer:
            model = make_model(seed, dropout=0.1)
            return Trainer(model, arguments, train_dataset=samples, optimizer_cls_and_kwargs=chosen)

        whole, resumed = make(0), make(1)
        whole.train()
        assert len(list((folder / str(number) / "checkpoint-5" / "thinwire").glob("rank-*"))) == comm.size
        resumed.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-5")
        assert torch.equal(flat(whole.model), flat(resumed.model)), kind
        assert same_on_all_ranks(comm, flat(whole.model))
        expected, found = (optimizer_of(one).rank_tensors() for one in (whole, resumed))
        assert any("residual" in key or "error" in key for key in expected), expected.keys()
        assert same_tensors(expected, found)
        assert optimizer_of(resumed).frozen_at == optimizer_of(whole).frozen_at
        assert logged(resumed) == logged(whole)
        if number == 0:
            refuses_other_random_numbers(comm, Path(arguments.output_dir, "checkpoint-5"), make)


def refuses_other_random_numbers(comm: Communicator, checkpoint: Path, make: Any) -> None:
    """Every rank, where one rank's file is gone or damaged."""
    lost = checkpoint / "rng_state_1.pth"
    content = lost.read_bytes()
    for damaged, message in ((None, "is missing"), (content[:100], "cannot be read")):
        comm.barrier()
        if comm.rank == 0:
            lost.unlink(missing_ok=True)
            lost.write_bytes(damaged) if damaged is not None else None
        comm.barrier()
        with pytest.raises((RuntimeError, ValueError), match=rf"rng_state_1.pth {message}.*put a copy of another rank"):
            make(2).train(resume_from_checkpoint=str(checkpoint))


def evaluates_common_weights_and_keeps_the_best(comm: Communicator, folder: Path) -> None:
    samples = make_samples(160)
    arguments = make_arguments(folder, max_steps=12, **KEEP_BEST)
    seen: list[Tensor] = []
    qualities = iter((0.0, 1.0, 0.0, 0.0, 0.0))
    trainer = Trainer(
        make_model(),
        arguments,
        train_dataset=samples,
        eval_dataset=samples[:16],
        optimizer_cls_and_kwargs=LOCAL,
        compute_metrics=lambda _: {"quality": next(qualities)},
        callbacks=[Looking(seen)],
    )
    trainer.model.register_buffer("mean", torch.full((), float(comm.rank)), False)  # as a BatchNorm's, each rank's own
    trainer.train()
    assert trainer.model.mean == 0
    trainer.model.mean.fill_(comm.rank)
    assert len(seen) == 4
    assert all(same_on_all_ranks(comm, weights) for weights in seen)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-6"
    saved = load_file(best / "model.safetensors")
    assert all(torch.equal(saved[name], one) for name, one in trainer.model.state_dict().items() if name in saved)
    found = logged(trainer, "eval_loss")
    assert trainer.evaluate()["eval_loss"] == found[1]
    assert trainer.model.mean == 0
    assert all(torch.equal(saved[name], one) for name, one in trainer.model.state_dict().items() if name in saved)


def adapted_and_given(comm: Communicator, folder: Path) -> None:
    """A trainer that was made elsewhere, and an optimizer that was, train as the mixin's do."""
    samples = make_samples(48)
    arguments = make_arguments(folder, max_steps=6)

    def given() -> dict[str, Any]:
        model = make_model()
        optimizer = OneBitAdam(model.named_parameters(), lr=RATE, freeze_step=3, max_norm=1.0)
        return {
            "model": model,
            "args": arguments,
            "train_dataset": samples,
            "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)),
        }

    mixed, adapted = Trainer(**given()), adapt(transformers.Trainer(**given()))
    assert isinstance(adapted, TrainerMixin)
    assert adapt(mixed) is mixed
    for trainer in (mixed, adapted):
        trainer.train()
        assert trainer.model_wrapped is trainer.model
        assert optimizer_of(trainer).param_groups[0]["lr"] == pytest.approx(RATE / 1000)
    assert torch.equal(flat(mixed.model), flat(adapted.model))
    refused(TypeError, r"adapt\(\) takes a transformers.Trainer, got a BertFor", adapt, mixed.model)


def mixed_precision(comm: Communicator, folder: Path) -> None:
    samples = make_samples(96)
    trainer = Trainer(
        make_model(),
        make_arguments(folder, max_steps=8, bf16=True),
        train_dataset=samples,
        optimizer_cls_and_kwargs=(OneBitAdam, {"freeze_step": 4, "stage": 1}),
    )
    trainer.train()
    curve = logged(trainer)
    assert sum(curve[-3:]) < sum(curve[:3])
    assert same_on_all_ranks(comm, flat(trainer.model))

    # Accelerate's own scaler is for GPUs only. The first scale overflows: the step is skipped, and the schedule waits.
    AcceleratorState._reset_state()

    class Steep(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Tensor:
            return 16 * super().compute_loss(*args, **options)

    plain, scaled = (
        Steep(
            make_model(),
            make_arguments(folder / "scaled", max_steps=steps, lr_scheduler_type="linear", max_grad_norm=0.2),
            train_dataset=samples[: BATCH * comm.size] * steps,
            optimizer_cls_and_kwargs=(OneBitAdam, {"freeze_step": 3}),
        )
        for steps in (4, 5)
    )
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    plain.train()
    scaled.train()
    assert optimizer_of(scaled).skipped_steps == 1
    rates = [entry["learning_rate"] for entry in scaled.state.log_history if "grad_norm" in entry]
    assert rates[0] == rates[1] > rates[2]
    norms = [[entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry] for one in (plain, scaled)]
    assert norms[1][1] == pytest.approx(norms[0][0], rel=1e-4)


def a_stock_trainer(comm: Communicator, folder: Path) -> None:
    samples = make_samples(96)

    def make(kind: type[transformers.Trainer], **changes: Any) -> transformers.Trainer:
        model = make_model()
        optimizer = OneBitAdam(model.named_parameters(), lr=RATE, freeze_step=3)
        arguments = make_arguments(
            folder, max_steps=6, gradient_accumulation_steps=2, save_strategy="steps", save_steps=3, **changes
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return kind(model=model, args=arguments, train_dataset=samples, optimizers=(optimizer, schedule))

    stock, mixed = make(transformers.Trainer, max_grad_norm=0.0), make(Trainer, max_grad_norm=0.0)
    sent: list[int] = []
    stock.add_callback(Counting(sent))
    for trainer in (stock, mixed):
        trainer.train()
    numel = flat(stock.model).numel()
    assert 4 * numel <= sent[1] - sent[0] <= 4 * numel * 1.1
    assert numel / 8 <= sent[5] - sent[4] <= numel / 8 * 1.2
    assert isinstance(stock.model_wrapped, DistributedDataParallel)
    assert optimizer_of(stock)._attached  # DDP sends nothing
    assert optimizer_of(stock).bytes_sent == optimizer_of(mixed).bytes_sent
    assert torch.equal(flat(stock.model), flat(mixed.model))
    assert (folder / "checkpoint-6" / "optimizer.pt").exists()

    clipping = make(transformers.Trainer, max_grad_norm=1e-3)
    before = flat(clipping.model)
    refused(RuntimeError, r"pass max_norm=.*max_grad_norm.* thinwire.hugging_face.TrainerMixin", clipping.train)
    assert torch.equal(flat(clipping.model), before)


def accelerate_by_itself(comm: Communicator, folder: Path) -> None:
    samples = make_samples(96)
    micro = batches(samples, comm.rank, comm.size)
    kinds = {
        OneBitAdam: {"lr": RATE, "freeze_step": 3, "max_norm": MAX_NORM},
        DiLoCo: {"lr": RATE, "max_norm": MAX_NORM, **OPTIONS},
    }
    for kind, options in kinds.items():
        plain = make_model()
        expected = kind(plain.named_parameters(), **options)
        assert len(list(plain_loop(plain, expected, micro, 2))) == 6
        # DDP around the model, and the two lines that leave it out: accumulate() holds the optimizer back all the same.
        for around in (True, False):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = make_model()
            optimizer = kind(model.named_parameters(), **options)
            wrapped = accelerator.prepare_model(model, evaluation_mode=not around)
            loader = DataLoader(samples, batch_size=BATCH, collate_fn=transformers.default_data_collator)
            prepared, loader = accelerator.prepare(optimizer, loader)
            assert isinstance(wrapped, DistributedDataParallel) == around
            for batch in loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**batch).loss)
                    prepared.step()
                    prepared.zero_grad()
            assert optimizer.steps == 6
            assert same_on_all_ranks(comm, flat(model)) == (kind is OneBitAdam)
            torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-6)
            assert optimizer.bytes_sent == expected.bytes_sent
            if kind is OneBitAdam and around:
                assert optimizer._attached  # DDP sends nothing
                prepared.load_state_dict(prepared.state_dict())
                for batch in micro[:2]:
                    with accelerator.accumulate(wrapped):
                        accelerator.backward(wrapped(**batch).loss)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1e-3)
                refused(RuntimeError, r"To clip, pass max_norm= to the optimizer", optimizer.step)


def the_example(comm: Communicator, folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "hugging_face_trainer.py"
    trainer = runpy.run_path(str(example))["main"](str(folder), steps=40)
    curve = logged(trainer)
    assert sum(curve[-3:]) < 0.95 * sum(curve[:3]), curve
    assert optimizer_of(trainer).frozen
    assert same_on_all_ranks(comm, flat(trainer.model))


class Looking(transformers.TrainerCallback):
    """The weights with which each evaluation was done."""

    def __init__(self, seen: list[Tensor]) -> None:
        self._seen = seen

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._seen.append(flat(model))


class Counting(transformers.TrainerCallback):
    """Bytes that were sent up to each step."""

    def __init__(self, sent: list[int]) -> None:
        self._sent = sent

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        while not isinstance(optimizer, SynchronizedOptimizer):
            optimizer = optimizer.optimizer
        self._sent.append(optimizer.bytes_sent)


if __name__ == "__main__":
    run_all(
        communication.init(quiet=True),
        Path(sys.argv[1]),
        trains_as_a_plain_loop,
        resumes_bit_for_bit,
        evaluates_common_weights_and_keeps_the_best,
        adapted_and_given,
        a_stock_trainer,
        accelerate_by_itself,
        trains_adapters,
        adapters_and_workers.trains_workers_apart,
        the_example,
        the_lora_example,
        mixed_precision,  # leaves Accelerate with another precision
    )
