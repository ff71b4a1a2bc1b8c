"""The runs whose bits are recorded: optimizer, stage, dtype, ranks, options, and what happens on the way."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

__all__ = ["FORMS", "FREEZE_STEP", "Form", "representative"]

FREEZE_STEP = 60

Event = Literal["absent", "left out", "late", "overflow", "scaled", "masked", "added", "meets"]
"""What happens on the way.

absent: two parameters get no gradient on any rank in some steps. left out: the same, announced with `leave_out`.
late: some elements' gradient is zero until the variance has been frozen. overflow: one rank's gradient is not finite in
some steps. scaled: the loss is, by a factor that changes. masked: a group holds `exp_avg_mask`. added: a group comes
later. meets: the weights are synchronised between two steps."""

_BUCKETS = {"block_size": 64, "bucket_bytes": 2048}
_SCHEDULE = {"var_freeze_step": FREEZE_STEP, "var_update_scaler": 8, "local_step_scaler": 20, "local_step_clipper": 4}
_OPTIONS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 0.01, "freeze_step": FREEZE_STEP, **_BUCKETS},
    "OneBitLamb": {"lr": 0.02, "freeze_step": FREEZE_STEP, **_BUCKETS},
    "ZeroOneAdam": {"lr": 0.01, **_SCHEDULE, **_BUCKETS},
    # torch's other AdamW takes its roots from a library whose bits differ by processor.
    "AdamW": {"lr": 0.01, "fused": True, **_BUCKETS},
    "SGD": {"lr": 0.05, "momentum": 0.9, **_BUCKETS},
}
_STAGES = {"OneBitAdam": (0, 1, 2), "OneBitLamb": (0, 1), "ZeroOneAdam": (0, 1), "AdamW": (0, 1, 2), "SGD": (0, 1, 2)}
_WHEN_SHARDED: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"resync_interval": 30, "on_drift": "raise"},
    "OneBitLamb": {"resync_interval": 30, "on_drift": "raise"},
    "ZeroOneAdam": {"resync_interval": 30},
}
_EVENTS: dict[str, tuple[Event, ...]] = {
    "OneBitAdam": ("absent", "left out", "late", "overflow", "masked"),
    "OneBitLamb": ("absent", "left out", "late", "overflow", "masked"),
    "ZeroOneAdam": ("absent", "late", "overflow", "masked", "meets"),
    "AdamW": ("absent", "left out", "overflow"),
    "SGD": (),
}
_AUTO = {"freeze_step": "auto", "betas": (0.9, 0.95)}
_REPLICATED_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "OneBitAdam": {
        "momentum": {"compress": "momentum"},
        "int8": {"codec": "int8"},
        "exact": {"codec": "none"},
        "no bias correction": {"bias_correction": False},
        "eps inside": {"eps_inside_sqrt": True},
        "bf16 warmup": {"warmup_wire": "bf16"},
        "auto": _AUTO,
    },
    "OneBitLamb": {
        "momentum": {"compress": "momentum"},
        "no bias correction": {"bias_correction": False},
        "bounds": {"max_coeff": 0.5, "min_coeff": 0.05, "coeff_beta": 0.75, "factor_threshold": 0.02},
    },
    "ZeroOneAdam": {
        "momentum": {"compress": "momentum"},
        "int8": {"codec": "int8"},
        "no bias correction": {"bias_correction": False},
        "eps inside": {"eps_inside_sqrt": True},
        "bf16 warmup": {"warmup_wire": "bf16"},
    },
}


@dataclass(frozen=True)
class Form:
    """One run of 200 steps. `optimizer`: a class of thinwire, or of torch.optim inside a ShardedOptimizer.

    `resumed`: saved after step 130, and loaded into a new model and optimizer. `variant`: what is unusual, in words.
    `options`: beside the usual ones. `backwards`: of each step, all but the last inside `no_sync`.
    """

    optimizer: str
    stage: int
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    ranks: int = 2
    resumed: bool = False
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    events: frozenset[Event] = frozenset()
    backwards: int = 1

    @property
    def name(self) -> str:
        """What bits.json calls it."""
        parts = [f"{self.optimizer} stage {self.stage}", self.dtype, f"{self.ranks} ranks", self.variant]
        return ", ".join(part for part in [*parts, "resumed" if self.resumed else ""] if part)

    @property
    def all_options(self) -> dict[str, Any]:
        """For the optimizer's constructor."""
        sharded = _WHEN_SHARDED.get(self.optimizer, {}) if self.stage else {}
        return _OPTIONS[self.optimizer] | sharded | self.options


def _main() -> Iterator[Form]:
    """Every optimizer, stage, dtype and number of ranks; three ranks accumulate, four have larger blocks."""
    for optimizer, stages in _STAGES.items():
        for stage in stages:
            for dtype in ("fp32", "bf16"):
                for ranks in (1, 2, 3, 4):
                    for resumed in (False, True):
                        options = {"block_size": 128} if ranks == 4 else {}
                        backwards = 2 if ranks == 3 else 1
                        yield Form(optimizer, stage, dtype, ranks, resumed, options=options, backwards=backwards)


def _variants() -> Iterator[Form]:
    """What is unusual, one thing at a time."""
    for optimizer, variants in _REPLICATED_VARIANTS.items():
        for variant, options in variants.items():
            yield Form(optimizer, 0, variant=variant, options=options)
    for optimizer in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam"):
        for dtype, resumed in (("fp32", False), ("bf16", True)):
            yield Form(optimizer, 0, dtype, 4, resumed, "two nodes", {"nodes": [0, 0, 1, 1]})
            yield Form(optimizer, 0, dtype, 2, resumed, "added", events=frozenset({"added"}))
        for stage in _STAGES[optimizer]:
            yield Form(optimizer, stage, "fp16", variant="scaled", events=frozenset({"scaled"}))
    for optimizer, stages in _STAGES.items():
        for stage in stages:
            for event in _EVENTS[optimizer]:
                yield Form(optimizer, stage, variant=event, events=frozenset({event}))
            if stage == 1:
                yield Form(optimizer, stage, variant="16-bit replicas", options={"param_dtype": torch.bfloat16})
            if optimizer == "AdamW" or (stage and optimizer in ("OneBitAdam", "OneBitLamb")):
                for dtype, resumed in (("fp32", False), ("bf16", True)):
                    yield Form(optimizer, stage, dtype, 2, resumed, "clipped", {"max_norm": 18.0})
    for stage in (1, 2):
        yield Form("OneBitAdam", stage, variant="auto", options=_AUTO)
    for stage in (0, 1):
        yield Form("OneBitLamb", stage, variant="auto", options=_AUTO)
        yield Form("OneBitLamb", stage, resumed=True, variant="auto", options=_AUTO)
    reversible = {"reversible": True}
    yield Form("OneBitAdam", 1, "bf16", 2, False, "reversible", reversible, frozenset({"overflow"}))


FORMS = (*_main(), *_variants())


def representative(form: Form) -> bool:
    """Whether the test suite replays it, which `make bits` does for all: every optimizer but SGD, at stage 0 in fp32 on
    2 ranks and at its last one in bf16, resumed, on 3; and of what is unusual the hierarchy of nodes, gradients that
    are missing, overflows, masks and clipping, each once, instead of the usual form at the same stage."""
    if form.optimizer == "SGD":
        return False
    if form.variant:
        return (form.optimizer, form.stage, form.dtype, form.variant) in _UNUSUAL
    if form.stage:
        last = max(_STAGES[form.optimizer])
        return (form.stage, form.dtype, form.ranks, form.resumed) == (last, "bf16", 3, True)
    return form.optimizer in ("OneBitAdam", "AdamW") and (form.dtype, form.ranks, form.resumed) == ("fp32", 2, False)


_UNUSUAL = {
    ("OneBitAdam", 0, "fp32", "two nodes"),
    ("OneBitAdam", 1, "fp32", "clipped"),
    ("OneBitAdam", 1, "fp32", "left out"),
    ("OneBitLamb", 0, "fp32", "absent"),
    ("OneBitLamb", 1, "fp32", "overflow"),
    ("ZeroOneAdam", 1, "fp32", "masked"),
    ("ZeroOneAdam", 0, "fp32", "meets"),
}
