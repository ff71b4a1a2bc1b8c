"""A tiny BERT, a task that it learns in a few steps, and what a Trainer is told: what the tests here share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, default_data_collator

from thinwire.comm import Communicator

BATCH = 4
LENGTH = 6
VOCABULARY = 40
RATE = 3e-3

# Of arguments: every third step is evaluated and saved, and the best of them is loaded in the end.
KEEP_BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_quality",
    "greater_is_better": True,
}

Samples = list[dict[str, Tensor]]


def make_model(seed: int = 0, dropout: float = 0.0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    model.accepts_loss_kwargs = False  # a mean over each micro-batch, as in a plain loop
    return model


def make_samples(number: int, seed: int = 1) -> Samples:
    """Lines of tokens of the vocabulary's lower half, or of its upper one: that is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (number,), generator=generator)
    tokens = torch.randint(VOCABULARY // 2, (number, LENGTH), generator=generator)
    return [
        {"input_ids": line + label * (VOCABULARY // 2), "labels": label}
        for line, label in zip(tokens, labels, strict=True)
    ]


def make_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """On the CPU, in the samples' order, a constant rate, nothing saved and nothing logged."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": 20,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**(settings | changes))


def batches(samples: Samples, rank: int, size: int) -> list[dict[str, Tensor]]:
    """What a Trainer gives to this rank, of one epoch."""
    whole = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
    return [default_data_collator(batch) for batch in whole[rank::size]]


def plain_loop(
    model: nn.Module, optimizer: Any, micro: Samples, accumulation: int = 1, schedule: Any = None
) -> Iterator[None]:
    """Train as a loop without a Trainer does, and yield after every step."""
    for start in range(0, len(micro), accumulation):
        *first, last = micro[start : start + accumulation]
        with optimizer.no_sync():
            for batch in first:
                (model(**batch).loss / accumulation).backward()
        (model(**last).loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        yield


def run_all(comm: Communicator, folder: Path, *bodies: Callable[[Communicator, Path], None]) -> None:
    """Run what every rank of a job checks, and say so in the end."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    transformers.trainer.PrinterCallback.on_log = lambda *_, **__: None
    for body in bodies:
        body(comm, folder / body.__name__)
    comm.barrier()
    if comm.rank == 0:
        print(f"all held with {comm.size} ranks", flush=True)


def logged(trainer: transformers.Trainer, name: str = "loss") -> list[float]:
    """Its values of one name, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
