"""`thinwire config check`: the same loading as in a job, and what comes of it in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint.errors import printable
from thinwire.engine.config.errors import ConfigError
from thinwire.engine.config.explanation import explain_config
from thinwire.engine.config.json_file import read_json_object
from thinwire.engine.config.left_to_trainer import fill_as_trainer, show_as_auto
from thinwire.engine.config.loading import load_config

__all__ = ["check_file"]


def check_file(path: Path, world_size: int | None) -> int:
    """Print what the file will do on `world_size` ranks, or everything that is wrong with it; 0 or 1.

    None: as many ranks as its three batch sizes ask for, or one. An "auto" for Hugging Face's Trainer is
    told as such.
    """
    try:
        given = read_json_object(path)
        tree, left_open = fill_as_trainer(given)
        ranks = world_size if world_size is not None else _ranks_asked_for(tree)
        config = load_config(tree, ranks)
    except ConfigError as error:
        print(printable(f"{path} cannot train:"))
        for problem in error.problems:
            print(printable(f"- {problem}" if problem.endswith(("?", ".")) else f"- {problem}."))
        return 1
    print(printable(f"{path} can train:"))
    if (schedule := config.scheduler) is not None:
        schedule = schedule.model_copy(update={"params": show_as_auto(given, schedule.params)})
    for sentence in [*left_open, *explain_config(config.model_copy(update={"scheduler": schedule}), ranks)]:
        print(printable(f"- {sentence}"))
    return 0


def _ranks_asked_for(tree: Mapping[str, Any]) -> int:
    sizes = [
        tree.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    train, *factors = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    product = factors[0] * factors[1]
    return train // product if product and train and train % product == 0 else 1
