"""What every rank of a job under torchrun runs: Trainers that drive the engine, at every ZeRO stage. Takes a folder."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertForSequenceClassification

from tests.engine.test_published import ZERO_2, ZERO_3
from tests.hugging_face import tiny
from tests.hugging_face.tiny import BATCH, RATE, logged, make_arguments, make_model, make_samples, run_all, same_tensors
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.engine import Engine
from thinwire.hugging_face import Trainer, adapt

STEPS, SAVED_AT = 8, 5
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": 3}}
LOCAL = {"type": "ZeroOneAdam", "params": {"var_freeze_step": 3, "local_step_scaler": 3, "local_step_clipper": 4}}
ADAMW = {"type": "AdamW", "params": {"betas": "auto", "eps": "auto"}}


def published_files_train_as_they_are(comm: Communicator, folder: Path) -> None:
    """Hugging Face's own for ZeRO-2 and ZeRO-3, with all they leave to the Trainer."""
    for name, config in (("zero_2", ZERO_2), ("zero_3", ZERO_3)):
        arguments = make_arguments(
            folder / name, max_steps=12, lr_scheduler_type="constant_with_warmup", warmup_steps=2, bf16=name == "zero_2"
        )
        trainer = Trainer(make_model(), arguments, train_dataset=make_samples(160), thinwire_config=config)
        trainer.train()
        losses = logged(trainer, "loss")
        assert len(losses) == trainer.state.global_step == 12
        assert losses[-1] < 0.9 * losses[0], losses
        engine = engine_of(trainer)
        assert engine.settings.zero_optimization.stage == config["zero_optimization"]["stage"]
        assert "zero_optimization.contiguous_gradients" in engine.settings.remarks.without_effect


def engine_of(trainer: transformers.Trainer) -> Engine:
    assert isinstance(trainer.model_wrapped, Engine)
    return trainer.model_wrapped


def every_stage_resumes_bit_for_bit(comm: Communicator, folder: Path) -> None:
    """With dropout, shuffled data, accumulation, clipping, and a checkpoint from the compressed stage."""
    samples = make_samples(160)
    kinds = ((0, LOCAL, False), (1, ONE_BIT, False), (2, ONE_BIT, True), (3, ADAMW, False))
    for number, (stage, optimizer, bf16) in enumerate(kinds):
        arguments = make_arguments(
            folder / str(number),
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=SAVED_AT,
            gradient_accumulation_steps=2,
            max_grad_norm=0.3 if stage else 0.0,  # 0/1 Adam does not clip
            train_sampling_strategy="random",
            lr_scheduler_type="cosine",
            warmup_steps=2,
            bf16=bf16,
        )
        zero = {"stage": stage, "overlap_comm": stage == 1}
        config: dict[str, Any] = {"train_batch_size": "auto", "gradient_accumulation_steps": 2}
        config |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
        config |= {"optimizer": optimizer, "zero_optimization": zero}
        if stage == 1:
            config["scheduler"] = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}

        def make(seed: int, arguments: Any = arguments, config: Any = config) -> Trainer:
            model = make_model(seed, dropout=0.1)
            return Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:16], thinwire_config=config)

        whole, resumed = make(0), make(1)
        whole.train()
        saved = folder / str(number) / f"checkpoint-{SAVED_AT}"
        assert len(list((saved / "thinwire").glob("rank-*"))) == comm.size
        resumed.train(resume_from_checkpoint=str(saved))
        weights = engine_of(whole).whole_state_dict()
        assert same_tensors(weights, engine_of(resumed).whole_state_dict()), stage
        expected, found = (engine_of(one).optimizer.rank_tensors() for one in (whole, resumed))
        assert same_tensors(expected, found), stage
        assert any("residual" in key or "error" in key for key in expected) == (stage < 3), expected.keys()
        for name in ("loss", "learning_rate"):
            assert logged(whole, name) == logged(resumed, name), (stage, name)
        # A warmup of two steps from zero; what is logged is the rate of the step.
        rates = logged(whole, "learning_rate")
        assert rates[0] == 0.0
        assert max(rates) == pytest.approx(RATE, rel=0.05)
        assert rates[-1] < 0.3 * RATE
        if stage == 3:
            assert all(norm > 0 for norm in logged(whole, "grad_norm"))
            assert (
                sum(getattr(one, "_local_tensor", one).numel() for one in whole.model.parameters())
                < 0.6 * whole.model.num_parameters()
            )
        loads_elsewhere(comm, whole, weights, folder / f"model-{number}")


def loads_elsewhere(comm: Communicator, trainer: Trainer, weights: dict[str, Tensor], folder: Path) -> None:
    """What save_model writes is the whole model for from_pretrained, and it is what was evaluated."""
    trainer.save_model(str(folder))
    comm.barrier()
    loss = trainer.evaluate()["eval_loss"]
    predictions = trainer.predict(trainer.eval_dataset).predictions
    assert predictions.shape == (16, 2)
    if comm.rank == 0:
        assert same_tensors(load_file(folder / "model.safetensors"), weights)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    batch = transformers.default_data_collator(trainer.eval_dataset)
    with torch.no_grad():
        output = model(**batch)
    assert float(output.loss) == pytest.approx(loss, rel=2e-2 if model.dtype == torch.bfloat16 else 1e-4)
    tolerance = 0.05 if model.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        output.logits.float(), torch.from_numpy(predictions).float(), rtol=tolerance, atol=tolerance
    )


def trains_as_the_stock_trainer(comm: Communicator, folder: Path) -> None:
    """AdamW, sharded or not, ends where AdamW under DDP does: decay groups, clipping, accumulation, a cut epoch."""
    samples = make_samples(8 * BATCH * comm.size - BATCH)  # the last step of an epoch has one micro-batch
    options: dict[str, Any] = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
    }
    stock = transformers.Trainer(make_model(), make_arguments(folder, **options), train_dataset=samples)
    stock.train()
    for stage in (0, 3):
        config = {"zero_optimization": {"stage": stage}}  # the optimizer is the Trainer's
        trainer = adapt(
            transformers.Trainer(make_model(), make_arguments(folder, **options), train_dataset=samples),
            thinwire_config=config | ({"optimizer": ADAMW} if stage == 3 else {}),
        )
        trainer.train()
        assert trainer.state.global_step == stock.state.global_step == 6
        assert engine_of(trainer).global_steps == 6
        for name in ("loss", "grad_norm", "learning_rate"):
            assert logged(trainer, name) == pytest.approx(logged(stock, name), rel=2e-3), (stage, name)
        found = engine_of(trainer).whole_state_dict()
        for name, expected in stock.model.named_parameters():
            if comm.rank == 0:
                torch.testing.assert_close(found[name], expected.detach(), rtol=1e-3, atol=1e-5)


def keeps_the_best(comm: Communicator, folder: Path) -> None:
    """At stage 3: weights of the best checkpoint in the end, the others deleted."""
    samples = make_samples(160)
    arguments = make_arguments(folder, max_steps=9, save_total_limit=1, **tiny.KEEP_BEST)
    qualities = iter((0.0, 1.0, 0.0, 0.0))
    trainer = Trainer(
        make_model(),
        arguments,
        train_dataset=samples,
        eval_dataset=samples[:16],
        compute_metrics=lambda _: {"quality": next(qualities)},
        thinwire_config={"optimizer": ADAMW, "zero_optimization": {"stage": 3}},
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-6"
    weights = engine_of(trainer).whole_state_dict()
    if comm.rank == 0:
        assert same_tensors(load_file(best / "model.safetensors"), weights)
        assert [one.name for one in folder.glob("checkpoint-*")] == ["checkpoint-6"]
    assert trainer.evaluate()["eval_loss"] == logged(trainer, "eval_loss")[1]
    with pytest.raises(RuntimeError, match=r"train\(\) was called twice"):
        trainer.train()


def what_one_rank_lacks(comm: Communicator, folder: Path) -> None:
    """A file that is not there on one rank is an error on all, at construction."""
    path = folder / f"engine-{comm.rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if comm.rank == 0:
        path.write_text('{"zero_optimization": {"stage": 1}}')
    comm.barrier()
    expected = r"rank 1 could not use its thinwire_config: .*engine-1.json" if comm.rank == 0 else "cannot be read"
    with pytest.raises(ValueError, match=expected):
        Trainer(make_model(), make_arguments(folder), train_dataset=make_samples(8), thinwire_config=path)


if __name__ == "__main__":
    run_all(
        communication.init(quiet=True),
        Path(sys.argv[1]),
        every_stage_resumes_bit_for_bit,
        trains_as_the_stock_trainer,
        keeps_the_best,
        what_one_rank_lacks,
        published_files_train_as_they_are,
    )
