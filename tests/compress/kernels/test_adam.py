"""Adam's step over lists of tensors: the specification against float64 and torch's AdamW, the backends against the
specification, and what is refused."""

import importlib
import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.kernels import emulation
from thinwire.compress.kernels.adam import AdamFactors, AdamStep, plain_adam_step
from thinwire.compress.kernels.loading import execute_adam_step

FACTORS = AdamFactors(0.1, 0.999, 1 - 0.999, 1 - 0.999**3, 1e-8, decay=1 - 1e-3, rate=1e-3 / (1 - 0.9**3))
FORMS = {
    "step": ("gradients", "momenta", "weights"),
    "moments": ("gradients", "momenta"),
    "moments and denominators": ("gradients", "momenta", "denominators"),
    "variances": ("gradients",),
    "variances and denominators": ("gradients", "denominators"),
    "denominators": ("denominators",),
}
LISTS = ("gradients", "momenta", "variances", "weights", "denominators")
SHAPES = [(3, 5), (40,), (0,), (), (1,), (16,), (9, 77), (0, 3), (2049,)]


def tensors(seed: int, shapes: list[Any]) -> dict[str, list[Tensor]]:
    """Gradients, momenta, variances and weights of many magnitudes, zeros, subnormals, infinities, NaN among them."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator) * 10 ** (3 * torch.randn(shape, generator=generator))

    found = {name: [random(shape) for shape in shapes] for name in ("gradients", "momenta", "variances", "weights")}
    found["variances"] = [one.abs() for one in found["variances"]]
    special = torch.tensor([0.0, -0.0, 1e-42, -3e-45, float("inf"), -float("inf"), float("nan"), 3e38])
    for name, some in found.items():
        for one in (one.view(-1) for one in some if one.numel() > 30):
            places = torch.randint(one.numel(), (16,), generator=generator)
            one[places] = special.repeat(2).abs() if name == "variances" else special.repeat(2)
    for name in ("gradients", "variances"):
        for one in found[name]:
            one.view(-1)[:2] = 0.0
    return found


def call_of(form: str, factors: AdamFactors, given: dict[str, list[Tensor]]) -> AdamStep:
    """A step of copies; denominators go over the gradients, or the variances."""
    own = {name: [one.clone() for one in some] for name, some in given.items()}
    names = FORMS[form]
    own["denominators"] = own["gradients" if "gradients" in names else "variances"]
    return AdamStep(factors, *(own[name] if name in (*names, "variances") else None for name in LISTS))  # type: ignore[arg-type]


def assert_same(found: AdamStep, wanted: AdamStep) -> None:
    for some, others in zip(found.lists, wanted.lists, strict=True):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(one.signbit() | one.isnan(), other.signbit() | other.isnan())


@pytest.fixture(params=["cpu", "emulated cuda"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "cpu":
        pytest.importorskip("numba")
        return importlib.import_module("thinwire.compress.kernels.cpu.backend")
    if not emulation.COMPILER:
        pytest.skip("g++ is not installed")
    return emulation.BACKEND


@pytest.mark.parametrize("form", FORMS)
def test_backends_have_the_bits_of_the_specification(backend: ModuleType, form: str) -> None:
    gains = (0.1, 0.5, 0.7, 1.0, 0.0)
    for number, (gain, inside) in enumerate(zip(gains, itertools.cycle([False, True]))):
        factors = replace(FACTORS, gain=gain, eps_inside_root=inside, holds_zero=gain > 0.1)
        given = tensors(number, SHAPES)
        found, wanted = call_of(form, factors, given), call_of(form, factors, given)
        backend.adam_step(found)
        plain_adam_step(wanted)
        assert_same(found, wanted)


def test_threads_share_it_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    backend = importlib.import_module("thinwire.compress.kernels.cpu.backend")
    monkeypatch.setattr(backend, "_ELEMENTS_PER_THREAD", 4096)
    monkeypatch.setattr(backend._workers, "threads", lambda: 3)
    given = tensors(0, [(5000,), (7,), (0,), (12_000,), (33,)])
    found, wanted = call_of("step", FACTORS, given), call_of("step", FACTORS, given)
    importlib.import_module("thinwire.compress.kernels.cpu.backend").adam_step(found)
    plain_adam_step(wanted)
    assert_same(found, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_what_no_kernel_takes_has_the_same_bits(form: str) -> None:
    """Among tensors that it does: of other layouts, wherever they begin."""
    given = tensors(3, SHAPES)
    call, wanted = call_of(form, FACTORS, given), call_of(form, FACTORS, given)
    for some in {id(some): some for some in call.lists}.values():
        some[6] = some[6].T.contiguous().T  # type: ignore[index]
        some[8] = torch.cat([some[8], some[8]])[1:2050].copy_(some[8])  # type: ignore[index]
    execute_adam_step(call)
    plain_adam_step(wanted)
    assert not call.variances[6].is_contiguous()
    assert_same(call, wanted)


def test_versions_count_what_is_written() -> None:
    given = tensors(0, [(3,)])
    weight = torch.nn.Parameter(given["weights"][0])
    lists = (given["momenta"], given["variances"], [weight])
    before = [one._version for some in lists for one in some]
    with torch.no_grad():
        execute_adam_step(
            AdamStep(FACTORS, gradients=given["gradients"], momenta=lists[0], variances=lists[1], weights=lists[2])
        )
    assert all(one._version > old for (one,), old in zip(lists, before, strict=True))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("gain", [0.1, 0.7])
def test_the_specification_is_float64s_within_rounding(gain: float, inside: bool) -> None:
    """Each of at most four roundings is off by half a unit in the last place, 2^-24."""
    factors = replace(FACTORS, gain=gain, eps_inside_root=inside)
    generator = torch.Generator().manual_seed(0)
    g, m, v, w = (torch.rand(1000, generator=generator) + 0.5 for _ in range(4))
    narrow = AdamStep(factors, [g.clone()], [m.clone()], [v.clone()], [w.clone()])
    wide = AdamStep(factors, [g.double()], [m.double()], [v.double()], [w.double()])
    m, v = m.double() + gain * (g.double() - m.double()), 0.999 * v.double() + (1 - 0.999) * g.double() ** 2
    c = factors.correction
    d = (v / c + 1e-8).sqrt() if inside else v.sqrt() / c + 1e-8
    w = factors.decay * w.double() - factors.rate * m / d
    for call, bound in ((narrow, 4 * 2**-24), (wide, 4 * 2**-53)):
        plain_adam_step(call)
        for found, wanted in zip((call.momenta, call.variances, call.weights), (m, v, w), strict=True):
            assert found is not None
            torch.testing.assert_close(found[0].double(), wanted, rtol=bound, atol=0)


def test_roots_are_rounded_once() -> None:
    """Squares of floats of 12 bits, exact; and the neighbours of squares, whose roots lie next to a tie."""
    exact = torch.arange(1.0, 4097.0)
    halves = exact.double() + 0.5
    near = torch.cat([(halves**2 * (1 + sign * 2.0**-23)).float() for sign in (-1, 1)])
    values = torch.cat([exact**2, near, torch.tensor([1e-45, 1e-38, 3.4e38])])
    factors = AdamFactors(0.0, 1.0, 0.0)
    found = torch.empty_like(values)
    execute_adam_step(AdamStep(factors, gradients=None, momenta=None, variances=[values], denominators=[found]))
    assert torch.equal(found[:4096], exact)
    error = found.double() - values.double().sqrt()
    assert bool((error.abs() <= (torch.nextafter(found, torch.tensor(float("inf"))) - found).double() / 2).all())


def test_nothing_to_do_is_done() -> None:
    execute_adam_step(AdamStep(FACTORS, gradients=[], momenta=[], variances=[], weights=[]))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weights": [torch.zeros(3)], "denominators": [torch.zeros(3)]}, "one of the two"),
        ({"weights": [torch.zeros(3)], "momenta": None}, "weights are moved by momenta"),
        ({"gradients": None, "momenta": None}, "denominators are all that a step writes"),
        ({"gradients": None, "denominators": [torch.zeros(3)]}, "denominators are all that a step writes"),
        ({"momenta": [torch.zeros(4)]}, r"lists of \[4\] elements beside variances of \[3\]"),
        ({"momenta": []}, r"lists of \[\] elements"),
        ({"momenta": [torch.zeros(3, device="meta")]}, "use one device"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], says: str) -> None:
    given = {"gradients": [torch.zeros(3)], "momenta": [torch.zeros(3)], "variances": [torch.zeros(3)]}
    with pytest.raises(ValueError, match=says):
        execute_adam_step(AdamStep(FACTORS, **(given | changed)))
