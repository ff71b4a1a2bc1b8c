"""A tiny module, a task that it learns in a few steps, and a quiet Trainer, for either of Lightning's packages."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

BATCH = 4
WIDTH = 8
RATE = 1e-2

Build = Callable[[nn.Module], Any]
"""What makes of a module what `configure_optimizers` returns."""


def make_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 2))


def make_data(batches: int, ranks: int = 1, seed: int = 1) -> TensorDataset:
    """So many batches for each rank: points, and on which side of a plane they lie."""
    points = torch.randn(batches * ranks * BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def loss_of(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    points, sides = batch
    return nn.functional.cross_entropy(network(points), sides)


def batches_of(data: TensorDataset, rank: int, size: int) -> list[tuple[Tensor, ...]]:
    """What a Trainer's sampler gives to this rank, in the first epoch."""
    mine = list(DistributedSampler(data, size, rank, shuffle=True))
    return [data[mine[start : start + BATCH]] for start in range(0, len(mine), BATCH)]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def make_module_class(pl: ModuleType) -> type[Any]:
    class Classifier(pl.LightningModule):
        def __init__(self, build: Build, seed: int = 0, batches: int = 8, ranks: int = 1) -> None:
            super().__init__()
            self.network = make_network(seed)
            self.losses: list[float] = []
            self.steps: list[tuple[int, float]] = []  # bytes sent so far, and the gradient's norm
            self.evaluated: list[Tensor] = []  # weights and buffers of each validation
            self.own_losses: list[float] = []
            self._build = build
            self._data = make_data(batches, ranks)

        def configure_optimizers(self) -> Any:
            return self._build(self)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = loss_of(self.network, batch)
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            if isinstance(optimizer, SynchronizedOptimizer):
                self.steps.append((optimizer.bytes_sent, optimizer.last_step.grad_norm))

        def validation_step(self, batch: Any, number: int) -> None:
            loss = loss_of(self.network, batch)
            if number == 0:
                self.own_losses.append(loss.item())
                state = [one.detach().double().reshape(-1) for one in self.state_dict().values()]
                self.evaluated.append(torch.cat(state))
            self.log("val", loss, sync_dist=True)

        def test_step(self, batch: Any, number: int) -> None:
            self.log("test", loss_of(self.network, batch), sync_dist=True)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self._data, batch_size=BATCH)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self._data, batch_size=BATCH)

        test_dataloader = val_dataloader

    return Classifier


def make_trainer(pl: ModuleType, folder: Path, **changes: Any) -> Any:
    """On the CPU, on two devices, nothing shown, nothing saved, no validation."""
    warnings.filterwarnings("ignore", module=f"({pl.__name__}|lightning|lightning_fabric|torch).*")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "strategy": "thinwire",
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": str(folder),
    }
    return pl.Trainer(**(settings | changes))
