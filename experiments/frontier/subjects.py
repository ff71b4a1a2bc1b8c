"""What the contenders learn, for how long, and which rates each kind of optimizer tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.frontier.contenders import BASELINE, CONTENDERS, DILOCO, Contender
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask, share_text
from experiments.training.plans import Plan
from experiments.training.trainer import Task
from thinwire.comm import threads

__all__ = ["RECIPES", "SUBJECTS", "Recipe", "Subject"]


@dataclass(frozen=True)
class Recipe:
    """What suits an exact optimizer and what is made from it, beside the peak rates to try first: three, by factors
    of two."""

    weight_decay: float
    options: Mapping[str, Any] = field(default_factory=dict)


RECIPES = {
    "adamw": Recipe(0.01),
    "lamb": Recipe(0.01),
    # As its authors advise; its default β₂ remembers 100 steps, which is long beside these runs.
    "lion": Recipe(0.1, {"betas": (0.9, 0.95)}),
    "muon": Recipe(0.01),
}


@dataclass(frozen=True)
class Subject:
    """A task, and how it is trained.

    Attributes:
        description: for the picture.
        unit: of the loss.
        steps: of every run.
        rates: peaks to try first, by exact optimizer.
        contenders: names of those who learn it.
        workers: how many they are, for each comparison.
        text: the size of the model and the windows a worker reads in a step, if it learns text; else it learns digits.
        validations: on the way and at the end.
    """

    description: str
    unit: str
    steps: int
    rates: Mapping[str, tuple[float, ...]]
    contenders: tuple[str, ...]
    workers: tuple[int, ...]
    text: tuple[CharacterModelSize, int] | None
    validations: int = 5

    def load_task(self, corpus: Sequence[Path] | None, validation_windows: int) -> Task[Any]:
        """The task; raises `InputError` for a corpus that cannot be used."""
        if self.text is None:
            # scikit-learn takes seconds to import, and may not be asked for.
            from experiments.tasks.digits import DigitsTask

            return DigitsTask(_IMAGES_A_WORKER)
        size, windows = self.text
        text = share_text(threads.single(60.0), lambda: load(corpus), size.length)
        return NextCharacterTask(text, size, windows, validation_windows)

    def corpus(self, files: Sequence[Path] | None) -> str | None:
        """The text's name; None where none is read."""
        return None if self.text is None else corpus_name(files)

    def plan(self, contender: Contender, rate: float, seed: int) -> Plan:
        """How long and how fast a contender trains."""
        return Plan(
            steps=self.steps,
            warmup_steps=max(1, self.steps // 10),
            learning_rate=rate,
            weight_decay=RECIPES[contender.parent].weight_decay,
            freeze_step=max(1, int(self.steps * contender.freeze)),
            evaluate_every=max(1, self.steps // self.validations),
            seed=seed,
            local_step_scaler=max(1, self.steps // 10),
        )

    def shortened(self, steps: int) -> Subject:
        """The same for a few steps of 2 workers."""
        return replace(self, steps=steps, workers=(2,))


_IMAGES_A_WORKER = 16
_OF_ALL = {"lamb": (1e-2, 2e-2, 4e-2), "lion": (5e-4, 1e-3, 2e-3)}
_RATES_OF_DIGITS = {"adamw": (1e-3, 2e-3, 4e-3), **_OF_ALL, "muon": (2e-3, 4e-3, 8e-3)}
_RATES_OF_TEXT = {"adamw": (2.5e-3, 5e-3, 1e-2), **_OF_ALL, "muon": (5e-3, 1e-2, 2e-2)}
_MUONS = tuple(name for name, one in CONTENDERS.items() if one.parent == "muon")

SUBJECTS = {
    "digits": Subject(
        "A convolutional network of 85 K parameters learns handwritten digits, 16 images a worker a step",
        "validation loss (nats an image)",
        600,
        _RATES_OF_DIGITS,
        tuple(CONTENDERS),
        (2, 4),
        None,
    ),
    "text": Subject(
        "A transformer of BERT-tiny's shape (2 layers of 128, 0.4 M parameters) learns text by characters, "
        "4 windows of 64 a worker a step",
        "validation loss (nats a character)",
        480,
        _RATES_OF_TEXT,
        tuple(CONTENDERS),
        (2, 4),
        (CharacterModelSize(layers=2, width=128, heads=2, length=64), 4),
    ),
    "mini": Subject(
        "A transformer of BERT-mini's shape (4 layers of 256, 3.2 M parameters) learns text by characters, "
        "4 windows of 64 a worker a step",
        "validation loss (nats a character)",
        400,
        {"adamw": (1e-3, 2e-3, 4e-3), "muon": (2.5e-3, 5e-3, 1e-2)},
        (BASELINE, "onebit-adam-int4", "onebit-adam-stat2-int4", "adamw-int4", *_MUONS, *DILOCO),
        (2, 4),
        (CharacterModelSize(layers=4, width=256, heads=4, length=64), 4),
    ),
}
"""By name."""
