"""Kernels over a whole bucket: those that are compiled against the specification, and what all refuse."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from tests.compress.kernels import emulation
from tests.compress.kernels.bucket_body import BucketKernels, Subject
from thinwire.compress.kernels import buckets
from thinwire.compress.kernels.buckets import Segments
from thinwire.compress.kernels.calls import EncodePayload
from thinwire.compress.kernels.cuda.launch import STRUCTURES
from thinwire.compress.kernels.loading import execute
from thinwire.compress.kernels.tables import KeptTables


class TestCpu(BucketKernels):
    @pytest.fixture
    def subject(self) -> Subject:
        pytest.importorskip("numba")
        backend = importlib.import_module("thinwire.compress.kernels.cpu.backend")
        return Subject(backend, backend)


@pytest.mark.kernels
@pytest.mark.skipif(not emulation.COMPILER, reason="g++ is not installed")
class TestEmulatedCuda(BucketKernels):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(emulation.BACKEND, emulation.BACKEND)


def test_runs_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="in order, without overlap"):
        Segments([(0, 4), (3, 2)])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"momentum": torch.zeros(63)}, "momentum must be a contiguous vector of 64 elements"),
        ({"lost": torch.zeros(64, dtype=torch.float64)}, "lost must be torch.float32"),
        ({"packets": torch.zeros(1, 27, dtype=torch.uint8)}, "size it with packet_bytes"),
        ({"part": buckets.Part(0, 64, 64, 11, 64)}, "do not cover the 11 elements"),
        ({"part": buckets.Part(0, 128, 64, 10, 64)}, "do not lie in a shard of 64"),
        ({"part": buckets.Part(0, 64, 64, 10, 64, b"")}, "a header has 16 bytes"),
        ({"part": buckets.Part(0, 64, 64, 10, 64, b"too long to be a header")}, "a header has 16 bytes"),
        ({"gradients": [None]}, "gradients has 1 entries for 2 runs"),
        ({"gradients": [None, torch.zeros(5)]}, "of its run's 6 elements"),
        ({"gradients": [None, torch.zeros(6).double()]}, "convert it first"),
        ({"gradients": [None, torch.zeros(12)[::2]]}, "must be contiguous"),
        ({"beta1": [0.9]}, "beta1 has 1 entries for 2 runs"),
        ({"beta1": [0.9, 1.1]}, "between 0 and 1"),
        ({"divisors": [1.0, 0.0]}, "finite and not 0"),
        ({"form": "divided"}, "takes denominators"),
        ({"form": "other"}, "form must be"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], says: str) -> None:
    given = {
        "form": "plain",
        "segments": Segments([(0, 4), (4, 6)]),
        "gradients": [None, torch.zeros(6)],
        "beta1": [0.9, 0.9],
        "divisors": [1.0, 1.0],
        "momentum": torch.zeros(64),
        "denominators": None,
        "residual": None,
        "lost": torch.zeros(64),
        "packets": torch.zeros(1, 16 + 4 + 8, dtype=torch.uint8),
        "part": buckets.Part(0, 64, 64, 10, 64),
    }
    with pytest.raises((TypeError, ValueError), match=says):
        execute(EncodePayload("sign1", **(given | changed)))


@pytest.mark.parametrize("elsewhere", ["received", "residual", "lost", "mask"])
def test_tensors_on_two_devices_are_refused(elsewhere: str) -> None:
    packet = torch.zeros(1, 16 + 4 + 8, dtype=torch.uint8)
    tensors = {"received": packet.clone(), "residual": torch.zeros(64), "lost": torch.zeros(64)}
    tensors["mask"] = torch.zeros(64, dtype=torch.uint8)
    tensors[elsewhere] = tensors[elsewhere].to("meta")
    received = tensors.pop("received")
    with pytest.raises(ValueError, match=f"{elsewhere} is on meta and packets on cpu: use one device"):
        execute(buckets.AverageAndEncode("sign1", received, packets=packet, numel=64, block_size=64, **tensors))


def test_tables_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would go on with one step's learning rate."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runs = np.zeros(1, dtype=STRUCTURES["PayloadRun"])
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        KeptTables().on_device(("encode_payload", 0), runs, torch.device("cuda", 0))
