"""A LightningModule with 1-bit Adam, which learns to tell points inside a ring from those outside.

    python examples/lightning_module.py                                     (one process)
    python examples/lightning_module.py --devices 2                         (Lightning starts the second)
    torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2

What differs from Lightning with torch.optim.AdamW: the optimizer's class, the strategy's name, and the import of both.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire.lightning  # makes strategy="thinwire" known


class Ring(lightning.LightningModule):
    """Points of the plane; the label says whether they lie inside of the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        points, inside = batch
        return nn.functional.cross_entropy(self.layers(points), inside)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Log the accuracy, over all ranks."""
        points, inside = batch
        right = (self.layers(points).argmax(dim=1) == inside).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Compression begins after 60 steps, once the variance has settled."""
        return thinwire.OneBitAdam(self.named_parameters(), lr=3e-3, freeze_step=60)


def ring(number: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """So many points in batches of 32; each rank gets its share."""
    points = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    radius = points.norm(dim=1)
    return DataLoader(TensorDataset(points, ((radius > 0.7) & (radius < 1.5)).long()), batch_size=32)


def main(folder: str, devices: int = 1, epochs: int = 4) -> lightning.Trainer:
    """Train, with a checkpoint of the best epoch in `folder`."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy="thinwire",
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, monitor="accuracy", mode="max")],
        logger=False,
    )
    trainer.fit(Ring(), ring(2048 * devices, seed=1), ring(512, seed=2))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    trained = main("runs/lightning_module", parser.parse_args().devices)
    print(f"accuracy {float(trained.callback_metrics['accuracy']):.3f}")
