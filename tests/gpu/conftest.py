"""What is missing keeps only those tests from running that need it."""

from __future__ import annotations

import importlib.util

NEEDS = {"test_engine.py": "pydantic", "test_kernels.py": "hypothesis"}
"""Modules that a file's imports take along, and that a GPU's machine may lack."""

LACKING = {file: module for file, module in NEEDS.items() if importlib.util.find_spec(module) is None}

collect_ignore = list(LACKING)


def pytest_report_header() -> list[str]:
    return [f"not collected: {file}, which needs {module}" for file, module in LACKING.items()]
