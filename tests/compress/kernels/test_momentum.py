"""Momentum kept as packets, on every backend that runs without a GPU; its operators; and the noise of its rounding."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.kernels.body import REFERENCE, Subject
from tests.compress.kernels.momentum_body import TYPES, MomentumBody, make_momentum, same_bits
from tests.compress.kernels.test_kernels import MARKED, needs_numba
from thinwire.compress import kernels
from thinwire.compress.kernels.noise import random_bits

CPU = Subject("operators", kernels)


class TestMomentum(MomentumBody):
    @pytest.fixture(params=MARKED, ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return request.param


@needs_numba
class TestCpuThreads:
    """More than one thread enters only beyond a hundred thousand elements or so."""

    @pytest.fixture(autouse=True)
    def three_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)

    @pytest.mark.parametrize("first", [0, 5])
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_large_ranges_have_the_bits_of_the_reference(
        self, first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On several threads, and written past the caches where the alignment allows it."""
        monkeypatch.setattr("thinwire.compress.kernels.cpu.backend._STREAM_ELEMENTS", 1 << 19)
        shard = 280 * 2048
        momentum = make_momentum(CPU, 2, shard, 2048, first, 2 * shard - 9)
        values = torch.randn(momentum.numel).to(dtype)
        reference = Subject("reference", REFERENCE)
        assert same_bits(momentum.payload(CPU, values), momentum.payload(reference, values))
        assert same_bits(momentum.apply(CPU, values, 1e-3, 1.0, 3), momentum.apply(reference, values, 1e-3, 1.0, 3))

    def test_many_python_threads_at_once(self) -> None:
        momentum = make_momentum(CPU, 1, 300 * 2048, 2048, 0, 300 * 2048)
        values = torch.randn(momentum.numel)
        payload, weights = momentum.payload(CPU, values), momentum.apply(CPU, values.bfloat16(), 1e-3, 1.0, 3)
        outcomes: list[bool] = []

        def work() -> None:
            again = momentum.apply(CPU, values.bfloat16(), 1e-3, 1.0, 3)
            outcomes.append(torch.equal(momentum.payload(CPU, values), payload) and torch.equal(again, weights))

        workers = [threading.Thread(target=work) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert outcomes == [True] * 6


def payload_arguments(**changes: Any) -> dict[str, Any]:
    momentum = make_momentum(CPU, 3, 128, 64, first=5, numel=300)
    arguments = {
        "packets": momentum.packets,
        "gradient": torch.randn(300).bfloat16(),
        "codes": momentum.codes,
        "table": momentum.table,
        "payload": torch.empty(300),
        "first": 5,
        "shard": 128,
        "block_size": 64,
        "beta1": 0.9,
        "loss_scale": 1024.0,
    }
    return arguments | changes


def step_arguments(**changes: Any) -> dict[str, Any]:
    given = payload_arguments()
    arguments = {
        "weights": torch.randn(300).bfloat16(),
        **{name: given[name] for name in ("packets", "codes", "first", "shard", "block_size")},
        "lr": 1e-3,
        "decay": 0.99,
        "seed": -5,
    }
    return arguments | changes


class TestOperators:
    @pytest.mark.parametrize("gradient", [None, *TYPES], ids=str)
    def test_opcheck_of_the_payload(self, gradient: torch.dtype | None) -> None:
        given = None if gradient is None else torch.randn(300).to(gradient)
        arguments = payload_arguments(gradient=given, payload=torch.zeros(300))
        torch.library.opcheck(torch.ops.thinwire.momentum_payload.default, tuple(arguments.values()))

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_opcheck_of_the_step(self, dtype: torch.dtype) -> None:
        arguments = step_arguments(weights=torch.randn(300).to(dtype))
        torch.library.opcheck(torch.ops.thinwire.apply_signs.default, tuple(arguments.values()))

    def test_compiles_into_one_graph(self) -> None:
        def step(gradient: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            payload = torch.empty(300)
            kernels.momentum_payload(**(fixed | {"gradient": gradient * 2, "payload": payload}))
            moved = weights + 1
            kernels.apply_signs(**(fixed_step | {"weights": moved}))
            return payload * 2, moved

        fixed, fixed_step = payload_arguments(), step_arguments()
        arguments = (torch.randn(300), torch.randn(300).bfloat16())
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for result, wanted in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(result, wanted)

    def test_parameters_can_be_moved(self) -> None:
        weights = torch.nn.Parameter(torch.ones(300))
        with torch.no_grad():
            kernels.apply_signs(**step_arguments(weights=weights))
        assert (weights != 1).all()

    @pytest.mark.parametrize(
        ("changes", "kind", "match"),
        [
            ({"packets": torch.zeros(3, 40)}, TypeError, "packets must be torch.uint8"),
            ({"packets": torch.zeros(3, 41, dtype=torch.uint8)}, ValueError, "rows of 41 bytes.*takes 40"),
            ({"gradient": torch.zeros(300).double()}, TypeError, "gradient must be torch.float32 or torch.bfloat16"),
            ({"gradient": torch.zeros(299)}, ValueError, "gradient has 299 elements and payload 300"),
            ({"gradient": torch.zeros(3, 100)}, ValueError, "gradient must be a contiguous vector"),
            ({"gradient": torch.zeros(300, device="meta")}, ValueError, "gradient is on meta"),
            ({"codes": torch.zeros(300)}, TypeError, "codes must be torch.uint8"),
            ({"codes": torch.zeros(301, dtype=torch.uint8)}, ValueError, "codes has 301"),
            ({"table": torch.zeros(255)}, ValueError, "table has 255 entries"),
            ({"payload": torch.zeros(600)[::2]}, ValueError, "payload must be a contiguous vector"),
            ({"payload": torch.zeros(300).half()}, TypeError, "payload must be torch.float32"),
            ({"first": 85}, ValueError, "300 elements from number 85 on do not lie in the 3 rows of 128"),
            ({"first": -1}, ValueError, "from number -1"),
            ({"shard": 127}, ValueError, "whole number of blocks"),
            ({"block_size": 63}, ValueError, "block_size is 63"),
            ({"beta1": 1.1}, ValueError, "beta1 is 1.1"),
            ({"beta1": math.nan}, ValueError, "beta1 is nan"),
            ({"loss_scale": 0.0}, ValueError, "loss_scale is 0.0"),
            ({"loss_scale": math.inf}, ValueError, "loss_scale is inf"),
        ],
    )
    def test_bad_arguments_of_the_payload(self, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match):
            kernels.momentum_payload(**payload_arguments(**changes))

    @pytest.mark.parametrize(
        ("changes", "kind", "match"),
        [
            ({"weights": torch.zeros(300).double()}, TypeError, "weights must be torch.float32 or torch.bfloat16"),
            ({"weights": torch.zeros(20, 15)}, ValueError, "weights must be a contiguous vector"),
            ({"codes": torch.zeros(301, dtype=torch.uint8)}, ValueError, "codes has 301 elements and weights 300"),
            ({"packets": torch.zeros(3, 41, dtype=torch.uint8)}, ValueError, "rows of 41 bytes"),
            ({"first": 85}, ValueError, "from number 85"),
            ({"lr": math.nan}, ValueError, "lr is nan"),
            ({"decay": 1e39}, ValueError, r"decay is 1e\+39"),
        ],
    )
    def test_bad_arguments_of_the_step(self, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
        arguments = step_arguments(**changes)
        before = arguments["weights"].clone()
        with pytest.raises(kind, match=match):
            kernels.apply_signs(**arguments)
        assert torch.equal(arguments["weights"], before)


class TestNoise:
    """Fixed seeds: each result is what it is, and would be improbable if the bits were not as good as random."""

    NUMEL = 1 << 20

    @staticmethod
    def surprise(values: Tensor, choices: int) -> float:
        """Standard deviations by which chi squared of the counts of `values` exceeds that of uniform ones."""
        expected = values.numel() / choices
        squared = ((torch.bincount(values, minlength=choices) - expected) ** 2 / expected).sum().item()
        return (squared - (choices - 1)) / math.sqrt(2 * (choices - 1))

    @pytest.mark.parametrize("seed", [0, 1, -1, 2**40, 2**63 - 1])
    def test_uniform_and_independent_of_neighbours_and_of_the_next_seed(self, seed: int) -> None:
        bits = random_bits(seed, torch.arange(self.NUMEL))
        assert abs(self.surprise(bits, 1 << 16)) < 5
        for lag in (1, 2, 3, 16, 64, 1024, 2048, 4096, 65536):
            for shift in (0, 8):
                early, late = bits[:-lag] >> shift & 0xFF, bits[lag:] >> shift & 0xFF
                assert abs(self.surprise(early * 256 + late, 1 << 16)) < 5, (lag, shift)
        other = random_bits(seed ^ 1, torch.arange(self.NUMEL))
        assert abs(self.surprise(bits ^ other, 1 << 16)) < 5

    def test_repeats_after_two_to_the_33_only(self) -> None:
        numbers = torch.arange(1000)
        assert not torch.equal(random_bits(3, numbers), random_bits(3, numbers + 2**32))
        assert torch.equal(random_bits(3, numbers), random_bits(3, numbers + 2**33))

    @pytest.mark.parametrize(
        ("dtype", "weight"),
        [(torch.bfloat16, 1.0), (torch.bfloat16, -3e-39), (torch.float16, -1.0), (torch.float16, 2e-6)],
    )
    def test_rounding_keeps_the_mean(self, dtype: torch.dtype, weight: float) -> None:
        numel = 1 << 17
        momentum = make_momentum(CPU, 1, numel, 2048, 0, numel)
        momentum.codes.zero_()
        weights = torch.full((numel,), weight).to(dtype)
        for decay in (1.0001, 1.001, 1.0029, 1.02):
            exact = weights[0].double() * decay
            moved = momentum.apply(CPU, weights, 0.0, decay, seed=int(decay * 1e4)).double()
            error = (moved.mean() - exact).abs() / (moved.std() / math.sqrt(numel) + exact.abs() * 2e-7)
            assert moved.unique().numel() == 2
            assert error < 4.5

    def test_small_steps_add_up(self) -> None:
        """A thousand steps of a two-hundredth of the spacing: to nearest, none of them would move a weight."""
        momentum = make_momentum(CPU, 1, 4096, 64, 0, 4096)
        momentum.codes.fill_(1)
        weights = torch.ones(4096).bfloat16()
        step = 2.0**-7 / 200 / momentum.values().abs()[0].item()
        for seed in range(1000):
            kernels.apply_signs(weights, momentum.packets, momentum.codes, 0, 4096, 64, step, 1.0, seed)
        moved = 1 - 1000 * step * momentum.values()
        block = slice(0, 64)
        assert (weights[block].double() - moved[block]).abs().max() < 0.1
        assert (weights[block].double() - moved[block]).mean().abs() < 0.01
