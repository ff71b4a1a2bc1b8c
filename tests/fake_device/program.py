"""Runs the cases that are named on the fake device, in a process of their own, and prints what became of each."""

from __future__ import annotations

import json
import sys
import traceback

import torch

from tests.fake_device import captured_cases, load, step_cases, training_cases

CASES = training_cases.CASES | step_cases.CASES | captured_cases.CASES


def main() -> None:
    torch.set_num_threads(1)
    load()
    for name in sys.argv[1:]:
        try:
            CASES[name]()
        except Exception:
            print(json.dumps([name, traceback.format_exc()]), flush=True)
        else:
            print(json.dumps([name, None]), flush=True)


if __name__ == "__main__":
    main()
