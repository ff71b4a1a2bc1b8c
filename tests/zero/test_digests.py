"""A digest is the same for the same bits and another for a single one that differs, with a compiler and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.zero import gradient_seal
from thinwire.zero.gradient_seal import digest_of


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(gradient_seal, "_compiled", lambda: None)
    else:
        assert gradient_seal._compiled() is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(1,), (), (7,), (3, 5), (64, 33), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_one_bit_makes_another_digest(dtype: torch.dtype, shape: tuple[int, ...], first: int) -> None:
    numel = torch.Size(shape).numel()
    whole = (100 * torch.randn(first + numel + 2)).to(dtype)
    tensor = whole[first : first + numel].view(shape)
    before = digest_of(tensor)
    assert before == digest_of(tensor)
    whole[:first], whole[first + numel :] = 0, 0
    assert before == digest_of(tensor), "only the tensor counts"
    bits = tensor.view(-1).view(torch.uint8)
    place = int(torch.randint(len(bits), ()))
    bits[place] ^= 1 << int(torch.randint(8, ()))
    assert before != digest_of(tensor)


def test_every_byte_counts() -> None:
    tensor = torch.randn(9)
    bits = tensor.view(torch.uint8)
    found = [int(digest_of(tensor))]
    for place in range(len(bits)):
        bits[place] ^= 1
        found.append(int(digest_of(tensor)))
        bits[place] ^= 1
    assert found.count(found[0]) == 1


@pytest.mark.parametrize("tensor", [torch.randn(4, 6).T, torch.randn(0), torch.randn(5, requires_grad=True)])
def test_other_forms(tensor: Tensor) -> None:
    with torch.no_grad():
        before = digest_of(tensor)
        assert before == digest_of(tensor)
        if tensor.numel():
            tensor[0] += 1
            assert before != digest_of(tensor)
