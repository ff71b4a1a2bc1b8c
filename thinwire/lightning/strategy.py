"""The strategy of a Lightning Trainer whose gradients leave through a thinwire optimizer, the checks of what it is
given, and the optimizers' part of its checkpoints.

That lies beside NAME.ckpt, in `thinwire/` of the same folder: a checkpoint for each optimizer, with one file a rank. A
new one is written under a new tag before NAME.ckpt, which names the tag, takes the place of an older one; what that one
named goes last. Killed at any moment, NAME.ckpt names what is there.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from thinwire.comm.agreement import on_every_rank
from thinwire.engine.checkpoint.folder import CheckpointFolder
from thinwire.engine.optimizer_checkpoints import load_optimizer, save_optimizer
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer
from thinwire.zero.training_loops import follow_job


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], world_size: int, scaler: object) -> None:
    """Raise TypeError for an optimizer that is not ours, ValueError for one that does not go with the Trainer.

    `scaler`: the GradScaler that steps it, if any.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, SynchronizedOptimizer):
            raise TypeError(
                f"configure_optimizers() returned {name}, and under ThinwireStrategy only a thinwire optimizer sends "
                "gradients, so that ranks would train apart: return thinwire.OneBitAdam(self.parameters(), ...) or "
                'another of thinwire\'s, or train with strategy="ddp"'
            )
        if optimizer.comm.size != world_size:
            raise ValueError(
                f"{name} has {optimizer.comm.size} ranks and the Trainer {world_size}: build the optimizer, and its "
                "communicator, in configure_optimizers(), when the Trainer's processes have met, and start the job "
                "with as many processes as devices= and num_nodes= say"
            )
        if scaler is not None and getattr(optimizer, "stage", 0) == 2:
            raise ValueError(
                'precision="16-mixed" steps through a GradScaler, which cannot look at gradients that stage 2 has sent '
                'to their owners: use stage=1, or precision="bf16-mixed"'
            )


def check_clipping(optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: str | None = None) -> None:
    """Raise ValueError where Lightning is to clip otherwise than this optimizer does; a plugin's `clip_gradients`.

    `clip_val` and `gradient_clip_algorithm`: the Trainer's, or what `clip_gradients` of a LightningModule was given.
    """
    if not clip_val:
        return
    name = type(optimizer).__name__.removeprefix("Lightning")
    if getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) not in (None, "norm"):
        raise ValueError(
            f'gradient_clip_algorithm="value" clips every element of a gradient, which has left for the other ranks by '
            f'then: clip by norm, with gradient_clip_algorithm="norm" and max_norm={clip_val} of {name}'
        )
    if clip_val != optimizer.max_norm:
        raise ValueError(
            f"gradient_clip_val is {clip_val} and max_norm of {name} is {optimizer.max_norm}: pass max_norm={clip_val} "
            f"to {name}, as the optimizer clips for the Trainer, by the averaged gradient's norm"
        )


def check_freezes(optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[Any], module: Any) -> None:
    """Raise ValueError, on every rank, where a variance would be frozen before its learning rate is at its highest, or
    within the first steps of the run. Collective.

    `schedules`: the Trainer's, each with how often it is stepped. In manual optimization the module steps them, and
    nothing can be foreseen.
    """
    trainer = module.trainer
    for optimizer in optimizers if module.automatic_optimization else ():
        if not isinstance(optimizer, CompressedOptimizer):
            continue

        def check(optimizer: CompressedOptimizer = optimizer) -> None:
            total = trainer.estimated_stepping_batches
            of_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            own = next((one for one in schedules if one.scheduler.optimizer is optimizer), None)
            every = 1 if own is None else own.frequency * (1 if own.interval == "step" else of_epoch)
            optimizer.check_schedule(None if own is None else own.scheduler, total, every)

        if math.inf > trainer.num_training_batches and 0 < trainer.estimated_stepping_batches < math.inf:
            on_every_rank(optimizer.comm, check, "begin training", (ValueError,))


def check_elastic(trainer: Any) -> None:
    """Raise ValueError unless a Trainer can count as an elastic job does, by the optimizer's steps."""
    automatic = trainer.lightning_module.automatic_optimization and len(trainer.optimizers) == 1
    steps = all(one.interval == "step" and one.frequency == 1 for one in trainer.strategy.lr_scheduler_configs)
    if trainer.world_size > 1 or trainer.max_steps < 0 or not automatic or not steps:
        raise ValueError(
            "with elastic every worker is a Trainer of one process, devices=1, with max_steps=, one optimizer, "
            'automatic optimization, and schedules of {"interval": "step"}: steps are counted as the job counts them'
        )


def check_places(callbacks: Sequence[Any]) -> None:
    """Raise ValueError for a ModelCheckpoint, of these, that saves where not all ranks can write files."""
    for callback in callbacks:
        if "://" in (folder := str(getattr(callback, "dirpath", None) or "")):
            raise ValueError(
                f"{type(callback).__name__} saves to {folder}, and every rank writes a file of its optimizer's state: "
                "give a dirpath on a file system that all ranks have mounted"
            )


_FOLDER = "thinwire"
_TAG = "thinwire_tag"  # of an optimizer's entry in NAME.ckpt
_LONGEST_NAME = 150  # bytes of NAME in a tag
_PATIENCE = 60.0  # seconds for which another job may have the folder locked


class CheckpointFiles:
    """What belongs to the Lightning checkpoint at `path`.

    Raises ValueError for a path that is not one of a file system.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            raise ValueError(
                f"cannot save or load the optimizers' state at {path}: every rank has a file of its own, on a file "
                "system that all ranks have mounted; give a path there"
            )
        self._path = Path(path)
        self._folder = self._path.parent / _FOLDER
        name = self._path.name.encode()[:_LONGEST_NAME].decode(errors="ignore").lstrip(".")
        self._name = "".join(one if one.isprintable() and one != "\\" else "_" for one in name)

    def save(self, optimizers: Sequence[SynchronizedOptimizer], nonce: str) -> list[dict[str, Any]]:
        """Write every optimizer's state; what NAME.ckpt has to say of each. Collective.

        `nonce`: eight hexadecimal digits, the same on all ranks, that no other save uses. Raises CheckpointError, on
        every rank, where it could not be written.
        """
        entries = []
        for number, optimizer in enumerate(optimizers):
            tag = f"{self._name}.{nonce}.{number}"
            save_optimizer(optimizer, self._folder, tag)
            entries.append({_TAG: tag})
        return entries

    def remove(self, but: Sequence[str] = (), only: Sequence[str | None] | None = None) -> None:
        """Remove what earlier saves of this name wrote, but for these nonces, or `only` that. By rank 0 alone."""
        stale = re.compile(rf"{re.escape(self._name)}\.([0-9a-f]{{8}})\.\d+")
        names = sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []
        for name in names:
            found = stale.fullmatch(name)
            if found is None or found[1] in but or (only is not None and found[1] not in only):
                continue
            if problem := CheckpointFolder(self._folder).remove(name, _PATIENCE):
                warnings.warn(problem, RuntimeWarning, stacklevel=2)

    @staticmethod
    def has_state(entry: Any) -> bool:
        """Whether this entry of NAME.ckpt is one that `save` returned."""
        return isinstance(entry, dict) and _TAG in entry

    def load(self, optimizer: SynchronizedOptimizer, entry: Any) -> None:
        """Load the state that an entry stands for, on any number of ranks. Collective.

        Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
        optimizer's.
        """
        advice = (
            f"{self._path} goes with {self._folder}: copy both. The weights alone load with load_from_checkpoint(), to "
            "train from without ckpt_path"
        )
        load_optimizer(optimizer, self._folder, entry[_TAG], advice)


if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object  # either package's comes in where the strategy is registered


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
        vars(self.precision_plugin)["clip_gradients"] = check_clipping

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

    def optimizer_step(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """Step; of an elastic job, the Trainer counts the last step, and no other."""
        module = self.lightning_module
        if module is not None and module.trainer.fit_loop._skip_backward:
            return arguments[0]()  # StochasticWeightAveraging runs the averaged model, for a BatchNorm's means
        output = super().optimizer_step(optimizer, *arguments, **options)
        if module is not None and getattr(optimizer, "comes_and_goes", False):
            follow_job(module.trainer, optimizer.steps - 1)
        return output

    # Weights: those that all ranks have in common, where ranks' own differ between syncs

    def on_train_start(self) -> None:
        """Begin."""
        super().on_train_start()
        assert self.lightning_module is not None
        check_freezes(self._synchronized, self.lr_scheduler_configs, self.lightning_module)
        for optimizer in (one for one in self._synchronized if one.comes_and_goes):
            check_elastic(self.lightning_module.trainer)
            follow_job(self.lightning_module.trainer, optimizer.steps)
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
            broadcast_from_rank_0(self._synchronized[0].comm, list(self.lightning_module.buffers()))

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
        if any(one.comes_and_goes for one in self._synchronized):  # other workers may save under this name too
            files.remove(only=[before])
        elif not hasattr(self.checkpoint_io, "checkpoint_io"):
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
            if optimizer.comes_and_goes and optimizer.steps:
                continue  # who joins a job has its state
            if CheckpointFiles.has_state(state):
                CheckpointFiles(self._loaded_from).load(optimizer, state)
            else:  # saved under another strategy
                optimizer.load_state_dict(state)

    @property
    def _synchronized(self) -> list[SynchronizedOptimizer]:
        return cast(list[SynchronizedOptimizer], self.optimizers)
