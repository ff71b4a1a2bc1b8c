"""What is missing keeps only those tests from running that need it; jobs start cold: what a GPU's machine has installed
may run threads on import, which no fork has."""

import importlib.util
import sys

import pytest

from tests.launching import Jobs

_NEED_PYDANTIC = ("test_engine.py", "test_optimizers.py", "test_several_processes.py")
NEEDS = {"test_kernels.py": "hypothesis", **dict.fromkeys(_NEED_PYDANTIC, "pydantic")}
"""Modules that a file's imports take along, and that a GPU's machine may lack."""

LACKING = {file: module for file, module in NEEDS.items() if importlib.util.find_spec(module) is None}

collect_ignore = list(LACKING)


def pytest_report_header() -> list[str]:
    return [f"not collected: {file}, which needs {module}" for file, module in LACKING.items()]


@pytest.fixture(scope="session")
def jobs() -> Jobs:
    return Jobs(sys.executable)
