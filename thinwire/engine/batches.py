"""Training and evaluation of a global batch at a time: all micro-batches of a step, by a pipeline's schedule or one
after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.agreement import on_every_rank
from thinwire.engine.backwards import StepBackwards
from thinwire.engine.data import RepeatingLoader, ResumableLoader
from thinwire.engine.job import Job
from thinwire.engine.model import Precision
from thinwire.engine.optimizers import NoOptimizer
from thinwire.parallel.pipeline import next_batches


class GlobalBatches:
    """What `train` and `evaluate` do to the engine of a job. Both are collective, and return the mean loss of the
    global batch, fp32, on every rank.

    `given`: what is taken from where they are given nothing; None for the engine's own loader.

    Raise StopIteration where no micro-batch is left, and ValueError, on every rank, where one is amiss.
    """

    def __init__(self, job: Job, engine: Any, backwards: StepBackwards) -> None:
        self._job, self._engine, self._backwards = job, engine, backwards
        self._own: _Endless | None = None
        self.given: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Take of every micro-batch what `fn` makes of it."""
        if not callable(fn):
            raise TypeError(f"a function of a micro-batch is expected, got {fn!r}")
        self._batch_fn = fn

    def train(self, batches: Iterator[Any] | None) -> Tensor:
        """Take the next micro-batches and a step."""
        job, engine, optimizer = self._job, self._engine, self._job.optimizer
        if isinstance(optimizer, NoOptimizer):
            optimizer.refuse("train_batch")
        batches, parts = self._given(batches), engine.settings.gradient_accumulation_steps
        if job.pipeline is not None:
            job.pipeline.loss_scale = 1.0 if job.loss_scale is None else job.loss_scale.value
            optimizer.summed, optimizer.loss_scale = 1, job.pipeline.loss_scale
            loss = job.pipeline.train_batch(self._placed(batches))
            self._backwards.take_pipeline(loss, parts)
            engine.step()
            engine.micro_steps += parts - 1
            return loss
        losses = []
        for batch in self._take(batches, parts):
            loss = self._loss(batch)
            losses.append(loss.detach().float())
            engine.backward(loss)
            engine.step()
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Any] | None) -> Tensor:
        """Evaluate the next micro-batches, in evaluation mode; the mode is afterwards as it was."""
        engine, pipeline = self._engine, self._job.pipeline
        batches, training = self._given(batches), engine.module.training
        engine.eval()
        try:
            if pipeline is not None:
                return pipeline.eval_batch(self._placed(batches))
            parts = engine.settings.gradient_accumulation_steps
            return self._mean([self._loss(batch).float() for batch in self._take(batches, parts)])
        finally:
            engine.train(training)

    def _given(self, batches: Iterator[Any] | None) -> Iterator[Any]:
        found = self._source(batches)
        return found if self._batch_fn is None or not hasattr(found, "__next__") else map(self._batch_fn, found)

    def _source(self, batches: Iterator[Any] | None) -> Iterator[Any]:
        batches = batches if batches is not None else self.given
        if batches is not None:
            return batches
        loader = self._engine.training_dataloader
        if loader is None:
            raise ValueError(
                "there is no loader to take micro-batches from: give an iterator, or training_data to "
                "thinwire.initialize"
            )
        if self._own is None or self._own.loader is not loader:
            self._own = _Endless(loader)
        return self._own

    def _take(self, batches: Iterator[Any], count: int) -> list[Any]:
        take = partial(next_batches, batches, count, self._checked)
        return on_every_rank(self._job.world, take, "read micro-batches", (ValueError, StopIteration))

    def _checked(self, batch: Any) -> Any:
        if self._job.loss_fn is None and not isinstance(batch, Mapping):
            raise ValueError(
                f"a micro-batch is a {type(batch).__name__}, and the model's loss of it is not known: give the names "
                "and tensors that a Hugging Face model takes, labels among them, or loss_fn to thinwire.initialize"
            )
        if self._job.loss_fn is not None and not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ValueError(f"with loss_fn a micro-batch is a pair, inputs and targets; got {type(batch).__name__}")
        return batch

    def _loss(self, batch: Any) -> Tensor:
        loss_fn = self._job.loss_fn
        if loss_fn is not None:
            (given, targets), several = batch, isinstance(batch[0], tuple | list)
            return loss_fn(self._engine(*given) if several else self._engine(given), self._on_device(targets))
        output = self._engine(**batch)
        if isinstance(output, Tensor):
            return output
        loss: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"the model returned {type(output).__name__} without a loss: give it labels, or loss_fn to "
                "thinwire.initialize"
            )
        return loss

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Micro-batches where a pipeline takes them; what is no iterator, as it is."""
        return map(self._place, batches) if hasattr(batches, "__next__") else batches

    def _place(self, batch: Any) -> Any:
        job = self._job
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return job.precision.place(batch[0], job.device), self._on_device(batch[1])
        return job.precision.place(batch, job.device)

    def _on_device(self, targets: Any) -> Any:
        return Precision(None).place(targets, self._job.device)

    def _mean(self, losses: list[Tensor]) -> Tensor:
        mean = torch.stack([loss.reshape(()) for loss in losses]).mean().detach()
        self._job.comm.all_reduce(mean, "mean")
        return mean


class _Endless:
    """A loader's batches without end, from where it is."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches, self._seen = RepeatingLoader(loader), self._place()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._seen != self._place():  # another loop, or a checkpoint, has moved it
            self._batches = RepeatingLoader(self.loader)
        batch = next(self._batches)
        self._seen = self._place()
        return batch

    def _place(self) -> Any:
        return self.loader.state() if isinstance(self.loader, ResumableLoader) else None
