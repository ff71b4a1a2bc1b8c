"""Count what one public call enters: files and functions of the library, and returns to a file that was left.

`python -m tests.journeys [--files]` prints a table, with --files the files of each journey, and a line of JSON. One
process, one thread, a model of 4 parameters: the counts are the same on every machine.
"""

import argparse
import collections
import gc
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import thinwire  # noqa: E402
from thinwire.engine.config.loading import load_config  # noqa: E402
from thinwire.sparse_attn import BigBird, block_sparse_attention  # noqa: E402

ROOT = f"{Path(thinwire.__file__).resolve().parent}/"


class Trace:
    """What sys.setprofile sees of the library."""

    def __init__(self) -> None:
        self.way: list[str] = []
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            file = file.removeprefix(ROOT)
            self.calls[file, frame.f_code.co_qualname] += 1
            if not self.way or self.way[-1] != file:
                self.way.append(file)


def traced(call: Callable[[], object]) -> Trace:
    trace = Trace()
    gc.collect()
    sys.setprofile(trace)
    threading.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def traces() -> dict[str, Trace]:
    """A trace for every journey by name, each of a call that has been made before."""
    torch.set_num_threads(1)
    gc.disable()
    inputs = torch.randn(4, 64)
    found: dict[str, Trace] = {}
    for stage in (0, 1):
        net = model()
        optimizer = thinwire.OneBitAdam(net.parameters(), lr=1e-3, freeze_step=4, stage=stage)

        def step(net: nn.Module = net, optimizer: thinwire.OneBitAdam = optimizer) -> None:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        found[f"warmup step, stage {stage}"] = traced(step)
        for _ in range(3):
            step()
        found[f"frozen step, stage {stage}"] = traced(step)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}},
        "zero_optimization": {"stage": 1},
    }
    load_config(config, 1)
    found["load_config"] = traced(lambda: load_config(config, 1))
    engine, *_ = thinwire.initialize(model=model(), config=config)

    def engine_step() -> None:
        engine.backward(engine(inputs).square().mean())
        engine.step()

    for _ in range(5):
        engine_step()
    found["engine step, stage 1"] = traced(engine_step)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        found["save_checkpoint"] = traced(lambda: engine.save_checkpoint(folder))
        found["load_checkpoint"] = traced(lambda: engine.load_checkpoint(folder))
    layout = BigBird(num_heads=2, block=16)
    q_bhsd = torch.randn(1, 2, 256, 16)

    def attend() -> Tensor:
        return block_sparse_attention(q_bhsd, q_bhsd, q_bhsd, layout)

    attend()
    found["sparse attention"] = traced(attend)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files of each journey")
    files = parser.parse_args().files
    counts = {}
    for name, trace in traces().items():
        entered = set(trace.way)
        counts[name] = {
            "files": len(entered),
            "functions": len(trace.calls),
            "calls": sum(trace.calls.values()),
            "returns": len(trace.way) - len(entered),
        }
        print(f"{name:24s}" + "".join(f"{kind} {count:5d}  " for kind, count in counts[name].items()))
        if files:
            print("    " + " ".join(sorted(entered)))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
