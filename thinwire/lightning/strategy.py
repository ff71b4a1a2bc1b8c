"""What a Lightning Trainer leaves to thinwire optimizers: synchronising gradients, clipping them, and saving every
rank's state."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from thinwire.lightning.checkpoint_files import CheckpointFiles
from thinwire.lightning.checks import check_clipping, check_optimizers, check_places
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object  # either package's comes in where the strategy is registered

__all__ = ["NAME", "ThinwireStrategy"]

NAME = "thinwire"


class ThinwireStrategy(_DDPStrategy):
    """One process a device, as under Lightning's DDPStrategy; gradients leave through thinwire optimizers.

    What `configure_optimizers()` returns sends gradients during backward, so that the module is not wrapped in
    DistributedDataParallel; clips by the averaged gradient's norm; and its state, every rank's residuals included, lies
    in `thinwire/` beside each checkpoint. Validation and checkpoints show the weights that all ranks have in common.
    The arguments are DDPStrategy's, without those of DistributedDataParallel.

    Raises, on every rank: TypeError for an optimizer that is not thinwire's, ValueError for settings that do not go
    together.
    """

    strategy_name = NAME

    # What thinwire.zero looks for, to tell this from a strategy under which each rank's own gradients are clipped.
    clips_averaged_gradients = True

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._in_training = False
        self._loaded_from: str | Path = ""
        self._last_saved: dict[str, str] = {}

    # Setting up

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers()`, and check what it returns against the Trainer's settings."""
        super().setup_optimizers(trainer)
        check_places(trainer.checkpoint_callbacks)
        check_optimizers(self.optimizers, self.world_size, getattr(self.precision_plugin, "scaler", None))
        trained = [one for one in trainer.lightning_module.parameters() if one.requires_grad]
        for optimizer in self._synchronized:
            check_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            held = {id(one) for group in optimizer.param_groups for one in group["params"]}
            if held.issuperset(map(id, trained)):
                optimizer.attach(trainer.lightning_module)

    def setup_precision_plugin(self) -> None:
        """Have clipping checked, and left to the optimizers."""
        super().setup_precision_plugin()
        vars(self.precision_plugin)["clip_gradients"] = _leave_clipping

    def teardown(self) -> None:
        """Leave everything as it was found."""
        self._in_training = False
        vars(self.precision_plugin).pop("clip_gradients", None)
        super().teardown()

    # Training

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradient accumulation."""
        with ExitStack() as stack:
            for optimizer in self._synchronized:
                stack.enter_context(optimizer.no_sync())
            yield

    # Weights: those that all ranks have in common, where ranks' own differ between syncs

    def on_train_start(self) -> None:
        """Begin."""
        super().on_train_start()
        self._in_training = True

    def on_train_end(self) -> None:
        """Have all ranks hold the same weights."""
        super().on_train_end()
        for optimizer in self._synchronized:
            optimizer.synchronize_weights()
        self._take_over_buffers()
        self._in_training = False

    def on_validation_start(self) -> None:
        """Show the weights that all ranks have in common, with rank 0's buffers, as DistributedDataParallel would."""
        super().on_validation_start()
        if self._in_training:
            self._take_over_buffers()
            for optimizer in self._synchronized:
                optimizer.eval()

    def on_validation_end(self) -> None:
        """Show this rank's own weights again."""
        super().on_validation_end()
        if self._in_training:
            for optimizer in self._synchronized:
                optimizer.train()

    def _take_over_buffers(self) -> None:
        if self.world_size > 1 and self._synchronized:
            assert self.lightning_module is not None
            with torch.no_grad():
                for buffer in self.lightning_module.buffers():
                    values = buffer.detach().contiguous()
                    self._synchronized[0].comm.broadcast(values)
                    buffer.copy_(values)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights that all ranks have in common."""
        if all(optimizer.in_sync for optimizer in self._synchronized):
            return super().lightning_module_state_dict()
        for optimizer in self._synchronized:
            optimizer.eval()
        try:
            state = super().lightning_module_state_dict()
            return {name: one.clone() if isinstance(one, Tensor) else one for name, one in state.items()}
        finally:
            for optimizer in self._synchronized:
                optimizer.train()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` has every rank write its own file."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save what Lightning saves to `filepath`, and the optimizers' state beside it. Collective.

        Raises CheckpointError, on every rank, where it could not be written, as on a full disk.
        """
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        files, nonce = CheckpointFiles(filepath), self.broadcast(secrets.token_hex(4))
        states = files.save(self._synchronized, nonce)
        super().save_checkpoint({**checkpoint, "optimizer_states": states}, filepath, storage_options)
        before = self._last_saved.get(str(filepath))
        self._last_saved[str(filepath)] = nonce
        if not self.is_global_zero:
            return
        if not hasattr(self.checkpoint_io, "checkpoint_io"):
            files.remove(but=[nonce])
        elif before is not None:  # another CheckpointIO inside of this one may still be writing
            files.remove(but=[nonce, before])

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, with the optimizers' state beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            CheckpointFiles(filepath).remove()

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read what Lightning has saved."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *arguments, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, every rank's own. Collective.

        Raises CheckpointError, on every rank, where it is missing or damaged.
        """
        states: Sequence[Any] = checkpoint["optimizer_states"]
        if len(states) != len(self._synchronized):
            raise ValueError(
                f"{self._loaded_from} holds the state of {len(states)} optimizers, and configure_optimizers() returned "
                f"{len(self._synchronized)}: build the same ones, or load the weights alone with load_from_checkpoint()"
            )
        for optimizer, state in zip(self._synchronized, states, strict=True):
            if CheckpointFiles.has_state(state):
                CheckpointFiles(self._loaded_from).load(optimizer, state)
            else:  # saved under another strategy
                optimizer.load_state_dict(state)

    @property
    def _synchronized(self) -> list[SynchronizedOptimizer]:
        return cast(list[SynchronizedOptimizer], self.optimizers)


def _leave_clipping(
    optimizer: torch.optim.Optimizer, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = None
) -> None:
    """What a precision plugin's `clip_gradients` does then; raises ValueError for another norm than the optimizer's."""
    check_clipping(optimizer, clip_val, gradient_clip_algorithm)
