"""The registry says what the classes say: nobody else keeps a list of what optimizers take."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.comm import threads
from thinwire.optim import registry

ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("registry", sys.argv[1])
sys.modules["registry"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch" not in sys.modules
print(*module.NAMES)
"""


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(registry.entry(name).load()).parameters)


def build(name: str, stage: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = registry.entry(name).load()([parameter], stage=stage, comm=threads.single(10.0))
    return optimizer


@pytest.mark.parametrize("name", registry.NAMES)
def test_options_are_the_constructors_with_its_defaults(name: str) -> None:
    taken = parameters_of(name)
    for option, field in registry.entry(name).options.model_fields.items():
        if option != "comm_backend_name":  # the engine makes it a communicator
            assert taken[option].default == field.default or option in ("codec", "compress")
            assert registry.entry(name).options.model_validate({option: field.default})


@pytest.mark.parametrize("name", registry.NAMES)
def test_stages(name: str) -> None:
    entry = registry.entry(name)
    assert {*entry.stages, *entry.refused_stages} == {0, 1, 2, 3}
    for stage in entry.stages:
        build(name, stage)
    for stage in entry.refused_stages:
        with pytest.raises(ValueError, match=f"stage must be .* for {name}, got {stage}"):
            build(name, stage)


@pytest.mark.parametrize("name", registry.NAMES)
def test_clips_offloads_and_freezes(name: str) -> None:
    entry, taken = registry.entry(name), parameters_of(name)
    assert "max_norm" in taken
    assert entry.offloads <= ("offload" in taken)
    assert entry.freeze_option is None or entry.freeze_option in entry.options.model_fields


def test_another_name_is_told_the_names() -> None:
    with pytest.raises(KeyError, match="'OneBitAdem' is not one of OneBitAdam, OneBitLamb, ZeroOneAdam, OneBitLion"):
        registry.entry("OneBitAdem")


def test_it_needs_no_torch() -> None:
    command = [sys.executable, "-c", ALONE, str(Path(str(registry.__file__)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(registry.NAMES), done.stderr
