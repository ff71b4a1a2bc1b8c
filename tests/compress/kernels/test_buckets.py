"""Kernels over a whole bucket: those that are compiled against the specification, and what all refuse."""

from __future__ import annotations

import importlib

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


def _arguments() -> dict[str, object]:
    part = buckets.Part(0, 64, 64, 10, 64)
    return {
        "momentum": torch.zeros(64),
        "denominators": None,
        "residual": None,
        "lost": torch.zeros(64),
        "packets": torch.zeros(1, 16 + 4 + 8, dtype=torch.uint8),
        "part": part,
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"momentum": torch.zeros(63)}, "momentum must be a contiguous vector of 64 elements"),
        ({"lost": torch.zeros(64, dtype=torch.float64)}, "lost must be torch.float32"),
        ({"packets": torch.zeros(1, 27, dtype=torch.uint8)}, "size it with packet_bytes"),
        ({"part": buckets.Part(0, 64, 64, 11, 64)}, "do not cover the 11 elements"),
        ({"part": buckets.Part(0, 128, 64, 10, 64)}, "do not lie in a shard of 64"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], says: str) -> None:
    segments = Segments([(0, 4), (4, 6)])
    given = [None, torch.zeros(6)], [0.9, 0.9], [1.0, 1.0]
    with pytest.raises((TypeError, ValueError), match=says):
        execute(EncodePayload("sign1", "plain", segments, *given, **(_arguments() | changed)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gradients", "beta1", "divisors", "form", "says"),
    [
        ([None], [0.9, 0.9], [1.0, 1.0], "plain", "gradients has 1 entries for 2 runs"),
        ([None, torch.zeros(5)], [0.9, 0.9], [1.0, 1.0], "plain", "of its run's 6 elements"),
        ([None, torch.zeros(6).double()], [0.9, 0.9], [1.0, 1.0], "plain", "convert it first"),
        ([None, torch.zeros(12)[::2]], [0.9, 0.9], [1.0, 1.0], "plain", "must be contiguous"),
        ([None, None], [0.9], [1.0, 1.0], "plain", "beta1 has 1 entries for 2 runs"),
        ([None, None], [0.9, 1.1], [1.0, 1.0], "plain", "between 0 and 1"),
        ([None, None], [0.9, 0.9], [1.0, 0.0], "plain", "finite and not 0"),
        ([None, None], [0.9, 0.9], [1.0, 1.0], "divided", "takes denominators"),
        ([None, None], [0.9, 0.9], [1.0, 1.0], "other", "form must be"),
    ],
)
def test_runs_that_do_not_fit_are_refused(
    gradients: list[torch.Tensor | None], beta1: list[float], divisors: list[float], form: str, says: str
) -> None:
    segments = Segments([(0, 4), (4, 6)])
    with pytest.raises((TypeError, ValueError), match=says):
        execute(EncodePayload("sign1", form, segments, gradients, beta1, divisors, **_arguments()))  # type: ignore[arg-type]


@pytest.mark.parametrize("elsewhere", ["received", "residual", "lost", "mask"])
def test_tensors_on_two_devices_are_refused(elsewhere: str) -> None:
    packet = torch.zeros(1, 16 + 4 + 8, dtype=torch.uint8)
    tensors = {"received": packet.clone(), "residual": torch.zeros(64), "lost": torch.zeros(64)}
    tensors["mask"] = torch.zeros(64, dtype=torch.uint8)
    tensors[elsewhere] = tensors[elsewhere].to("meta")
    received = tensors.pop("received")
    with pytest.raises(ValueError, match=f"{elsewhere} is on meta and packets on cpu: use one device"):
        execute(buckets.AverageAndEncode("sign1", received, packets=packet, numel=64, block_size=64, **tensors))


@pytest.mark.parametrize("header", [b"", b"too long to be a header"])
def test_headers_of_other_sizes_are_refused(header: bytes) -> None:
    changed = _arguments() | {"part": buckets.Part(0, 64, 64, 10, 64, header)}
    with pytest.raises(ValueError, match="a header has 16 bytes"):
        execute(EncodePayload("sign1", "plain", Segments([(0, 10)]), [None], [0.9], [1.0], **changed))  # type: ignore[arg-type]


def test_tables_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would go on with one step's learning rate."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runs = np.zeros(1, dtype=STRUCTURES["PayloadRun"])
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        KeptTables().on_device(("encode_payload", 0), runs, torch.device("cuda", 0))
