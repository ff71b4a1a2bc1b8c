"""The kernel benchmark writes what it says, and refuses what it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.benchmarks.kernel_peers import (
    cpu_copies,
    cpu_fills,
    eager_decode_mean,
    eager_encode,
    eager_encode_as_deepspeed,
)
from experiments.benchmarks.kernels import main
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import HEADER_BYTES, packet_bytes


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "rates.json"
    arguments = ["--elements", "64K", "--repetitions", "1", "--output", str(output)]
    assert main(arguments) == 0
    written = json.loads(output.read_text())
    assert written["elements"] == 65536
    names = [result["name"] for result in written["results"]]
    assert {"copy, torch", "sign1 encode", "stat2 encode", "int4 decode", "int8 decode and average 4"} <= set(names)
    assert all(result["milliseconds"] > 0 for result in written["results"])
    assert "sign1 encode" in capsys.readouterr().out
    assert output.with_suffix(".png").stat().st_size > 1000


ELEMENTS, BLOCK_SIZE = 6 * 2048, 2048


@pytest.fixture
def encoded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload and residual, what the kernel leaves of them, and its packet without the header."""
    payload, residual = torch.randn(2, ELEMENTS)
    lost = payload.clone()
    packet = torch.zeros(1, packet_bytes("sign1", ELEMENTS, BLOCK_SIZE), dtype=torch.uint8)
    execute(Encode("sign1", lost, residual, packet, ELEMENTS, BLOCK_SIZE))
    return payload, residual, lost, packet[0, HEADER_BYTES:]


def check_packet(packet: torch.Tensor, wanted: torch.Tensor) -> None:
    split = 4 * ELEMENTS // BLOCK_SIZE
    torch.testing.assert_close(packet[:split].view(torch.float32), wanted[:split].clone().view(torch.float32))
    assert torch.equal(packet[split:], wanted[split:])


def test_eager_encode_does_what_the_kernel_does(encoded) -> None:
    payload, residual, lost, wanted = encoded
    packet = torch.zeros_like(wanted)
    eager_encode(payload, residual, packet, BLOCK_SIZE)
    check_packet(packet, wanted)
    torch.testing.assert_close(payload, lost)


def test_deepspeeds_passes_do_what_the_kernel_does(encoded) -> None:
    payload, residual, lost, wanted = encoded
    packet = torch.zeros_like(wanted)
    eager_encode_as_deepspeed(payload, residual, packet, BLOCK_SIZE)
    check_packet(packet, wanted)
    torch.testing.assert_close(residual, lost)


def test_eager_mean_does_what_the_kernel_does() -> None:
    packets = torch.zeros(3, packet_bytes("sign1", ELEMENTS, BLOCK_SIZE), dtype=torch.uint8)
    for row in packets.unbind():
        execute(Encode("sign1", torch.randn(ELEMENTS), None, row.unsqueeze(0), ELEMENTS, BLOCK_SIZE))
    wanted, output = torch.empty(2, ELEMENTS)
    execute(Decode("sign1", packets, wanted, ELEMENTS, BLOCK_SIZE, mean=True))
    eager_decode_mean(packets[:, HEADER_BYTES:], output, BLOCK_SIZE)
    torch.testing.assert_close(output, wanted)


def test_every_copy_copies() -> None:
    source, target = torch.randn(2, ELEMENTS)
    copies = cpu_copies(source, target)
    assert list(copies) == ["copy, torch", "copy, numpy", "copy, streaming"]
    for copy in copies.values():
        target.zero_()
        copy()
        assert torch.equal(target, source)


def test_every_fill_fills() -> None:
    target = torch.zeros(ELEMENTS)
    fills = cpu_fills(target)
    assert list(fills) == ["fill, torch", "fill, streaming"]
    for fill in fills.values():
        target.zero_()
        fill()
        assert torch.equal(target, torch.ones(ELEMENTS))
