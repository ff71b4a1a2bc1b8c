"""DeepSpeed's names are where DeepSpeed has them, whatever is imported first, and what has no counterpart says so."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from functools import reduce
from types import ModuleType
from typing import Any

import pytest
import torch

import thinwire
from tests.deepspeed.names import NOT_OFFERED, OFFERED
from thinwire import deepspeed

ALONE = """
import sys
import thinwire.deepspeed as deepspeed
assert "torch" not in sys.modules
assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
from thinwire.deepspeed.runtime import lr_schedules
from thinwire.deepspeed import comm as dist
assert dist.get_world_size() == 1 and not dist.is_initialized()
"""


def at(path: str) -> Any:
    """What stands at a dotted path below thinwire.deepspeed, reached as scripts do: by attributes."""
    return reduce(getattr, [part for part in path.split(".") if part], deepspeed)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in OFFERED.items() for name in names], ids=str
)
def test_a_name_can_be_imported_and_called(module: str, name: str) -> None:
    assert callable(getattr(at(module), name))
    if module not in ("zero", "checkpointing"):  # which are attributes in DeepSpeed too, and no modules
        statement = f"from thinwire.deepspeed{'.' if module else ''}{module} import {name} as found"
        found: dict[str, Any] = {}
        exec(statement, found)
        assert found["found"] is getattr(at(module), name)


@pytest.mark.parametrize("path", NOT_OFFERED)
def test_what_has_no_counterpart_says_what_to_do_when_it_is_used(path: str) -> None:
    stand_in = at(path)

    class Mine(stand_in):  # type: ignore[misc, valid-type]
        """Scripts derive classes from such names where they may never use them."""

        def __init__(self) -> None:
            super().__init__(layers=[])

    for use in (stand_in, lambda: stand_in(1, key=2), Mine):
        with pytest.raises(deepspeed.NotOfferedError, match=f"no counterpart of deepspeed.*{NOT_OFFERED[path]}"):
            use()
    assert not isinstance(torch.nn.Linear(1, 1), stand_in)


@pytest.mark.parametrize("module", ["", "runtime", "utils", "zero", "ops.sparse_attention", "moe"])
def test_another_name_is_an_attribute_error(module: str) -> None:
    assert not hasattr(at(module), "no_such_name")
    with pytest.raises(AttributeError, match="no_such_name"):
        at(module).no_such_name  # noqa: B018


def test_every_module_imports_and_lists_what_it_has() -> None:
    for found in pkgutil.walk_packages(deepspeed.__path__, "thinwire.deepspeed."):
        module = importlib.import_module(found.name)
        assert set(getattr(module, "__all__", [])) <= set(dir(module)), found.name
        for name in dir(module):
            assert getattr(module, name) is not NotImplemented, f"{found.name}.{name}"
    # Importing a module puts it into its package, in the place of what has the same name.
    for path, names in OFFERED.items():
        for name in names:
            assert not isinstance(getattr(at(path), name), ModuleType)


def test_it_costs_no_torch_to_import_and_needs_no_other_import() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions() -> None:
    numbers = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, numbers)) == thinwire.__version__ == at("__version__")


def test_what_a_cut_parameter_shows() -> None:
    cut = torch.empty(at("runtime.zero.partition_parameters").partitioned_param_data_shape)
    assert cut.shape == (0,)
