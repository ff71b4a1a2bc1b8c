"""A Trainer that leaves the work to the engine: from a configuration to an engine in training, its steps, weights and
checkpoints, and the accelerator, optimizer and schedule that the Trainer calls."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState
from typing_extensions import override

from thinwire import comm as communication
from thinwire.comm.agreement import on_every_rank
from thinwire.engine import CheckpointError, Engine, EngineConfig
from thinwire.engine.recipe import GivenSchedule
from thinwire.hugging_face.acceleration import check_engine_arguments, leave_models_and_clipping
from thinwire.hugging_face.filled_config import TrainerConfig
from thinwire.lazy_imports import provided
from thinwire.optim import ElasticSampler
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

TAG = "thinwire"
"""The folder's name."""

NOTHING_TO_GO_ON_FROM = (
    "A checkpoint of a Trainer without TrainerMixin, or with save_only_model=True, holds no state to go on from: load "
    "its weights with from_pretrained(), and train without resume_from_checkpoint"
)
"""What to do where it is missing."""


ThinwireConfig = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a JSON file with the engine's configuration, or a dict."""

_BAD_INPUT = (ValueError, TypeError)


class EngineTraining:
    """The engine of one Trainer. `config`: what it was given; `engine`: None until training begins.

    Collective. Raises, on every rank, ConfigError for a configuration that cannot work or contradicts the arguments,
    TypeError for none, ValueError for arguments that an engine cannot keep.
    """

    def __init__(self, source: ThinwireConfig, arguments: Any) -> None:
        self._arguments = arguments
        self._comm = communication.init()
        self.engine: Engine | None = None
        self.elastic = False

        def check() -> TrainerConfig:
            config = TrainerConfig(source)
            check_engine_arguments(arguments, self._comm.size, config.names_schedule)
            settings = config.complete(arguments, arguments.max_steps if arguments.max_steps > 0 else None)
            self.elastic = settings.optimizer is not None and bool(settings.optimizer.params.get("elastic"))
            if self.elastic:
                _check_elastic(arguments)
            if settings.activation_checkpointing.modules and arguments.activation_checkpointing:
                raise ValueError(
                    '"activation_checkpointing.modules" and activation_checkpointing=True of TrainingArguments would '
                    "both run layers again: remove one of them"
                )
            return config

        self.config = on_every_rank(self._comm, check, "use its thinwire_config", _BAD_INPUT)

    def check_given(self, optimizer: Any, schedule: Any, optimizer_class: Any) -> None:
        """Raise ValueError where an optimizer or a schedule is given to the Trainer and in the configuration too."""
        optimizers = self.config.names_optimizer and (optimizer is not None or optimizer_class is not None)
        if optimizers or (self.config.names_schedule and schedule is not None):
            several, section = ("optimizers", "optimizer") if optimizers else ("schedules", "scheduler")
            raise ValueError(
                f'there are two {several}: one passed to the Trainer, and the "{section}" section of thinwire_config. '
                "Remove one of them"
            )
        kind = type(optimizer) if optimizer is not None else optimizer_class
        if isinstance(kind, type) and issubclass(kind, SynchronizedOptimizer):
            raise ValueError(
                f"with thinwire_config the engine shards and synchronises, and {kind.__name__} would too: name it in "
                'the configuration\'s "optimizer" section, or leave thinwire_config out'
            )

    def start(
        self,
        model: nn.Module,
        total_steps: int,
        *,
        optimizer: Any,
        parameters: list[dict[str, Any]] | None,
        schedule: GivenSchedule | None,
    ) -> Engine:
        """The engine that trains `model`; `optimizer` and `schedule` where the configuration names none. Collective.

        Raises RuntimeError for a model that it has trained already, as its weights may be sharded, and what
        `thinwire.initialize` raises.
        """
        if self.engine is not None:
            if self.engine.module is model:
                raise RuntimeError(
                    "train() was called twice with one thinwire_config, and the engine has taken the model over: build "
                    "a new Trainer, with a new model, or give this one a model_init"
                )
            self.engine.close()

        def complete() -> EngineConfig:
            return self.config.complete(self._arguments, total_steps)

        settings = on_every_rank(self._comm, complete, "complete its thinwire_config", _BAD_INPUT)
        self.engine, *_ = provided("engines").initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=parameters,
            lr_scheduler=schedule,
            config=settings,
            comm=self._comm,
        )
        return self.engine

    # Of a training that has begun

    @property
    def running(self) -> Engine:
        """The engine. Raises RuntimeError before the training has begun."""
        if self.engine is None:
            raise RuntimeError("there is no engine yet: it is made when train() begins")
        return self.engine

    @property
    def grad_norm(self) -> float:
        """Of the last step's averaged gradient, before clipping; NaN where it is not known."""
        norm = self.running.get_global_grad_norm()
        return math.nan if norm is None else norm

    def backward(self, loss: Tensor, last: bool) -> None:
        """Take one micro-batch's share of the step's loss; `last`: of this step, which `Engine.step` then ends."""
        engine = self.running
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss, scale_wrt_gas=False)
        if not last:
            engine.step()

    def save(self, checkpoint: str | os.PathLike[str]) -> None:
        """Save all that training depends on to `checkpoint`/thinwire. Collective.

        Raises CheckpointError, on every rank, where it could not be written, as on a full disk.
        """
        if not self.running.save_checkpoint(checkpoint, TAG):
            raise CheckpointError(f"the engine's state was not saved to {checkpoint}: rank 0 has warned of what failed")

    def load(self, checkpoint: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Load what `save` wrote, on any number of ranks, at any ZeRO stage. Collective.

        Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
        optimizer's or schedule's.
        """
        try:
            self.running.load_checkpoint(checkpoint, TAG, load_module_only=weights_only)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {NOTHING_TO_GO_ON_FROM}") from error


# Workers that come and go


def _check_elastic(arguments: Any) -> None:
    """Raise ValueError for TrainingArguments that do not go with workers that come and go."""
    if arguments.world_size > 1:
        raise ValueError(
            f"under the Trainer an elastic worker is one process, got {arguments.world_size}: start each by itself, as "
            "with python, or train nodes in a loop of your own"
        )
    if arguments.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end does not go with elastic, whose weights are not one worker's to change: load the "
            "best checkpoint after training"
        )
    arguments.ignore_data_skip = True  # what was claimed is not read again


class ElasticSamples(Sampler[int]):
    """What this worker claims of the job's samples, from when the engine is there, without end."""

    def __init__(self, training: EngineTraining, dataset: Any, seed: int) -> None:
        self._training, self._size, self._seed = training, len(dataset), seed
        self._samples: ElasticSampler | None = None

    def __iter__(self) -> Iterator[int]:
        optimizer: Any = self._training.running.optimizer
        self._samples = self._samples or ElasticSampler(optimizer, self._size, seed=self._seed)
        return iter(self._samples)


class ElasticSteps(TrainerCallback):
    """Has a Trainer count as the job does, which a worker joins late, or again."""

    def __init__(self, training: EngineTraining) -> None:
        self._training = training

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        counted, state.global_step = state.global_step, self._training.running.global_steps
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        elif counted >= state.max_steps:  # for which the Trainer has stopped
            control.should_training_stop = False


def adapt_accelerator_to_engine(accelerator: Accelerator, training: EngineTraining) -> None:
    """Replace what an accelerator does with models and gradients."""

    def backward(loss: Tensor) -> None:
        # The Trainer has divided the loss, and says whether it is the step's last.
        training.backward(loss, last=accelerator.sync_gradients)

    def clippers() -> list[tuple[str, float, str]]:
        largest = training.running.settings.gradient_clipping
        return [("the engine", largest, 'set "gradient_clipping" and max_grad_norm')]

    # Precision is the engine's.
    accelerator.native_amp = False
    accelerator.scaler = None
    leave_models_and_clipping(accelerator, clippers)
    accelerator.backward = backward
    accelerator.no_sync = lambda model: nullcontext()


class EngineStep(AcceleratedOptimizer):  # type: ignore[misc]
    """What a Trainer takes for its optimizer: its step is the engine's. `rate`: of the first group, in the last step
    that was taken, or in the first to come."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self.rate = engine.get_lr()[0]

    def step(self, closure: None = None) -> None:
        """End the micro-batch and with it the step; raises what `Engine.step` raises. Collective."""
        if closure is not None:
            raise TypeError("the engine's step takes no closure: call backward() before it")
        if self.gradient_state.sync_gradients:
            self.rate = self._engine.get_lr()[0]
            self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing is left to reset: a step forgets its gradients."""

    def train(self) -> None:
        """Nothing: see `eval`."""

    def eval(self) -> None:
        """Nothing: the engine gives all ranks the same weights when its model is evaluated."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied."""
        return not self._engine.was_step_applied()


class EngineSchedule:
    """What a Trainer takes for its schedule, which the engine steps. Other attributes are the schedule's own."""

    def __init__(self, training: EngineTraining) -> None:
        self._schedule = training.running.lr_scheduler

    def step(self) -> None:
        """Nothing: the engine has stepped it."""

    def __getattr__(self, name: str) -> Any:
        if name == "_schedule":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._schedule, name)
