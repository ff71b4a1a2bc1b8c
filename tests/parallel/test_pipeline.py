"""Models in stages train as they do in one process; in real processes: see `training`. And how they are cut."""

import pytest
import torch
from torch import nn

from tests.launching import Jobs
from tests.parallel.training import PROGRAM
from thinwire.parallel.splitting import split_model


@pytest.mark.launch
@pytest.mark.parametrize(("ranks", "task"), [(2, "models"), (4, "models"), (2, "small"), (4, "replicas"), (8, "cube")])
def test_a_pipeline_trains_as_one_process_does(jobs: Jobs, ranks: int, task: str) -> None:
    done = jobs.torchrun(ranks, *PROGRAM, task)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("stages", "sizes"), [(1, [31]), (2, [16, 15]), (3, [11, 10, 10]), (4, [11, 5, 5, 10])])
def test_the_largest_stage_is_as_small_as_can_be(stages: int, sizes: list[int]) -> None:
    layers = [nn.Linear(width, 1, bias=False) for width in (11, 5, 5, 10)]
    parts = split_model(nn.Sequential(*layers), stages, "parameters")
    assert [sum(one.numel() for one in part.parameters()) for part in parts] == sizes
    assert [name for part in parts for name, _ in part.named_parameters()] == [f"{n}.weight" for n in range(4)]
    assert torch.equal(parts[-1][-1].weight, layers[-1].weight)
