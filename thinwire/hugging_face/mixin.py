"""Do what a Trainer leaves to a thinwire optimizer, or to the engine: synchronise gradients, clip them, and save
every rank's state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from transformers import get_scheduler

from thinwire.comm.agreement import on_every_rank
from thinwire.engine import Engine
from thinwire.engine.errors import CheckpointError
from thinwire.engine.optimizer_checkpoints import load_optimizer, save_optimizer
from thinwire.hugging_face.acceleration import (
    adapt_accelerator,
    check_arguments,
    check_freeze,
    check_optimizer,
    synchronized,
)
from thinwire.hugging_face.engine_training import (
    NOTHING_TO_GO_ON_FROM,
    TAG,
    ElasticSamples,
    ElasticSteps,
    EngineSchedule,
    EngineStep,
    EngineTraining,
    ThinwireConfig,
    adapt_accelerator_to_engine,
)
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


_SCHEDULE = "scheduler.pt"  # as transformers calls it
_OF_ONE_RANK = (
    "the random state of one rank, which would go on with other dropout and data than it had: copy it from where the "
    "checkpoint was saved, or resume from an earlier one. To go on with other random numbers, put a copy of another "
    "rank's file in its place"
)


class TrainerMixin(_Trainer):
    """Put before any subclass of transformers.Trainer: `class MyTrainer(TrainerMixin, SFTTrainer)`.

    The optimizer comes from `optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {...})` or from `optimizers=(optimizer,
    schedule)`. It sends gradients during backward, so that the model is not wrapped in DistributedDataParallel; clips
    to `args.max_grad_norm` by the averaged gradient's norm; and its state, every rank's residuals included, lies beside
    what the Trainer saves in each checkpoint. `grad_norm` in logs is of the averaged gradient.

    With `thinwire_config`, the path of a JSON file or a dict with the engine's keys, the engine does all that, at any
    ZeRO stage. What the configuration leaves out or has as "auto" is what TrainingArguments say; the optimizer is its
    own, or without an "optimizer" section the Trainer's.

    Raises, on every rank: TypeError for an optimizer that is not thinwire's, or a class that puts the mixin after the
    Trainer, ValueError for arguments that do not go together. ConfigError is one: a configuration that cannot work, or
    says other than TrainingArguments do.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any

    _thinwire_config: ThinwireConfig | None = None
    _engine_training: EngineTraining | None = None
    _saved_by: int | None = None  # ranks, what was resumed from
    follows_workers: bool = False  # whether it counts as an elastic job does

    def __init__(self, *arguments: Any, thinwire_config: ThinwireConfig | None = None, **options: Any) -> None:
        self._thinwire_config = thinwire_config
        super().__init__(*arguments, **options)
        self.check_given()

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError where a Trainer comes before the mixin, whose methods then never run."""
        super().__init_subclass__(**options)
        bases = cls.__mro__[1:]
        trainers = [one for one in bases if (one.__module__, one.__name__) == ("transformers.trainer", "Trainer")]
        if trainers and bases.index(trainers[0]) < bases.index(TrainerMixin):
            raise TypeError(
                f"{cls.__name__} names TrainerMixin after a Trainer: write class {cls.__name__}"
                "(TrainerMixin, ...), or nothing of it would be used"
            )

    # Setting up

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, and have it leave gradients alone."""
        super().create_accelerator_and_postprocess()
        self.adapt_accelerator(self._thinwire_config)

    def adapt_accelerator(self, thinwire_config: ThinwireConfig | None) -> None:
        """Have the Trainer's accelerator leave gradients alone; raise ValueError for arguments that cannot be kept."""
        check_arguments(self.args)
        if thinwire_config is None:
            adapt_accelerator(self.accelerator, lambda optimizer: check_optimizer(optimizer, self.args))
        else:
            self._engine_training = EngineTraining(thinwire_config, self.args)
            adapt_accelerator_to_engine(self.accelerator, self._engine_training)

    def check_given(self) -> None:
        """Raise ValueError where both the Trainer and the engine's configuration have an optimizer, or a schedule."""
        if self._engine_training is not None:
            kind, _ = self.optimizer_cls_and_kwargs or (None, {})
            self._engine_training.check_given(self.optimizer, self.lr_scheduler, kind)

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**options)
        if self._thinwire_config is not None:
            built["mixed_precision"] = "no"  # precision is the engine's
        return built

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer where none was given, with `args.learning_rate` and `args.max_grad_norm`.

        With an engine, the one that it takes over.
        """
        if self._engine_training is not None:
            return super().create_optimizer(model)
        _refuse_a_model_in_shards(self)
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            self.optimizer_cls_and_kwargs = self._with_arguments(given)
        try:
            optimizer = super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        synchronized(optimizer).attach(self.model)
        return optimizer

    def _with_arguments(self, given: tuple[Any, Mapping[str, Any]] | None) -> tuple[Any, dict[str, Any]]:
        kind, options = given or (None, {})
        if not (isinstance(kind, type) and issubclass(kind, SynchronizedOptimizer)):
            found = self.args.optim if kind is None else getattr(kind, "__name__", kind)
            raise TypeError(
                f"TrainerMixin trains with a thinwire optimizer, and was given {found!s}: pass "
                "optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {}), or optimizers=(optimizer, schedule)"
            )
        of_arguments = {
            "lr": self.args.learning_rate,
            "max_norm": self.args.max_grad_norm,
            "named_parameters": list(self.model.named_parameters()),
        }
        return kind, of_arguments | dict(options)

    # The engine

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        training, dataset = self._engine_training, self.train_dataset if train_dataset is None else train_dataset
        if training is None or not training.elastic:
            return super()._get_train_sampler(train_dataset)
        return ElasticSamples(training, dataset, self.args.seed)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        training = self._engine_training
        if training is None:
            prepare: Any = super()._prepare_for_training
            prepared = prepare(max_steps, train_dataloader, resume_from_checkpoint)
            check_freeze(self._synchronized, self.lr_scheduler, max_steps)
            return prepared
        _refuse_a_model_in_shards(self)
        arguments: Any = self.args

        def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
            return get_scheduler(
                arguments.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=arguments.get_warmup_steps(max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
            )

        engine = training.start(
            self.model,
            max_steps,
            optimizer=None if training.config.names_optimizer else self.create_optimizer(),
            parameters=_parameter_groups(self) if training.config.names_optimizer else None,
            schedule=None if training.config.names_schedule else self.lr_scheduler or make_schedule,
        )
        self.model_wrapped = engine
        self.optimizer = EngineStep(engine)
        self.lr_scheduler = EngineSchedule(training)
        self.accelerator._optimizers.append(self.optimizer)  # which it asks whether steps were skipped
        if resume_from_checkpoint is not None and not engine.global_steps:  # who joins a job has its state
            training.load(resume_from_checkpoint)
        if training.elastic:
            self.follows_workers = True
            self.state.global_step = engine.global_steps
            self.add_callback(ElasticSteps(training))
        check_freeze(engine.optimizer, engine.lr_scheduler, max_steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return engine, train_dataloader

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._engine is not None:
            return self._engine  # for evaluation too: it places inputs, and gives all ranks the same weights
        if not training and self.optimizer is not None and self._engine_training is None:
            # A BatchNorm's means, which without DistributedDataParallel are each rank's own.
            broadcast_from_rank_0(self._synchronized.comm, list(self.model.buffers()))
        return super()._wrap_model(model, training, dataloader)

    # Logging

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, with the norm of the averaged gradient, which is not known before the step; and with the bytes that this
        rank has sent so far, and whether the steps from here on are compressed, where the optimizer has that."""
        if "learning_rate" in logs:
            optimizer = self._stepped
            logs["bytes_sent"] = optimizer.bytes_sent
            if hasattr(optimizer, "frozen"):
                logs["frozen"] = float(optimizer.frozen)
        if "grad_norm" in logs:
            training = self._engine_training
            logs["grad_norm"] = self._synchronized.last_step.grad_norm if training is None else training.grad_norm
        super().log(logs, *args, **options)

    def _get_learning_rate(self) -> float:
        if isinstance(self.optimizer, EngineStep):
            return self.optimizer.rate  # the engine has stepped the schedule already
        rate: float = super()._get_learning_rate()
        return rate

    # Weights: those that all ranks have in common, where ranks' own differ between syncs

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; afterwards all ranks hold the same weights, and rank 0's buffers."""
        output = super().train(*args, **options)
        _leave_evaluation(self._stepped)
        self._stepped.synchronize_weights()
        if self._engine_training is None:
            broadcast_from_rank_0(self._synchronized.comm, list(self.model.buffers()))
        return output

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the weights that all ranks have in common."""
        with self._common_weights():
            super().save_model(*args, **options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._engine is not None and state_dict is None:
            state_dict = self._engine.whole_state_dict()
        super()._save(output_dir, state_dict)

    def _load_best_model(self) -> None:
        if self._engine_training is not None:
            self._engine_training.load(str(self.state.best_model_checkpoint), weights_only=True)
            return
        _leave_evaluation(self._synchronized)
        self._synchronized.synchronize_weights()  # else a sync would come later, and undo what is loaded
        super()._load_best_model()

    @contextmanager
    def _common_weights(self) -> Iterator[None]:
        if self.optimizer is None or self._engine_training is not None:
            yield
            return
        self._synchronized.eval()
        try:
            yield
        finally:
            self._synchronized.train()

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._engine_training is not None:
            self._engine_training.save(output_dir)
            return
        save_optimizer(self._synchronized, output_dir, TAG)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._saved_by = load_optimizer(self._synchronized, checkpoint, TAG, NOTHING_TO_GO_ON_FROM)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULE), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random numbers; on another number of ranks than has saved, of those that were there."""
        if checkpoint is None:
            return
        load, arguments, engine = super()._load_rng_state, self.args, self._engine
        saved_by = self._saved_by if engine is None else engine.loaded_checkpoint_dp_world_size
        name = f"rng_state_{arguments.process_index}.pth" if arguments.world_size > 1 else "rng_state.pth"

        def restore() -> None:
            path = os.path.join(checkpoint, name)
            if not os.path.isfile(path):
                if saved_by == arguments.world_size:
                    raise CheckpointError(f"{path} is missing, {_OF_ONE_RANK}")
                return
            try:
                load(checkpoint)
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read ({error}), {_OF_ONE_RANK}") from error

        on_every_rank(self._stepped.comm, restore, "restore its random numbers", (CheckpointError,))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._engine_training is None:  # else the engine loads the weights with all the rest
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @property
    def _engine(self) -> Engine | None:
        return None if self._engine_training is None else self._engine_training.engine

    @property
    def _synchronized(self) -> SynchronizedOptimizer:
        return synchronized(self.optimizer)

    @property
    def _stepped(self) -> Any:
        """The thinwire optimizer, by itself or the engine's."""
        return self._synchronized if self._engine is None else self._engine.optimizer


def _parameter_groups(trainer: TrainerMixin) -> list[dict[str, Any]]:
    """The Trainer's: what decays, and what does not."""
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    named = [(name, one) for name, one in trainer.model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in named if name in decaying], "weight_decay": trainer.args.weight_decay},
        {"params": [one for name, one in named if name not in decaying], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _refuse_a_model_in_shards(trainer: TrainerMixin) -> None:
    if trainer.is_distributed_loading_by_transformers:
        raise ValueError(
            "the model was loaded in shards, and thinwire begins with it whole on every rank: load it without a "
            "distributed configuration; stage=1 or stage=2 of OneBitAdam shards the optimizer's state, and "
            "thinwire_config the model too"
        )


def _leave_evaluation(optimizer: Any) -> None:
    """Have parameters follow what is written to them, where the last evaluation has left other weights showing."""
    if isinstance(optimizer, SynchronizedOptimizer) and not optimizer.in_training:
        optimizer.train()


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer, whose gradients a thinwire optimizer synchronises: see TrainerMixin."""


AnyTrainer = TypeVar("AnyTrainer", bound=transformers.Trainer)


def adapt(trainer: AnyTrainer, thinwire_config: ThinwireConfig | None = None) -> AnyTrainer:
    """Have a trainer do all that TrainerMixin does, before its `train()`; returns it.

    `thinwire_config`: as TrainerMixin takes it. The trainer's class becomes a subclass of what it was. Raises TypeError
    for what is no transformers.Trainer, RuntimeError for one that has trained, as its model is wrapped already, and
    ValueError for arguments that TrainerMixin refuses.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"adapt() takes a transformers.Trainer, got a {type(trainer).__name__}")
    if isinstance(trainer, TrainerMixin):
        if thinwire_config is not None:
            raise TypeError(f"this {type(trainer).__name__} is adapted: pass thinwire_config where it is built")
        return trainer
    if trainer.model_wrapped is not trainer.model:
        raise RuntimeError(
            f"this {type(trainer).__name__} has wrapped its model already: call adapt() right after it is built"
        )
    whole = type(trainer)
    trainer.__class__ = type(whole.__name__, (TrainerMixin, whole), {"__module__": whole.__module__})
    TrainerMixin.adapt_accelerator(trainer, thinwire_config)  # type: ignore[arg-type]
    TrainerMixin.check_given(trainer)  # type: ignore[arg-type]
    return trainer
