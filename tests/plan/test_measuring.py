"""`--measure` runs a script as it is, and takes its own times; what it cannot measure it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.plan import Matrices, PlanError
from thinwire.plan.measure import StepTimer, measure_script, workload_of

# As for torchrun: a process group, DDP, two micro-batches a step, a sleep in forward, and work left to do afterwards.
SCRIPT = """
import time
import helper
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(helper.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("training")
for step in range(1_000_000):
    for part in range(2):
        time.sleep(0.05)
        model(torch.randint(0, 50, (4, 8))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HELPER = """
from torch import nn
def model():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.LayerNorm(32))
"""


def test_a_script_for_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    workload = measure_script(script, 3, 120.0)
    model = workload.model
    assert (model.name, workload.accumulation, workload.dtype) == ("train.py", 2, "fp32")
    assert 0.05 <= workload.forward_seconds < 5
    assert workload.backward_seconds > 0
    assert workload.update_seconds
    assert capfd.readouterr() == ("", "training\n")
    assert (model.parameters, model.matrices) == (50 * 16 + 32 * 16 + 3 * 32, (Matrices(50, 16), Matrices(32, 16)))
    assert model.last == Matrices(50, 16)


def test_a_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('no data here')")
    with pytest.raises(PlanError, match=r"ended with exit code 1 before it could be measured:[\s\S]*no data here"):
        measure_script(script, 3, 120.0)


def test_a_script_that_takes_too_long(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(PlanError, match=r"did not make 6 steps in 1 s: give --measure-limit"):
        measure_script(script, 3, 0.5 + 0.5)


def test_no_script() -> None:
    with pytest.raises(PlanError, match=r"--measure /nowhere/train\.py: there is no such file"):
        measure_script(Path("/nowhere/train.py"), 3, 1.0)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(1, 0), (2, 0), (3, 0)], "its steps have 2 to 3 backwards: give --forward, --backward"),
        ([(1, 0), (1, 1)], "it steps several optimizers, SGD and SGD"),
        ([(0, 0)], "it steps without a backward before, as with a closure"),
    ],
)
def test_steps_that_are_no_measure(monkeypatch, steps: list[tuple[int, int]], told: str) -> None:
    """Of each step: how many backwards it has, and the optimizer that makes it."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    found: list[dict[str, Any]] = []
    handles = StepTimer(1, 2, found.append).install()
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    try:
        for backwards, which in steps:
            for _ in range(backwards):
                model(torch.ones(3)).sum().backward()
            optimizers[which].step()
    finally:
        for handle in handles:
            handle.remove()
    assert told in found[0]["problem"]


def test_16_bit_parameters() -> None:
    found = {"forward": 0.1, "backward": 0.2, "update": 0.3, "accumulation": 1, "dtype": "bf16"}
    workload = workload_of("x.py", found | {"shapes": [[4], [3, 4, 5]]})
    assert (workload.element_bytes, workload.update_seconds) == (2, 0.3)
    assert (workload.model.matrices, workload.model.last) == ((Matrices(3, 20),), None)
