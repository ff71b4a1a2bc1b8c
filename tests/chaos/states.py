"""State dicts that come to harm: every rank has an error of ours with all as it was, or what a changed setting means.

Anything in a rank's `state_dict` is deleted, or becomes another value, on all ranks or one. What is edited by right,
rates and the like in `param_groups`, is loaded, and training goes on as with that setting.
"""

import copy
import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.harness import descend, digest, each_seed, faults, run_ranks
from tests.chaos.turns import ALL, Exact
from tests.optim.subject import FREEZE, LOCAL, Subject
from tests.optim.training import make_model, snapshot, train
from thinwire.comm import Communicator, threads
from thinwire.optim import DiLoCo

SIZE = 2
DTYPES = (torch.float32, torch.bfloat16)


def build_diloco(model: nn.Module, comm: Communicator) -> Any:
    options = {"every": 3, "fragments": 2, "overlap": 1, "codec": "int8", "block_size": 64, "nodes": "flat"}
    return DiLoCo(model.named_parameters(), torch.optim.AdamW, comm=comm, lr=3e-3, **options)


@dataclass(frozen=True)
class Form:
    """An optimizer, the dtype of its parameters, and the steps after which it saves."""

    subject: Subject | Exact | str
    dtype: torch.dtype
    steps: int

    def build(self, comm: Communicator) -> tuple[nn.Module, Any]:
        model = make_model(dtype=self.dtype)
        if isinstance(self.subject, str):
            return model, build_diloco(model, comm)
        return model, self.subject.build(model, comm, bucket_bytes=1000)


FORMS = [
    Form(subject, dtype, steps) for subject in (*ALL, "diloco") for dtype in DTYPES for steps in (3, FREEZE + 3, LOCAL)
]


@cache
def saved_by(form: Form) -> list[dict[str, Any]]:
    """What each rank saves."""

    def save(comm: Communicator) -> dict[str, Any]:
        model, optimizer = form.build(comm)
        train(model, optimizer, range(form.steps))
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    return threads.run(save, SIZE)


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, 1 << 70, math.nan, math.inf, -math.inf, "", "text", [], [None], {}, {"a": None}),
    *(torch.zeros(3), torch.full((), math.nan), torch.zeros(2, dtype=torch.int64)),
]


def tamper(state: dict[str, Any], source: random.Random) -> str:
    """Change one place of a state; where and how."""
    where, inner, key = descend(state, source)
    below = inner[key]
    if isinstance(below, tuple) and below and source.random() < 0.85:
        number = source.randrange(len(below))
        inner[key] = (*below[:number], other(below[number], source), *below[number + 1 :])
        return f"{where}.{number} = {inner[key][number]!r}"[:200]
    way = source.random()
    if way < 0.2:
        del inner[key]
        return f"without {where}"
    if isinstance(inner, list) and way < 0.35:
        inner.insert(key, copy.deepcopy(inner[key]))
        return f"twice {where}"
    if isinstance(inner, dict) and way < 0.35:
        inner[f"{key}x"] = inner.pop(key)
        return f"{where} renamed"
    inner[key] = other(below, source)
    return f"{where} = {inner[key]!r}"[:200]


def other(value: Any, source: random.Random) -> Any:
    """Another value."""
    if isinstance(value, Tensor) and source.random() < 0.6:
        ways = (
            lambda: value.double(),
            lambda: value.reshape(-1)[:-1],
            lambda: value[None],
            lambda: value.to(torch.int64),
        )
        return source.choice(ways)()
    if isinstance(value, int | float) and not isinstance(value, bool) and source.random() < 0.3:
        return source.choice((value + 1, -value - 1, float(value), str(value)))
    return source.choice(VALUES)


def digest_with_state(model: nn.Module, optimizer: Any) -> str:
    """Of weights and all state."""
    found = hashlib.sha256(repr(optimizer.param_groups[0]["lr"]).encode())
    for one in [*model.state_dict().values(), *flat(snapshot(model, optimizer))]:
        found.update(one.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b"")
    return found.hexdigest()[:16]


def flat(value: Any) -> list[Tensor]:
    """The tensors in it."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in flat(one)]


@each_seed
def run(seed: str) -> Iterator[str]:
    """What is wrong with the trial of that seed."""
    source = random.Random(seed)
    form = source.choice(FORMS)
    states = copy.deepcopy([of_rank["optimizer"] for of_rank in saved_by(form)])
    model_states = [of_rank["model"] for of_rank in saved_by(form)]
    odd, again = source.choice((0, 1, None)), source.random()
    done = ""
    for rank, state in enumerate(states):
        if odd in (rank, None):
            done = tamper(state, random.Random(f"{seed} {again}"))

    def load(comm: Communicator, state: dict[str, Any]) -> str:
        model, optimizer = form.build(comm)
        train(model, optimizer, range(2))
        model.load_state_dict(model_states[comm.rank])
        before = digest_with_state(model, optimizer)
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            if digest_with_state(model, optimizer) != before:
                raise AssertionError("it had moved when it was refused") from None
            raise
        return go_on(model, optimizer)

    def by_right(comm: Communicator) -> str:
        """The same, loaded as it was saved, and then set as was edited."""
        state = copy.deepcopy(saved_by(form)[comm.rank]["optimizer"])
        edited = states[comm.rank]["param_groups"]
        model, optimizer = form.build(comm)
        model.load_state_dict(model_states[comm.rank])
        optimizer.load_state_dict(state)
        for group, settings in zip(optimizer.param_groups, edited, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        return go_on(model, optimizer)

    def go_on(model: nn.Module, optimizer: Any) -> str:
        train(model, optimizer, range(form.steps, form.steps + 2))
        optimizer.synchronize_weights()
        return digest(model)

    ends = run_ranks(lambda comm: load(comm, states[comm.rank]), SIZE)
    found = faults(ends)
    if not found and not any(end.error for end in ends):
        expected = run_ranks(by_right, SIZE)
        if [end.result for end in expected] != [end.result for end in ends]:
            found = [f"it was loaded as something else, expected {expected[0].result or expected[0].error}"]
    for fault in found:
        yield f"{form}, rank {odd}, {done}: {fault}"
