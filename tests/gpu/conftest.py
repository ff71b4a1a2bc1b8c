"""What is missing keeps only those tests from running that need it."""

import importlib.util

_NEED_PYDANTIC = ("test_engine.py", "test_optimizers.py", "test_several_processes.py")
NEEDS = {"test_kernels.py": "hypothesis", **dict.fromkeys(_NEED_PYDANTIC, "pydantic")}
"""Modules that a file's imports take along, and that a GPU's machine may lack."""

LACKING = {file: module for file, module in NEEDS.items() if importlib.util.find_spec(module) is None}

collect_ignore = list(LACKING)


def pytest_report_header() -> list[str]:
    return [f"not collected: {file}, which needs {module}" for file, module in LACKING.items()]
