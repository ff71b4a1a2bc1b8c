"""LoRA through peft: what every rank runs, as a part of program.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.hugging_face.lora import agree, make_adapted, trained, untrained
from tests.hugging_face.tiny import BATCH, RATE, make_samples
from tests.lightning.tiny import make_trainer
from thinwire import OneBitAdam
from thinwire.comm import Communicator


class Adapted(pl.LightningModule):
    """Saves the adapters alone."""

    strict_loading = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = make_adapted(seed)
        self.losses: list[float] = []

    def configure_optimizers(self) -> OneBitAdam:
        parameters = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
        return OneBitAdam(parameters, lr=RATE, freeze_step=16)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_samples(96), batch_size=BATCH, collate_fn=transformers.default_data_collator)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {name for name, one in self.named_parameters() if one.requires_grad}
        checkpoint["state_dict"] = {name: one for name, one in checkpoint["state_dict"].items() if name in names}


def trains_adapters(comm: Communicator, folder: Path) -> None:
    """Only the adapters are sent and saved; a resume goes on bit for bit."""

    def train(seed: int, checkpoint: Path | None = None) -> Adapted:
        module = Adapted(seed)
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(pl, folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(module, ckpt_path=checkpoint)
        return module

    whole = train(0)
    assert agree(comm, trained(whole))
    assert torch.equal(untrained(whole), untrained(make_adapted()))
    assert sum(whole.losses[24:]) < sum(whole.losses[:12])
    assert whole.trainer.optimizers[0].bytes_uncompressed == 36 * 4 * trained(whole).numel()
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert sum(one.numel() for one in saved.values()) == trained(whole).numel()

    resumed = train(1, folder / "epoch=1.ckpt")
    assert torch.equal(trained(whole), trained(resumed))
    assert whole.losses[24:] == resumed.losses
    expected, found = (one.trainer.optimizers[0].rank_tensors() for one in (whole, resumed))
    assert all(torch.equal(expected[key], found[key]) for key in expected)
