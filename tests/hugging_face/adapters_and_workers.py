"""Adapters of peft and DiLoCo's workers under Trainers: what every rank runs, as a part of program.py."""

import runpy
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.hugging_face import tiny
from tests.hugging_face.tiny import BATCH, RATE, batches, flat, logged, make_arguments, make_model, make_samples
from tests.launching import same_on_all_ranks
from thinwire import DiLoCo, OneBitAdam
from thinwire.comm import Communicator
from thinwire.hugging_face import Trainer

WORKERS = (DiLoCo, {"inner_class": torch.optim.AdamW, "every": 4, "overlap": 1, "codec": "int8"})
OPTIONS: dict[str, Any] = WORKERS[1] | {"codec": "none", "weight_decay": 0.0}
MAX_NORM = 0.3
STEPS = 10


def trains_workers_apart(comm: Communicator, folder: Path) -> None:
    """The mixin's Trainer and the stock one, which wraps the model and clips, train as a plain loop does, whose
    gradients are not averaged."""
    samples = make_samples(BATCH * comm.size * STEPS * 2)
    model = make_model()
    optimizer = DiLoCo(model.named_parameters(), lr=RATE, max_norm=MAX_NORM, **OPTIONS)
    assert list(tiny.plain_loop(model, optimizer, batches(samples, comm.rank, comm.size), 2))
    own = flat(model).clone()
    optimizer.synchronize()
    together = flat(model)
    assert same_on_all_ranks(comm, together)
    assert not same_on_all_ranks(comm, own)

    arguments = make_arguments(folder, max_steps=STEPS, gradient_accumulation_steps=2, max_grad_norm=MAX_NORM)
    mixed = Trainer(make_model(), arguments, train_dataset=samples, optimizer_cls_and_kwargs=(DiLoCo, OPTIONS))
    mixed.train()
    torch.testing.assert_close(flat(mixed.model), together, rtol=1e-4, atol=1e-6)

    model = make_model()
    optimizer = DiLoCo(model.named_parameters(), lr=RATE, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data = {"train_dataset": samples, "eval_dataset": samples[:16]}
    stock = transformers.Trainer(model=model, args=arguments, optimizers=(optimizer, schedule), **data)
    stock.train()
    assert isinstance(stock.model_wrapped, DistributedDataParallel)
    torch.testing.assert_close(flat(model), own, rtol=1e-4, atol=1e-6)
    shown: list[Tensor] = []
    stock.compute_metrics = lambda _: shown.append(flat(model).clone()) or {}
    stock.evaluate()
    assert not torch.equal(shown[0], own)  # the outer weights
    optimizer.train()
    torch.testing.assert_close(flat(model), own, rtol=1e-4, atol=1e-6)


FREEZE = 4


def make_adapted(seed: int = 0) -> PeftModel:
    """The tiny BERT, always the same, with fresh adapters."""
    base = make_model()
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"]))
    model.accepts_loss_kwargs = False
    return model


def trained(model: nn.Module, trains: bool = True) -> Tensor:
    """What trains of a model, or what does not."""
    return torch.cat([one.detach().reshape(-1) for one in model.parameters() if one.requires_grad == trains])


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
    base = trained(whole.model, False)
    whole.train()
    optimizer = whole.optimizer.optimizer
    adapters = trained(whole.model).numel()
    assert sum(one.numel() for _, one in optimizer.saved_parameters()) == adapters
    assert optimizer.bytes_uncompressed == 10 * 4 * adapters  # what two ranks' ring would send
    assert torch.equal(trained(whole.model, False), base)
    assert same_on_all_ranks(comm, trained(whole.model))
    curve = logged(whole)
    assert sum(curve[-3:]) < sum(curve[:3])

    checkpoint = folder / "checkpoint-6"
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 4 * base.numel()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(trained(whole.model), trained(resumed.model))
    expected, found = (one.optimizer.optimizer.rank_tensors() for one in (whole, resumed))
    assert tiny.same_tensors(expected, found)

    whole.save_model(str(folder / "adapters"))
    comm.barrier()
    again = PeftModel.from_pretrained(make_model(), folder / "adapters", is_trainable=True)
    assert torch.equal(trained(again), trained(whole.model))


def the_lora_example(comm: Communicator, folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lora.py"
    trainer = runpy.run_path(str(example))["main"](str(folder), steps=16)
    curve = logged(trainer)
    assert curve[-1] < curve[0], curve
    assert trainer.optimizer.optimizer.frozen
    assert same_on_all_ranks(comm, trained(trainer.model))
    assert (folder / "adapters" / "checkpoint-16" / "adapter_model.safetensors").exists()
