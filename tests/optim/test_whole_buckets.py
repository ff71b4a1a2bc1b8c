"""Compiled kernels over whole buckets make the steps of their specification, whatever an optimizer's form
and codec: but for the last bit of a block's scale, a sum that each adds up in its own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.comm import Communicator, threads
from thinwire.compress.kernels import loading

CASES = [
    ("OneBitAdam", {"freeze_step": 3}),
    ("OneBitAdam", {"freeze_step": 3, "compress": "momentum", "weight_decay": 0.1}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "int8", "max_norm": 0.5}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "stat2"}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "int4", "block_size": 256}),
    ("OneBitAdam", {"freeze_step": 3, "stage": 1}),
    ("OneBitLamb", {"freeze_step": 3}),
    ("OneBitLion", {}),
    ("OneBitAdam", {"freeze_step": 3, "nodes": [0, 0]}),
]


def train(name: str, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Weights after 8 steps of 2 ranks, with one parameter that does not train and one without gradient at times."""

    def rank(comm: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        shapes = [(7, 31), (5,), (65, 3), (1,), (33, 17)]
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        parameters[4] = nn.Parameter(parameters[4].detach().t().contiguous().t())  # lies in another order
        parameters[1].requires_grad_(False)
        optimizer = getattr(thinwire, name)(
            parameters, lr=1e-2, comm=comm, **{"block_size": 64, "bucket_bytes": 2048, **options}
        )
        generator.manual_seed(10 + comm.rank)
        for step in range(8):
            missing = step % 3 == 2
            loss = torch.zeros(())
            for number, parameter in enumerate(parameters):
                noise = torch.randn(parameter.shape, generator=generator).to(dtype)
                if not (missing and number == 3):
                    loss = loss + (parameter * noise).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters])

    return threads.run(rank, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_are_those_of_the_specification(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    compiled = train(name, options, dtype)
    monkeypatch.setattr(loading, "compiled_backend", lambda device: None)
    specified = train(name, options, dtype)
    for one, other in zip(compiled, specified, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.equal(compiled[0], compiled[1])
