"""The Triton kernels on a GPU: what the interpreter's tests say, and 16-bit dtypes on tensor cores."""

import pytest
import torch

from tests.pairwise import pairwise
from thinwire.sparse_attn import BigBird, Fixed, block_sparse_attention, reference_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize(("block", "width", "dtype"), pairwise((16, 32, 64, 128), (40, 64, 128), [*TOLERANCES]))
def test_values_and_gradients(block, width, dtype) -> None:
    for layout in (BigBird(2, block, attention="unidirectional"), Fixed(2, block)):
        shape = (2, 2, block * 6 + 5, width)
        q, k, v, d_out = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
        padding = torch.rand(2, shape[2], device="cuda") > 0.2
        inputs = [one.clone().requires_grad_() for one in (q, k, v)]
        torch.manual_seed(7)
        out = block_sparse_attention(*inputs, layout, key_padding_mask=padding, dropout_p=0.1)
        found = torch.autograd.grad(out, inputs, d_out)
        exact = [one.double().requires_grad_() for one in (q, k, v)]
        torch.manual_seed(7)
        expected = reference_attention(*exact, layout, key_padding_mask=padding, dropout_p=0.1)
        wanted = torch.autograd.grad(expected, exact, d_out.double())
        for one, other in zip((out, *found), (expected, *wanted), strict=True):
            assert float((one.double() - other).norm() / other.norm()) < TOLERANCES[dtype]
