"""What must hold on any communicator of any size: bodies that a test runs over threads, Gloo and MPI."""

from __future__ import annotations

import io
import itertools
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.optim.adam.reference import ReferenceExchange
from tests.optim.training import make_model, make_optimizer, train, weights
from thinwire.comm import Communicator
from thinwire.compress import Exchange, make_codec
from thinwire.optim import OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.zero import ShardedOptimizer

BLOCK = 64


def decisive_payloads(size: int, numel: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Random payloads [steps, size, numel] fp32, and what Algorithm 1 makes of them in float64, [steps, numel].

    A value within fp32's rounding of 0 may take either sign, after which two right answers go different ways. So these
    are payloads on which every sign is taken by at least 1e-6 of its block's scale.
    """
    for seed in itertools.count(1000 * size + numel):
        payloads = np.random.default_rng(seed).standard_normal((steps, size, numel)).astype(np.float32)
        reference = ReferenceExchange(numel, size, BLOCK)
        expected = np.stack([reference(step.astype(np.float64)) for step in payloads])
        if reference.closest_call > 1e-6:
            return payloads, expected
    raise AssertionError("unreachable: itertools.count does not end")


def exchange_equals_the_algorithm(
    comm: Communicator, numel: int = 1000, steps: int = 100, part: int | None = None
) -> None:
    """The exchange and Algorithm 1 in float64, over `steps` steps: equal to 1e-6 relative, and alike on every rank."""
    payloads, expected = decisive_payloads(comm.size, numel, steps)
    exchange = Exchange(comm, numel, make_codec("sign1", BLOCK), part=part)
    outputs = np.stack([exchange.average(torch.from_numpy(p[comm.rank]), i).numpy() for i, p in enumerate(payloads)])
    errors = np.linalg.norm(outputs - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= 1e-6, f"{errors.max():.1e}"
    assert len(set(comm.all_gather_bytes(outputs.tobytes()))) == 1


class Training(NamedTuple):
    """Steps of an optimizer, in several buckets, after which its loss is `falls` times what it was at first."""

    kind: type[CompressedOptimizer]
    options: dict[str, Any]
    steps: int
    falls: float
    nodes: bool = False

    def __call__(self, comm: Communicator) -> None:
        """Train: every rank ends with the same bits."""
        model = make_model(seed=comm.rank)  # rank 0's weights are broadcast
        # Every two ranks count as a node, so that the last one of an odd number has one.
        nodes = {"nodes": [rank // 2 for rank in range(comm.size)]} if self.nodes else {}
        options = {"block_size": BLOCK, "bucket_bytes": 400, "comm": comm} | self.options | nodes
        optimizer = self.kind(model.parameters(), **options)
        losses = train(model, optimizer, range(self.steps))
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.synchronize_weights()
            assert optimizer.in_sync
        if "freeze_step" in self.options:
            assert optimizer.frozen_at == self.options["freeze_step"]
        mine = weights(model).numpy().tobytes()
        if isinstance(optimizer, OneBitLamb):
            mine += np.array(optimizer.get_lamb_coeffs()).tobytes()
        assert len(set(comm.all_gather_bytes(mine))) == 1
        assert np.mean(losses[-20:]) < self.falls * np.mean(losses[:5])
        optimizer.close()

    def shortened(self) -> Training:
        """Return a third of the steps, of which the loss may not fall yet."""
        counts = ("freeze_step", "var_freeze_step", "local_step_scaler")
        options = {key: value // 3 if key in counts else value for key, value in self.options.items()}
        return self._replace(options=options, steps=self.steps // 3, falls=np.inf)

    def __str__(self) -> str:
        return f"{self.kind.__name__}, stage {self.options.get('stage', 0)}{' by node' if self.nodes else ''}"


_LAMB = {"lr": 1e-2, "weight_decay": 0.01}
_LION = {"lr": 1e-3, "weight_decay": 0.01}
_LOCAL = {"lr": 3e-3, "var_freeze_step": 20, "var_update_scaler": 3, "local_step_scaler": 10}
_SHARDED = {"stage": 1, "on_drift": "raise", "resync_interval": 10}
TRAININGS = (
    Training(OneBitAdam, {"lr": 3e-3, "freeze_step": 30}, 120, 0.8),
    Training(OneBitAdam, {"lr": 3e-3, "freeze_step": 20}, 60, 1.0, nodes=True),
    Training(OneBitLamb, {"freeze_step": 30, **_LAMB}, 80, 0.8),
    Training(OneBitLamb, {"freeze_step": 20, **_LAMB, **_SHARDED}, 50, 1.0),
    Training(ZeroOneAdam, _LOCAL, 70, 1.0),  # the last with local steps between two syncs
    Training(OneBitLion, _LION, 60, 0.8),
    Training(OneBitLion, {**_LION, "stage": 1}, 60, 0.8),
)


def resume_is_bit_identical(comm: Communicator) -> None:
    """Losses after a checkpoint equal those of the run that went on."""
    model = make_model()
    optimizer = make_optimizer(model, comm)
    train(model, optimizer, range(25))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = train(model, optimizer, range(25, 60))
    file.seek(0)
    resumed = make_model(seed=3)
    again = make_optimizer(resumed, comm)
    for part, state in zip((resumed, again), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(resumed, again, range(25, 60)) == expected


def stages_are_bit_identical(comm: Communicator, steps: int = 40) -> None:
    """AdamW on ZeRO stages 0, 1 and 2, and 1-bit Adam with bf16 replicas on 1 and 2: the same bits on every rank and
    stage."""
    for one_bit in (False, True):
        outcomes = set()
        for stage in (1, 2) if one_bit else (0, 1, 2):
            model = make_model(seed=comm.rank)
            settings = {"stage": stage, "comm": comm, "named_parameters": model.named_parameters(), "bucket_bytes": 400}
            if one_bit:
                settings |= {"freeze_step": steps // 2, "block_size": 64, "on_drift": "raise", "resync_interval": 10}
                optimizer = OneBitAdam(model.parameters(), lr=3e-3, param_dtype=torch.bfloat16, **settings)
            else:
                optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, max_norm=0.5, **settings)
                optimizer.gather_during_forward(model)
            train(model, optimizer, range(steps))
            optimizer.wait_for_weights()
            everyone = set(comm.all_gather_bytes(weights(model).numpy().tobytes()))
            assert len(everyone) == 1
            outcomes |= everyone
            optimizer.close()
        assert len(outcomes) == 1


ALL = (exchange_equals_the_algorithm, *TRAININGS, resume_is_bit_identical, stages_are_bit_identical)
# What real ranks run of what threads have run at full length: collectives go another way, the arithmetic does not.
SHORT = (
    partial(exchange_equals_the_algorithm, steps=20),
    *(training.shortened() for training in TRAININGS),
    resume_is_bit_identical,
    partial(stages_are_bit_identical, steps=15),
)
