"""``python -m tests.chaos``: every harness, or those that are named, in full; exit code 1 if anything is bad."""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict

import torch

from experiments.common import machine
from experiments.common.results import OUTPUT
from tests.chaos import HARNESSES, run
from tests.chaos.harness import Outcome

RESULTS = OUTPUT / "chaos.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *HARNESSES], help="by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="trials of each, instead of its own number")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = json.loads(RESULTS.read_text())["harnesses"] if RESULTS.exists() else {}
    bad = 0
    for name in arguments.names or HARNESSES:
        start = time.monotonic()
        outcome: Outcome = run(name, arguments.count or HARNESSES[name].whole, arguments.seed)
        seconds = round(time.monotonic() - start, 1)
        print(f"{name:<16} {outcome.tried:>6} tried {outcome.bad:>6} bad {seconds:>8} s", flush=True)
        for example in outcome.examples:
            print(f"  {example}", flush=True)
        bad += outcome.bad
        results[name] = {**asdict(outcome), "seed": arguments.seed, "seconds": seconds, "machine": machine.describe()}
        OUTPUT.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"harnesses": results}, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
