"""What the CUDA backend tells NVRTC and the driver, with both replaced by fakes that check it and run the kernels on
the emulated GPU."""

import ctypes
import importlib
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.kernels import emulation
from tests.compress.kernels.body import REFERENCE
from thinwire.compress.kernels import loading
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.cuda.launch import architecture_option, compile_options, encode_launch, source_text
from thinwire.compress.kernels.cuda.toolkit import (
    BindingsToolkit,
    CupyToolkit,
    KernelCompilerError,
    find_toolkit,
    machine_code,
)
from thinwire.compress.packet_layout import packet_bytes

pytestmark = pytest.mark.skipif(not emulation.COMPILER, reason="g++ is not installed")

DEVICE, STREAM, CONTEXT = 3, 0x5EED, 0xC0
OK = 0


class FakeNvrtc:
    """nvrtc of cuda.bindings; what it compiles is a note of what it was given."""

    def __init__(self) -> None:
        self.programs: dict[int, tuple[str, list[str]]] = {}
        self.options: list[list[str]] = []
        self.alive = 0
        self.status = OK
        self.nvrtcVersion = lambda: (OK, 13, 0)
        self.nvrtcGetSupportedArchs = lambda: (OK, [75, 80, 90, 100])
        self.nvrtcGetProgramLogSize = lambda program: (OK, 12)
        self.nvrtcGetProgramLog = lambda program, log: self._fill(log, b"no semicolon")
        self.nvrtcGetCUBINSize = lambda program: (OK, len(self._note(program)))
        self.nvrtcGetCUBIN = lambda program, code: self._fill(code, self._note(program))
        self.nvrtcGetPTXSize = lambda program: (OK, 3)
        self.nvrtcGetPTX = lambda program, code: self._fill(code, b"PTX")

    def nvrtcCreateProgram(self, source, name, count, headers, names):  # noqa: N802
        assert isinstance(source, bytes)
        assert isinstance(name, bytes)
        assert (count, headers, names) == (0, None, None)
        self.alive += 1
        handle = len(self.programs) + 1
        self.programs[handle] = source.decode(), []
        return OK, handle

    def nvrtcCompileProgram(self, program, count, options):  # noqa: N802
        assert count == len(options)
        self.programs[program][1].extend(option.decode() for option in options)
        self.options.append(self.programs[program][1])
        return (self.status,)

    def nvrtcDestroyProgram(self, program):  # noqa: N802
        self.alive -= 1
        return (OK,)

    def _note(self, program: int) -> bytes:
        """Nothing for a virtual architecture, which has PTX alone."""
        source, options = self.programs[program]
        name = next(name for name in emulation.FUNCTIONS if source_text(name) == source)
        return b"" if any("compute_" in option for option in options) else "\n".join([name, *options]).encode()

    def _fill(self, memory, values: bytes):
        memory[:] = values
        return (OK,)


class FakeDriver:
    """driver of cuda.bindings: refuses what a GPU would, and launches on the emulation."""

    def __init__(self, contexts: list[int]) -> None:
        self.contexts = contexts  # those of the calling thread, the current one last
        self.launches: list[tuple[str, int]] = []
        self.retained = 0

    def cuDeviceGet(self, index):  # noqa: N802
        return OK, 100 + index

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        assert device == 100 + DEVICE
        self.retained += 1
        return OK, CONTEXT

    def cuCtxGetCurrent(self):  # noqa: N802
        return OK, self.contexts[-1] if self.contexts else 0

    def cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self):  # noqa: N802
        return OK, self.contexts.pop()

    def cuModuleLoadData(self, code):  # noqa: N802
        assert self.contexts[-1] == CONTEXT
        return OK, code

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        source, *options = module.decode().split("\n")
        return OK, (source, options, name.decode())

    def cuLaunchKernel(self, kernel, *numbers):  # noqa: N802
        assert self.contexts[-1:] == [CONTEXT], "a launch on another device, or on none"
        source, options, name = kernel
        grid_x, grid_y, grid_z, threads, threads_y, threads_z, shared, stream, parameters, extra = numbers
        assert (grid_z, threads_y, threads_z, shared, extra) == (1, 1, 1, 0, 0)
        definitions = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        assert threads == int(definitions["THREADS"])
        library = emulation.library_of(source, int(definitions["BLOCK_SIZE"]), threads)
        count = len(emulation.argument_sizes(library, name))
        places = (ctypes.c_void_p * count).from_address(parameters)
        assert emulation.launch_at(library, name, (grid_x, grid_y), threads, places) == 0
        self.launches.append((name, stream))
        return (OK,)


@pytest.fixture
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors in host memory, which torch takes for the current device's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {DEVICE: (9, 0)}[device])
    stream = types.SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {DEVICE: stream}[device])


def make_backend(nvrtc: FakeNvrtc, driver: FakeDriver) -> Any:
    module = importlib.import_module("thinwire.compress.kernels.cuda.backend")
    return module.CudaBackend(module.Runner(BindingsToolkit(nvrtc, driver)).run)


def make_call(seed: int) -> tuple[Encode, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randn(3 * 192, generator=generator)
    packets = torch.zeros(3, packet_bytes("sign1", 192, 64), dtype=torch.uint8)
    return Encode("sign1", payload, None, packets, 500, 64), packets


@pytest.mark.parametrize("contexts", [[], [CONTEXT], [0xBAD]], ids=["new thread", "current", "another device"])
def test_calls_reach_the_kernels(on_a_fake_gpu: None, contexts: list[int]) -> None:
    """Every argument as the kernel takes it, on torch's stream, in the device's context, which is left as it was."""
    nvrtc, driver = FakeNvrtc(), FakeDriver(list(contexts))
    backend = make_backend(nvrtc, driver)
    call, packets = make_call(1)
    wanted, wanted_packets = make_call(1)
    backend.encode(call)
    REFERENCE.encode("sign1", wanted.payload, None, wanted_packets, 500, 64)
    assert torch.equal(packets[:, 16 + 12 :], wanted_packets[:, 16 + 12 :])
    output, wanted_output = torch.empty(2, 3 * 192)
    backend.decode(Decode("sign1", packets, output, 500, 64, mean=False))
    REFERENCE.decode("sign1", packets, wanted_output, 500, 64)
    assert torch.equal(output, wanted_output)
    assert driver.launches == [("encode_sign1", STREAM), ("decode_sign1", STREAM)]
    assert driver.contexts == contexts
    assert (driver.retained, nvrtc.alive) == (1, 0)


def test_options_keep_subnormals(on_a_fake_gpu: None) -> None:
    """Of all that NVRTC is given: flushing would change results, as the next test shows."""
    nvrtc = FakeNvrtc()
    make_backend(nvrtc, FakeDriver([])).encode(make_call(2)[0])
    (options,) = nvrtc.options
    assert {"--ftz=false", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "-arch=sm_90"} <= set(options)
    assert not any("fast" in option or "ftz=true" in option for option in options)


@pytest.mark.parametrize("value", [1e-38, 1e-40])
def test_flushing_subnormals_would_show(value: float) -> None:
    """The check of the checker: without it, an emulation that flushes nothing would pass as one that does."""

    def lost(flush: bool) -> Tensor:
        payload = torch.tensor([value, value / 3]).repeat(32)
        packets = torch.zeros(1, packet_bytes("sign1", 64, 64), dtype=torch.uint8)
        emulation.run(encode_launch(Encode("sign1", payload, None, packets, 64, 64)), flush)
        return payload

    assert lost(flush=False).count_nonzero() == 64
    assert lost(flush=True).count_nonzero() == 0


def test_machine_code_is_kept_by_all_that_it_depends_on(tmp_path: Path) -> None:
    nvrtc = FakeNvrtc()
    toolkit = BindingsToolkit(nvrtc, None)
    options = (*compile_options(64, 32), "-arch=sm_90")
    first = machine_code(toolkit, source_text("sign1"), options, tmp_path)
    assert machine_code(toolkit, source_text("sign1"), options, tmp_path) == first
    assert len(nvrtc.options) == 1
    machine_code(toolkit, source_text("sign1"), (*compile_options(64, 32), "-arch=sm_80"), tmp_path)
    machine_code(toolkit, source_text("int8"), options, tmp_path)
    assert len(nvrtc.options) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_kernels_compile_where_no_folder_can_be_written(tmp_path: Path) -> None:
    toolkit = BindingsToolkit(FakeNvrtc(), None)
    (tmp_path / "file").touch()
    options = (*compile_options(64, 32), "-arch=sm_90")
    assert machine_code(toolkit, source_text("sign1"), options, tmp_path / "file" / "folder").startswith(b"sign1")


def test_what_does_not_compile_says_why() -> None:
    nvrtc = FakeNvrtc()
    nvrtc.status = 6
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.0 does not compile the kernels with -x:\nno semicolon"):
        BindingsToolkit(nvrtc, None).compile("", ["-x"])
    assert nvrtc.alive == 0


@pytest.mark.parametrize(
    ("capability", "option"),
    [((8, 0), "sm_80"), ((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "compute_100")],
)
def test_gpus_that_the_compiler_does_not_know(capability: tuple[int, int], option: str) -> None:
    assert architecture_option(capability, (75, 80, 90, 100)) == f"-arch={option}"


def test_gpus_too_old_are_refused() -> None:
    with pytest.raises(RuntimeError, match="begins at sm_75"):
        architecture_option((7, 0), (75, 80))


def test_ptx_where_the_architecture_is_virtual() -> None:
    toolkit = BindingsToolkit(FakeNvrtc(), None)
    assert toolkit.compile(source_text("sign1"), ["-arch=compute_100"]) == b"PTX"


def test_cupy_compiles_with_our_options_alone() -> None:
    """Not by its own way to NVRTC, which appends -ftz=true."""
    compiled: list[Any] = []
    launched: list[Any] = []
    cupy = types.SimpleNamespace(
        NVRTCError=RuntimeError,
        getVersion=lambda: (13, 0),
        createProgram=lambda source, name, headers, names: source,
        compileProgram=lambda program, options: compiled.append(options),
        getCUBIN=lambda program: b"CUBIN",
        destroyProgram=lambda program: None,
        Module=lambda: types.SimpleNamespace(load=lambda code: None, get_function=lambda name: launch),
        cuda=types.SimpleNamespace(Device=nullcontext, ExternalStream=lambda stream, device: nullcontext()),
    )

    def launch(grid: Any, threads: Any, arguments: Any) -> None:
        launched.append((grid, threads, arguments))

    toolkit = CupyToolkit(cupy, cupy, cupy)
    options = (*compile_options(64, 32), "-arch=sm_90")
    assert toolkit.compile(source_text("sign1"), options) == b"CUBIN"
    assert compiled == [options]
    arguments = encode_launch(make_call(3)[0]).arguments
    toolkit.launch(toolkit.load(b"CUBIN", "encode_sign1", 0), (7, 2), 32, arguments, 0, STREAM)
    ((grid, threads, given),) = launched
    assert (grid, threads) == ((7, 2), (32,))
    assert [(one.tobytes(), one.size) for one in given] == [(one, 1) for one in arguments]


def test_without_a_compiler_plain_torch_takes_over_when_training_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning, which says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelCompilerError, match=r"cuda\.bindings\.nvrtc: .*; cupy: "):
        find_toolkit()
    loading.compiled_backend.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert loading.compiled_backend("cuda") is None
        assert loading.compiled_backend("cuda") is None
    assert ["pip install 'thinwire[cuda]'" in str(warning.message) for warning in caught] == [True]
    loading.compiled_backend.cache_clear()
