"""LoRA through peft: what every rank runs, as a part of program.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor

from tests.hugging_face.tiny import RATE, make_arguments, make_model, make_samples
from tests.launching import same_on_all_ranks
from thinwire import OneBitAdam
from thinwire.comm import Communicator
from thinwire.hugging_face import Trainer

FREEZE = 4


def make_adapted(seed: int = 0) -> PeftModel:
    """The tiny BERT, always the same, with fresh adapters."""
    base = make_model()
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"]))
    model.accepts_loss_kwargs = False
    return model


def trained(model: torch.nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters() if one.requires_grad])


def untrained(model: torch.nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters() if not one.requires_grad])


def trains_adapters(comm: Communicator, folder: Path) -> None:
    """In the Trainer: only the adapters are sent and saved; a resume goes on bit for bit."""
    samples = make_samples(160)
    arguments = make_arguments(
        folder, max_steps=10, save_strategy="steps", save_steps=6, learning_rate=5 * RATE, max_grad_norm=0.0
    )

    def make(seed: int) -> Trainer:
        chosen = (OneBitAdam, {"freeze_step": FREEZE, "stage": 1})
        return Trainer(make_adapted(seed), arguments, train_dataset=samples, optimizer_cls_and_kwargs=chosen)

    whole, resumed = make(0), make(1)
    base = untrained(whole.model)
    whole.train()
    optimizer = whole.optimizer.optimizer
    adapters = trained(whole.model).numel()
    assert sum(one.numel() for _, one in optimizer.saved_parameters()) == adapters
    assert optimizer.bytes_uncompressed == 10 * 4 * adapters  # what two ranks' ring would send
    assert torch.equal(untrained(whole.model), base)
    assert same_on_all_ranks(comm, trained(whole.model))
    curve = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert sum(curve[-3:]) < sum(curve[:3])

    checkpoint = folder / "checkpoint-6"
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 4 * base.numel()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(trained(whole.model), trained(resumed.model))
    expected, found = (one.optimizer.optimizer.rank_tensors() for one in (whole, resumed))
    assert all(torch.equal(expected[key], found[key]) for key in expected)

    whole.save_model(str(folder / "adapters"))
    comm.barrier()
    again = PeftModel.from_pretrained(make_model(), folder / "adapters", is_trainable=True)
    assert torch.equal(trained(again), trained(whole.model))


def the_lora_example(comm: Communicator, folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lora.py"
    trainer = runpy.run_path(str(example))["main"](str(folder), steps=28)
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert curve[-1] < curve[0], curve
    assert trainer.optimizer.optimizer.frozen
    assert same_on_all_ranks(comm, trained(trainer.model))
    assert (folder / "adapters" / "checkpoint-28" / "adapter_model.safetensors").exists()
