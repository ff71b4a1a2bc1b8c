"""Every kernel backend that runs without a GPU, csrc/ on an emulated one among them, and what calls refuse."""

import importlib.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compress.kernels import emulation
from tests.compress.kernels.body import (
    BACKENDS,
    CODECS,
    REFERENCE,
    KernelsBody,
    Subject,
    Unchecked,
    check_rows_apart,
    encode,
    same,
    uninitialised_packets,
)
from tests.refusing import refused
from thinwire.compress.codecs import scales
from thinwire.compress.kernels import loading
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import packet_bytes

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")

SUBJECTS = [Subject(name, backend) for name, backend in BACKENDS.items() if name != "cuda"]
if emulation.COMPILER:
    SUBJECTS.append(Subject("emulated cuda", Unchecked(emulation.BACKEND), block_sizes=(64, 192, 2048)))
MARKED = [pytest.param(one, marks=[pytest.mark.kernels] if one.name.startswith("emulated") else []) for one in SUBJECTS]


class TestBackends(KernelsBody):
    @pytest.fixture(params=MARKED, ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return request.param


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_numba
class TestCpuThreads:
    """More than one thread enters only beyond a hundred thousand elements or so: these are larger."""

    ROWS, SHARD, BLOCK_SIZE = 3, 256 * 2048, 2048
    NUMEL = ROWS * SHARD - 4321

    @pytest.fixture(autouse=True)
    def threads_used(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """As many cores as torch has threads; the number of threads of every call."""
        from thinwire.compress.kernels.cpu import backend as cpu
        from thinwire.simd.workers import Workers

        used: list[int] = []

        class Counted(Workers):
            def threads(self) -> int:
                return torch.get_num_threads()

            def each(self, work: Callable[[int], None], parts: int, threads: int) -> None:
                used.append(threads)
                super().each(work, parts, threads)

        monkeypatch.setattr(cpu, "_workers", Counted())
        return used

    def results(self, codec: str, payload: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        payload = payload.clone()
        packets = torch.zeros(self.ROWS, packet_bytes(codec, self.SHARD, self.BLOCK_SIZE), dtype=torch.uint8)
        decoded, mean = torch.empty_like(payload), torch.empty(self.SHARD)
        execute(Encode(codec, payload, residual, packets, self.NUMEL, self.BLOCK_SIZE))
        execute(Decode(codec, packets, decoded, self.NUMEL, self.BLOCK_SIZE))
        execute(Decode(codec, packets, mean, self.SHARD, self.BLOCK_SIZE, mean=True))
        return payload, packets, decoded, mean

    @pytest.mark.parametrize("codec", ["sign1", "stat2"])
    def test_the_number_of_threads_does_not_show(self, codec: str, thread_count: None, threads_used: list[int]) -> None:
        payload, residual = torch.randn(2, self.ROWS * self.SHARD)
        torch.set_num_threads(1)
        wanted = self.results(codec, payload, residual)
        assert not threads_used  # one thread does it all itself
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            threads_used.clear()
            results = self.results(codec, payload, residual)
            assert max(threads_used) == threads
            for result, expected in zip(results, wanted, strict=True):
                assert torch.equal(result, expected)

    @pytest.mark.parametrize("codec", ["sign1", "int8"])
    def test_many_python_threads_at_once(self, codec: str, thread_count: None) -> None:
        torch.set_num_threads(2)
        payload, residual = torch.randn(2, self.ROWS * self.SHARD)
        wanted = self.results(codec, payload, residual)
        outcomes: list[bool] = []

        def work() -> None:
            for _ in range(3):
                results = self.results(codec, payload, residual)
                outcomes.append(all(map(torch.equal, results, wanted)))

        workers = [threading.Thread(target=work) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert outcomes == [True] * 18

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_threads_work_in_a_forked_process(self, thread_count: None) -> None:
        torch.set_num_threads(2)
        payload, residual = torch.randn(2, self.ROWS * self.SHARD)
        wanted = self.results("sign1", payload, residual)
        packets = torch.zeros_like(wanted[1])  # torch's own threads do not survive a fork: allocate before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
            child = os.fork()
        if child == 0:
            signal.alarm(60)
            execute(Encode("sign1", payload, residual, packets, self.NUMEL, self.BLOCK_SIZE))
            os._exit(0 if packets.numpy().tobytes() == wanted[1].numpy().tobytes() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @pytest.mark.parametrize(
        ("codec", "offset"),
        [("sign1", 0), ("sign1", 1), ("int8", 0), ("int8", 3), ("stat2", 0), ("int4", 0), ("fp8", 0)],
    )
    def test_large_and_unaligned_outputs(self, codec: str, offset: int) -> None:
        """Large outputs are written past the caches where their alignment allows it."""
        numel = (1 << 22) + 2048
        packets = uninitialised_packets(codec, 1, numel, 2048, "cpu")
        scales(codec, packets, 2048).uniform_()
        output = torch.empty(numel + offset)[offset:]
        wanted = torch.empty(numel)
        execute(Decode(codec, packets, output, numel - 3, 2048))
        REFERENCE.decode(codec, packets, wanted, numel - 3, 2048)
        assert same(output, wanted)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("name", "threads"),
    [("reference", 1), pytest.param("cpu", 1, marks=needs_numba), pytest.param("cpu", 3, marks=needs_numba)],
)
def test_rows_apart(codec: str, name: str, threads: int, thread_count: None) -> None:
    torch.set_num_threads(threads)
    large = [(1 << 18, 64, (1 << 18) - 64)] if threads > 1 else []  # which they share
    for shard, first, stop in ((640, 128, 512), (640, 0, 64), *large):
        for numel in (0, first + 1, shard + 77, 3 * shard - 100, 3 * shard):
            check_rows_apart(BACKENDS[name], codec, "cpu", shard, slice(first, stop), numel)


@pytest.mark.parametrize("codec", ["stat2", "int4", "fp8", "int8"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e-38, 1e-43, 1e30, 3e38])
@pytest.mark.parametrize("subject", MARKED[1:], ids=str)
def test_backends_encode_to_the_bits_of_the_specification(subject: Subject, codec: str, magnitude: float) -> None:
    """Sums are taken in the same order, so that stat2 splits alike."""
    for block_size, numel in ((64, 3 * 128), (192, 3 * 384 - 1), (2048, 3 * 4096 - 2500)):
        payload, residual = torch.randn(2, 3 * 2 * block_size) * magnitude
        payload[torch.rand(len(payload)) < 0.1] = -0.0
        payload.clamp_(-3.4e38, 3.4e38)
        torch.manual_seed(numel)
        subjects = (subject, Subject("reference", BACKENDS["reference"]))
        ours, wanted = (encode(one, codec, payload, residual, 3, numel, block_size) for one in subjects)
        assert same(ours.lost, wanted.lost)
        if payload.isfinite().all() and residual.isfinite().all():
            assert torch.equal(ours.packets, wanted.packets)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["reference", pytest.param("cpu", marks=needs_numba)])
def test_any_alignment_will_do_on_a_cpu(codec: str, name: str) -> None:
    backend = BACKENDS[name]
    payload, residual = torch.randn(2, 3 * 128)
    aligned = uninitialised_packets(codec, 3, 128, 64, "cpu")
    shifted = torch.empty(aligned.numel() + 1, dtype=torch.uint8)[1:].view(3, -1).copy_(aligned)
    lost, shifted_lost = payload.clone(), torch.empty(3 * 128 + 1)[1:].copy_(payload)
    backend.encode(codec, lost, residual, aligned, 370, 64)
    backend.encode(codec, shifted_lost, torch.empty(3 * 128 + 3)[3:].copy_(residual), shifted, 370, 64)
    assert torch.equal(aligned, shifted)
    assert torch.equal(lost, shifted_lost)
    mean, shifted_mean = torch.empty(128), torch.empty(128 + 1)[1:]
    backend.decode_mean(codec, aligned, mean, 128, 64)
    backend.decode_mean(codec, shifted, shifted_mean, 128, 64)
    assert torch.equal(mean, shifted_mean)


@needs_numba
def test_kernels_compile_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CacheImpl

    from thinwire.simd import compiling

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    filled = torch.zeros(3).numpy()

    @compiling.kernel
    def fill(values) -> None:
        values[:] = 1.0

    fill(filled)
    assert filled.tolist() == [1.0, 1.0, 1.0]


def arguments_of(codec: str, operation: str) -> tuple[Tensor | int | None, ...]:
    payload, residual = torch.randn(2, 3 * 128)
    packets = uninitialised_packets(codec, 3, 128, 64, "cpu")
    execute(Encode(codec, payload.clone(), residual, packets, 300, 64))
    return {"encode": (payload, residual, packets, 300, 64), "decode": (packets, torch.zeros(3 * 128), 300, 64)}[
        operation
    ]


@pytest.mark.parametrize("codec", ["sign1", "stat2"])
class TestCalls:
    def test_tensors_that_require_gradients_can_be_decoded_into(self, codec: str) -> None:
        packets, output, numel, block_size = arguments_of(codec, "decode")
        with torch.no_grad():
            execute(Decode(codec, packets, output.requires_grad_(), numel, block_size))
        assert output.abs().sum() > 0

    def test_bad_arguments_are_refused_with_what_to_do(self, codec: str) -> None:
        payload, residual, packets, numel, size = arguments_of(codec, "encode")
        rounded = residual.bfloat16()
        new = torch.zeros(3 * 128).bfloat16()
        rest = packets, numel, size
        for kind, match, *arguments in (
            (TypeError, "payload must be torch.float32", payload.double(), residual, *rest),
            (TypeError, "packets must be torch.uint8", payload, residual, packets.char(), numel, size),
            (ValueError, "contiguous vector", payload.view(2, -1), residual, *rest),
            (ValueError, "contiguous vector", payload.view(3, -1)[:, ::2], None, *rest),
            (ValueError, "contiguous vector", payload[::2], residual, *rest),
            (ValueError, "contiguous", payload, residual, packets.t(), numel, size),
            (ValueError, "at least one row", payload, residual, packets[0], numel, size),
            (ValueError, "at least one row", payload, residual, packets[:0], numel, size),
            (ValueError, "not a multiple of the 3 rows", payload[:-1], None, *rest),
            (ValueError, "whole number of blocks", payload[:-3], None, *rest),
            (ValueError, "residual must be a contiguous vector of 384", payload, residual[:-1], *rest),
            (ValueError, "rows of", payload, residual, packets[:, :-1].contiguous(), numel, size),
            (ValueError, "numel is 385", payload, residual, packets, 385, size),
            (ValueError, "numel is -1", payload, residual, packets, -1, size),
            (ValueError, "is on meta", payload.to("meta"), None, *rest),
            *(
                (ValueError, f"block_size must be .*, got {bad}", payload, residual, *rest[:2], bad)
                for bad in (0, -64, 32, 65, 65600)
            ),
            (
                TypeError,
                r"new_residual must be torch\.bfloat16, got torch\.float16",
                payload,
                rounded,
                *rest,
                new.half(),
            ),
            (TypeError, r"residual must be torch\.bfloat16, got torch\.float32", payload, residual, *rest, new),
            (ValueError, "new_residual must be a contiguous vector of 384", payload, None, *rest, new[1:]),
        ):
            before = packets.clone()
            refused(kind, match, execute, Encode(codec, *arguments))
            assert torch.equal(packets, before)
        packets, output, _, _ = arguments_of(codec, "decode")
        for kind, match, *arguments in (
            (TypeError, "output must be", output.half(), 300, size),
            (ValueError, "numel is 129", output[:128], 129, size, True),
            (ValueError, "rows of", output, 128, size, True),
        ):
            refused(kind, match, execute, Decode(codec, packets, *arguments))


@pytest.mark.skipif(not emulation.COMPILER, reason="g++ is not installed")
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 96])
def test_gpus_divide_to_the_last_bit(rows: int) -> None:
    """By products with inverses: sums of every magnitude, subnormal ones and those next to the largest among them."""
    shard = 40 * 64
    packets = torch.randint(0, 256, (rows, packet_bytes("sign1", shard, 64)), dtype=torch.uint8)
    magnitudes = torch.rand(rows, 40) * 2.0 ** torch.randint(-149, 120, (40,)).float()
    scales("sign1", packets, 64).copy_(magnitudes)
    wanted, mean = torch.empty(2, shard)
    REFERENCE.decode_mean("sign1", packets, wanted, shard - 3, 64)
    Unchecked(emulation.BACKEND).decode_mean("sign1", packets, mean, shard - 3, 64)
    assert torch.equal(mean.view(torch.int32), wanted.view(torch.int32))


class DividesAsGpusDo(TorchDispatchMode):
    """torch on CUDA multiplies by the reciprocal where a tensor is divided by a number, or by a scalar on the CPU that
    was made of one."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_) and not isinstance(args[1], Tensor):
            args = args[0], torch.full((), 1 / args[1], dtype=args[0].dtype)
            function = {torch.ops.aten.div: torch.ops.aten.mul, torch.ops.aten.div_: torch.ops.aten.mul_}[
                function.overloadpacket
            ].Tensor
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [3, 5, 6, 7])
def test_the_reference_divides_alike_on_gpus(codec: str, rows: int) -> None:
    def results() -> list[Tensor]:
        payload = torch.randn(rows * 640, generator=torch.Generator().manual_seed(rows))
        packets = torch.zeros(rows, packet_bytes(codec, 640, 64), dtype=torch.uint8)
        mean = torch.empty(640)
        REFERENCE.encode(codec, payload, None, packets, rows * 640 - 5, 64)
        REFERENCE.decode_mean(codec, packets, mean, 640, 64)
        return [payload, packets, mean]

    wanted = results()
    with DividesAsGpusDo():
        assert not torch.equal(torch.arange(100.0) / 3, torch.arange(100.0) / torch.full((), 3.0))
        assert all(map(torch.equal, results(), wanted))


def test_unknown_codecs_are_refused() -> None:
    refused(ValueError, "'sign2': choose one of sign1, stat2, int4, fp8, int8", packet_bytes, "sign2", 64, 64)
    with pytest.raises(ValueError, match="'sign2'"):
        execute(Decode("sign2", torch.empty(1, 28, dtype=torch.uint8), torch.empty(64), 64, 64))


def test_without_numba_the_reference_takes_over_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thinwire.compress.kernels.cpu.backend", None)
    loading.compiled_backend.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments_of("sign1", "encode")
        arguments_of("int8", "encode")
    assert ["pip install numba" in str(warning.message) for warning in caught] == [True]
    loading.compiled_backend.cache_clear()
