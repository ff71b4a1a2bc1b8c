"""The registry says what the classes say: nobody else keeps a list of what optimizers take. And what every optimizer in
it says of bytes."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from torch import nn

import thinwire
from tests.launching import on_threads
from tests.optim.subject import SUBJECTS, Subject, next_send
from tests.optim.training import make_model, train
from thinwire import command_line
from thinwire.comm import Communicator, threads
from thinwire.compress.kernels.cpu import backend
from thinwire.optim import registry
from thinwire.optim.step import Send
from thinwire.simd.compiling import types_of
from thinwire.zero.memory import live_tensor_bytes

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
        with pytest.raises(ValueError, match=f"stage must be .*, got {stage}"):
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


# Bytes: those held, and what rank 0 says of those sent, where it speaks at all

LAMB = {"block_size": 2048}
LOCAL = {"var_update_scaler": 1, "var_freeze_step": 6, "local_step_scaler": 2}


@pytest.mark.parametrize(
    ("name", "options", "steps", "dtype", "expected"),
    [
        ("OneBitLamb", {**LAMB, "freeze_step": 100}, 2, None, lambda n: 8 + 8 / n),
        ("OneBitLamb", {**LAMB, "freeze_step": 100}, 2, torch.bfloat16, lambda n: 4 + 12 / n),
        ("OneBitLamb", {**LAMB, "freeze_step": 1}, 2, None, lambda n: 9.125 + 8 / n),
        ("OneBitLamb", {**LAMB, "freeze_step": 1}, 2, torch.bfloat16, lambda n: 5.125 + 12 / n),
        ("ZeroOneAdam", LOCAL, 4, None, lambda n: 16 + 8 / n),
        ("ZeroOneAdam", LOCAL, 11, None, lambda n: 24 + 4 / n),
        ("ZeroOneAdam", LOCAL, 4, torch.bfloat16, lambda n: 10 + 12 / n),
        ("ZeroOneAdam", LOCAL, 11, torch.bfloat16, lambda n: 16 + 8 / n),
    ],
)
def test_sharded_state_takes_the_bytes_an_element_that_docstrings_say(
    name: str, options: dict[str, Any], steps: int, dtype: torch.dtype | None, expected: Callable[[int], float]
) -> None:
    """Between two steps, weights included, without gradients."""
    numel = 4 * 2048 * 10  # shards without padding at 1 to 4 ranks

    def body(comm: Communicator) -> float:
        model = nn.Linear(numel, 1, bias=False)
        optimizer = Subject(name, 1).build(model, comm, param_dtype=dtype, bucket_bytes=1 << 22, **options)
        for _ in range(steps):
            model(torch.ones(1, numel, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(live_tensor_bytes(model, optimizer).values()) / numel

    for ranks in (1, 4):
        assert max(threads.run(body, ranks)) == pytest.approx(expected(ranks), rel=0.01)


def said(
    capsys: pytest.CaptureFixture[str], subject: Subject, steps: int, ranks: int = 2, hook: Any = None, **options
) -> list[str]:
    """What one run writes to stderr; `hook` is called with the optimizer before the run and after each step."""

    def body(comm: Communicator) -> None:
        comm.speaks = comm.rank == 0
        model = make_model()
        optimizer = subject.build(model, comm, **options)
        if hook is not None:
            hook(optimizer)
            optimizer.register_step_post_hook(hook)
        train(model, optimizer, range(steps))
        optimizer.close()
        optimizer.close()

    threads.run(body, ranks)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_run_says_what_it_saves(capsys: pytest.CaptureFixture[str], subject: Subject) -> None:
    first, *freeze, last = said(capsys, subject, 40)
    # 6 * 37 + 37 + 37 * 11 + 11 + 11 + 1 elements of 4 bytes, of which half travels twice.
    assert first.startswith(f"thinwire: {subject.name} on 2 ranks: 2.76 kB a step uncompressed; it ")
    if subject.entry.freeze_option is None:
        assert first.endswith("it compresses from the first step on")
        assert not freeze
    else:
        assert first.endswith(f"it freezes by {subject.entry.freeze_option}=6")
        assert len(freeze) == 1
        assert freeze[0].startswith(f"thinwire: {subject.name} froze after step 6: ")
        assert freeze[0].endswith(" kB a step from now on instead of 2.76 kB")
    assert last.startswith(f"thinwire: {subject.name} sent ")
    assert " in 40 steps, " in last


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
@on_threads(8)
def test_clipping_an_adapter_of_8_kb_never_sends_more_than_its_gradients(comm: Communicator, subject: Subject) -> None:
    """Beside headers of exact packets; at stages 1 and 2 an exact step sends weights, too, and freezing state."""
    model = nn.Sequential(nn.Linear(512, 2, bias=False), nn.Linear(2, 512, bias=False))
    optimizer = subject.build(model, comm, max_norm=0.1, block_size=2048, bucket_bytes=None)
    for _ in range(15):
        before, exact = (optimizer.bytes_sent, optimizer.bytes_uncompressed), next_send(optimizer) is Send.EXACT
        model(torch.ones(1, 512)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = optimizer.bytes_sent - before[0]
        limit = 0.6 if not exact else 1.6 if subject.stage else 1.1
        assert sent < limit * (optimizer.bytes_uncompressed - before[1])


def test_nothing_saved_is_no_saving(capsys: pytest.CaptureFixture[str]) -> None:
    """Packets of every bit are longer than gradients by their headers."""
    _, freeze, last = said(capsys, Subject("OneBitAdam", 0, codec="none"), 40)
    assert freeze.endswith(" a step from now on and saves nothing: uncompressed gradients are 2.76 kB")
    assert last.endswith(" in 40 steps, no less than uncompressed gradients")


@pytest.mark.parametrize(("warmup", "advised"), [(1, 2), (4, 4)])
def test_a_run_that_never_freezes_says_when_it_might_have(
    capsys: pytest.CaptureFixture[str], warmup: int, advised: int
) -> None:
    """A fifth of the steps, and not within the warmup."""

    def rise(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(optimizer.steps + 1, warmup)

    _, last = said(capsys, Subject("OneBitAdam", 0), 8, freeze_step=1000, hook=rise)
    assert "OneBitAdam never froze in 8 steps" in last
    assert f"freeze_step=1000 comes after the end. {advised} or 'auto' would not" in last


def test_one_rank_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, Subject("OneBitAdam", 0), 3, ranks=1) == []


def test_nobody_speaks_who_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    threads.run(lambda comm: train(model := make_model(), Subject("OneBitAdam", 0).build(model, comm), range(3)), 2)
    assert capsys.readouterr().err == ""


def of_codec(model: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    return thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, codec="int4", comm=comm)


def of_matrices(model: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    return thinwire.OneBitMuon(model.named_parameters(), lr=1e-3, comm=comm)


def of_outer_steps(model: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    return thinwire.DiLoCo(model.parameters(), torch.optim.AdamW, lr=1e-3, every=4, overlap=1, comm=comm)


BUILDERS = [one.build for one in [*SUBJECTS, Subject("OneBitAdam", 2, codec="int4")]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [*BUILDERS, of_codec, of_matrices, of_outer_steps], ids=lambda one: one.__qualname__)
def test_kernels_are_prepared_before_they_are_called(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[nn.Module, Communicator], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> None:
    """All that compressed steps call, with arguments of the types that they were compiled for."""
    prepared: set[str] = set()
    called: dict[str, set[Any]] = {}

    def noting(name: str, kernel: Any) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            called.setdefault(name, set()).add(tuple(map(numba.typeof, arguments)))
            kernel(*arguments)

        return call

    for name, (kernel, _) in backend.KERNELS.items():
        monkeypatch.setattr(sys.modules[kernel.py_func.__module__], name, noting(name, kernel))
    monkeypatch.setattr(backend, "prepare", prepared.update)

    def body(comm: Communicator) -> None:
        model = make_model(dtype=dtype)
        train(model, build(model, comm), range(15))

    threads.run(body, 2)
    assert called.keys() - {"adam_step"} <= prepared
    assert build not in BUILDERS or prepared <= called.keys()
    assert all(types == {types_of(backend.KERNELS[name][1])} for name, types in called.items())


COLD = """
import sys
from numba.core import event
from thinwire.compress.kernels.cpu import backend
from thinwire.simd.compiling import types_of

backend.prepare(["adam_step"])
with event.install_recorder("numba:compile") as compiled:
    backend.wait()
kernel, arguments = backend.KERNELS["adam_step"]
assert types_of(arguments) in kernel.overloads
assert not compiled.buffer, compiled.buffer
"""


@pytest.mark.programs
def test_what_is_not_on_disk_is_compiled_by_another_process(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for says in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", COLD], capture_output=True, text=True, env=environment, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert ("compiling 1 kernels" in done.stderr) is says


@pytest.mark.programs
def test_the_compile_command_compiles_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["compile"]) == 0
    said = [one for one in capsys.readouterr().err.splitlines() if one.startswith("thinwire: kernel ")]
    assert [one.rpartition(", ")[2] for one in said] == [*backend.KERNELS]
    assert all(types_of(arguments) in kernel.overloads for kernel, arguments in backend.KERNELS.values())
