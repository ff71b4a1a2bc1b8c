"""LoRA through peft: what every rank runs, as a part of program.py."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.hugging_face.tiny import BATCH, RATE, make_arguments, make_model, make_samples
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


def agree(comm: Communicator, values: Tensor) -> bool:
    everyones = torch.empty(comm.size * values.numel(), dtype=values.dtype)
    comm.all_gather(everyones, values)
    return all(torch.equal(row, values) for row in everyones.view(comm.size, -1))


def trains_adapters(comm: Communicator, folder: Path) -> None:
    """In the Trainer: only the adapters are sent and saved; a resume goes on bit for bit."""
    samples = make_samples(160)
    for stage in (0, 1):
        place = folder / str(stage)
        arguments = make_arguments(
            place, max_steps=10, save_strategy="steps", save_steps=6, learning_rate=5 * RATE, max_grad_norm=0.0
        )

        def make(seed: int, arguments: Any = arguments, stage: int = stage) -> Trainer:
            chosen = (OneBitAdam, {"freeze_step": FREEZE, "stage": stage})
            return Trainer(make_adapted(seed), arguments, train_dataset=samples, optimizer_cls_and_kwargs=chosen)

        whole, resumed = make(0), make(1)
        base = untrained(whole.model)
        whole.train()
        optimizer = whole.optimizer.optimizer
        adapters = trained(whole.model).numel()
        assert sum(one.numel() for _, one in optimizer.saved_parameters()) == adapters
        assert optimizer.bytes_uncompressed == 10 * 4 * adapters  # what two ranks' ring would send
        assert torch.equal(untrained(whole.model), base)
        assert agree(comm, trained(whole.model))
        curve = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
        assert sum(curve[-3:]) < sum(curve[:3])

        checkpoint = place / "checkpoint-6"
        assert (checkpoint / "adapter_model.safetensors").stat().st_size < 4 * base.numel()
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert torch.equal(trained(whole.model), trained(resumed.model))
        expected, found = (one.optimizer.optimizer.rank_tensors() for one in (whole, resumed))
        assert all(torch.equal(expected[key], found[key]) for key in expected)

        whole.save_model(str(place / "adapters"))
        comm.barrier()
        again = PeftModel.from_pretrained(make_model(), place / "adapters", is_trainable=True)
        assert torch.equal(trained(again), trained(whole.model))


def accelerates_adapters(comm: Communicator, folder: Path) -> None:
    """In a loop of one's own, with DDP around the model, and every parameter given to the optimizer."""
    samples = make_samples(96)
    accelerator = Accelerator(cpu=True)
    model = make_adapted()
    base = untrained(model)
    optimizer = OneBitAdam(model.named_parameters(), lr=RATE, freeze_step=4 * FREEZE)
    loader = DataLoader(samples, batch_size=BATCH, collate_fn=transformers.default_data_collator)
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(wrapped, DistributedDataParallel)
    losses = []
    for batch in [*loader] * 3:
        loss = wrapped(**batch).loss
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    assert optimizer._attached
    assert optimizer.steps == len(losses) == 36
    assert optimizer.bytes_uncompressed == 36 * 4 * trained(model).numel()
    assert torch.equal(untrained(model), base)
    assert agree(comm, trained(model))
    assert sum(losses[24:]) < sum(losses[:12]), losses

    accelerator.unwrap_model(wrapped).save_pretrained(folder, is_main_process=accelerator.is_main_process)
    comm.barrier()
    saved = load_file(folder / "adapter_model.safetensors")
    assert sum(one.numel() for one in saved.values()) == trained(model).numel()
    state = prepared.state_dict()  # this rank's own
    resumed = make_adapted(1)
    resumed.load_state_dict(model.state_dict())
    other = OneBitAdam(resumed.named_parameters(), lr=RATE, freeze_step=4 * FREEZE)
    other.load_state_dict(state)
    batch = next(iter(loader))
    for one, stepped in ((model, optimizer), (resumed, other)):
        one(**batch).loss.backward()
        stepped.step()
    assert torch.equal(trained(model), trained(resumed))


def the_lora_example(comm: Communicator, folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lora.py"
    trainer = runpy.run_path(str(example))["main"](str(folder), steps=60)
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert curve[-1] < curve[0], curve
    assert trainer.optimizer.optimizer.frozen
    assert agree(comm, trained(trainer.model))
    assert (folder / "adapters" / "checkpoint-60" / "adapter_model.safetensors").exists()
