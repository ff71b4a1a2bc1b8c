"""The CUDA kernels on a real GPU, through the body that all backends share."""

from dataclasses import replace

import pytest
import torch

from tests.compress.kernels import bucket_body
from tests.compress.kernels.body import BACKENDS, KernelsBody, Subject, check_rows_apart, uninitialised_packets
from tests.compress.kernels.bucket_body import BucketKernels, assert_same
from tests.compress.kernels.test_momentum import make_momentum
from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded, WriteHeaders
from thinwire.compress.kernels.cuda.backend import make_backend
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import Flags, Header
from thinwire.compress.packet_layout import CODE_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in BACKENDS, reason="needs an NVIDIA GPU, and cuda.bindings or cupy"),
]


class TestCuda(KernelsBody):
    @pytest.fixture
    def subject(self) -> Subject:
        backend = BACKENDS["cuda"]
        return Subject("cuda", backend, device="cuda", block_sizes=(64, 128, 192, 320, 1024, 2048, 65536))


class TestBucketsOnCuda(BucketKernels):
    @pytest.fixture
    def subject(self) -> bucket_body.Subject:
        backend = make_backend()
        return bucket_body.Subject(backend, backend, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first", [0, 3])
def test_large_ranges_move_with_the_bits_of_the_specification(dtype: torch.dtype, first: int) -> None:
    """Over many thread blocks."""
    shard = 700 * 2048
    on_cpu = make_momentum(2, shard, 2048, first, 2 * shard - 7)
    on_cuda = replace(on_cpu, **{name: getattr(on_cpu, name).cuda() for name in ("packets", "codes", "table")})
    values = torch.randn(on_cpu.numel).to(dtype)
    moved = on_cuda.apply(make_backend(), values.cuda(), 1e-3, 0.999, seed=11)
    assert_same(moved.cpu(), on_cpu.apply(bucket_reference, values, 1e-3, 0.999, seed=11))


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_headers(rows: int) -> None:
    """Written without a wait of the host."""
    packets = torch.zeros(rows, 32, dtype=torch.uint8, device="cuda")
    packets[-1, 16:20] = torch.tensor([0, 0, 128, 127], dtype=torch.uint8, device="cuda")  # infinity
    header = Header(1, 64, 3, 5)
    condition = torch.zeros((), dtype=torch.bool, device="cuda")
    execute(WriteHeaders(packets, header.pack()))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        execute(WriteHeaders(packets, header.pack(), 2, condition, Flags.NON_FINITE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [Header.unpack(row[:16].numpy().tobytes()) for row in packets.cpu()]
    assert found == [*[header] * (rows - 1), replace(header, flags=Flags.NON_FINITE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [0, 5, 2049, 100_003])
def test_rounding_has_the_bits_of_the_cpu(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel) * 2.0 ** torch.randint(-30, 30, (numel,))
    on_cpu, on_cuda = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device="cuda")
    execute(StoreRounded(on_cpu, values, 7))
    execute(StoreRounded(on_cuda, values.cuda(), 7))
    assert_same(on_cuda.cpu(), on_cpu)


@pytest.mark.parametrize("value", [1e-38, 1e-40])
def test_subnormals_are_kept(value: float) -> None:
    payload = torch.full((64,), value, device="cuda")
    packets = uninitialised_packets("sign1", 1, 64, 64, "cuda")
    decoded = torch.empty_like(payload)
    execute(Encode("sign1", payload.clone(), None, packets, 64, 64))
    execute(Decode("sign1", packets, decoded, 64, 64))
    assert torch.equal(decoded, payload)


@pytest.mark.parametrize("codec", CODE_BITS)
def test_rows_apart(codec: str) -> None:
    for numel in (0, 129, 717, 1820, 1920):
        check_rows_apart(BACKENDS["cuda"], codec, "cuda", 640, slice(128, 512), numel)


@pytest.mark.parametrize("codec", CODE_BITS)
class TestCallsOnCuda:
    def test_launches_join_the_current_stream(self, codec: str) -> None:
        payload = torch.randn(1 << 22, device="cuda")
        packets = uninitialised_packets(codec, 1, payload.numel(), 2048, "cuda")
        corrected, decoded = payload.clone(), torch.empty_like(payload)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(8):
                payload.copy_(corrected)
                execute(Encode(codec, payload, None, packets, payload.numel(), 2048))
                execute(Decode(codec, packets, decoded, payload.numel(), 2048))
                decoded += payload
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(decoded, corrected)
