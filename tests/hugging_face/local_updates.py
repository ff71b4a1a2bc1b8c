"""DiLoCo under Trainers and under Accelerate, with and without DistributedDataParallel around the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.hugging_face.tiny import BATCH, RATE, batches, flat, make_arguments, make_model, make_samples, plain_loop
from thinwire import DiLoCo
from thinwire.comm import Communicator
from thinwire.hugging_face import Trainer

WORKERS = (DiLoCo, {"inner_class": torch.optim.AdamW, "every": 4, "overlap": 1, "codec": "int8"})
OPTIONS: dict[str, Any] = WORKERS[1] | {"codec": "none", "weight_decay": 0.0}
MAX_NORM = 0.3
STEPS = 10


def by_hand(comm: Communicator, samples: Any, accumulation: int) -> Tensor:
    """What a plain loop ends with on this rank, whose gradients nobody averages; then, after an outer step of all."""
    model = make_model()
    optimizer = DiLoCo(model.named_parameters(), lr=RATE, max_norm=MAX_NORM, **OPTIONS)
    assert list(plain_loop(model, optimizer, batches(samples, comm.rank, comm.size), accumulation))
    own = flat(model).clone()
    optimizer.synchronize()
    return torch.stack([own, flat(model)])


def trains_workers_apart(comm: Communicator, folder: Path) -> None:
    """The mixin's Trainer and the stock one, which wraps the model and clips, train as a plain loop does."""
    samples = make_samples(BATCH * comm.size * STEPS * 2)
    own, together = by_hand(comm, samples, 2)
    arguments = make_arguments(folder, max_steps=STEPS, gradient_accumulation_steps=2, max_grad_norm=MAX_NORM)
    mixed = Trainer(make_model(), arguments, train_dataset=samples, optimizer_cls_and_kwargs=(DiLoCo, OPTIONS))
    mixed.train()
    torch.testing.assert_close(flat(mixed.model), together, rtol=1e-4, atol=1e-6)

    model = make_model()
    optimizer = DiLoCo(model.named_parameters(), lr=RATE, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    stock = transformers.Trainer(
        model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:16], optimizers=(optimizer, schedule)
    )
    stock.train()
    assert isinstance(stock.model_wrapped, DistributedDataParallel)
    torch.testing.assert_close(flat(model), own, rtol=1e-4, atol=1e-6)
    shown: list[Tensor] = []
    stock.compute_metrics = lambda _: shown.append(flat(model).clone()) or {}
    stock.evaluate()
    assert not torch.equal(shown[0], own)  # the outer weights
    optimizer.train()
    torch.testing.assert_close(flat(model), own, rtol=1e-4, atol=1e-6)


def accelerates_workers(comm: Communicator, folder: Path) -> None:
    """Under the DistributedDataParallel that Accelerate makes."""
    del folder
    samples = make_samples(BATCH * comm.size * STEPS * 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = DiLoCo(model.named_parameters(), lr=RATE, max_norm=MAX_NORM, **OPTIONS)
    loader = DataLoader(samples, batch_size=BATCH, collate_fn=transformers.default_data_collator)
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(wrapped, DistributedDataParallel)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch).loss)
            prepared.step()
            prepared.zero_grad()
    own, together = by_hand(comm, samples, 2)
    torch.testing.assert_close(flat(model), own, rtol=1e-4, atol=1e-6)
    optimizer.synchronize()
    torch.testing.assert_close(flat(model), together, rtol=1e-4, atol=1e-6)
    mine = [flat(model), own]
    theirs = [torch.empty(comm.size * one.numel()) for one in mine]
    for everyone, one in zip(theirs, mine, strict=True):
        comm.all_gather(everyone, one)
    common, apart = (one.view(comm.size, -1) for one in theirs)
    assert torch.equal(common[0], common[-1])
    assert not torch.allclose(apart[0], apart[-1], atol=1e-4)
