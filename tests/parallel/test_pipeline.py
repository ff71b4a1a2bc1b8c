"""How models are cut into stages; how these train: test_real_ranks.py."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.refusing import refused
from thinwire.compress import Header
from thinwire.parallel.compressed_stage import activation_codec, pack, unpack
from thinwire.parallel.splitting import split_model


def test_a_head_takes_time_and_an_embedding_none() -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=1000, n_positions=8, **ends))
    blocks = [[len(part.model.transformer.h) for part in split_model(model, 2, by)] for by in ("parameters", "time")]
    assert blocks == [[2, 2], [3, 1]]
    refused(ValueError, "nn.Sequential is not known", split_model, nn.Sequential(nn.Linear(1, 1)), 1, "time")


@pytest.mark.parametrize(("stages", "sizes"), [(1, [31]), (2, [16, 15]), (3, [11, 10, 10]), (4, [11, 5, 5, 10])])
def test_the_largest_stage_is_as_small_as_can_be(stages: int, sizes: list[int]) -> None:
    layers = [nn.Linear(width, 1, bias=False) for width in (11, 5, 5, 10)]
    parts = split_model(nn.Sequential(*layers), stages, "parameters")
    assert [sum(one.numel() for one in part.parameters()) for part in parts] == sizes
    assert [name for part in parts for name, _ in part.named_parameters()] == [f"{n}.weight" for n in range(4)]
    assert torch.equal(parts[-1][-1].weight, layers[-1].weight)


def test_a_stage_begins_with_parameters() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(4, 4), nn.ReLU(inplace=True)]
    parts = split_model(nn.Sequential(*layers), 2, "parameters")
    assert [[*part._modules] for part in parts] == [["0", "1", "2"], ["3", "4"]]


def arrived(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What a packet brings of it, and the packet's bytes."""
    codec = activation_codec(name)
    packet = pack(codec, tensor, Header(codec.identifier, codec.block_size, 0, 0))
    output = torch.empty_like(tensor)
    unpack(codec, packet, output)
    return output, packet.numel()


@pytest.mark.parametrize("shape", [(4, 50, 96), (200, 96), (96, 200), (3, 7, 333)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_rounds_what_leading_directions_leave(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    columns = shape[-1]
    rows = torch.Size(shape).numel() // columns
    directions = min(12, rows * columns // (8 * (rows + columns)))
    random = torch.Generator().manual_seed(rows)
    strong = torch.randn(rows, 2, generator=random) @ torch.randn(2, columns, generator=random)
    weak = 0.01 * torch.randn(rows, columns, generator=random)
    given = (strong + weak).view(shape).to(dtype)
    found, nbytes = arrived("int4", given)
    assert nbytes == 16 + -(-given.numel() // 64) * (4 + 32) + 2 * directions * (rows + columns)
    # A matrix of one column is too small for a direction.
    alone, _ = arrived("int4", given.reshape(-1, 1))
    assert (found - given).norm() < 0.3 * (alone.view(shape) - given).norm()


def test_what_is_not_finite_arrives_so_beside_directions() -> None:
    for bad in (float("nan"), float("inf")):
        given = torch.randn(64, 48)
        given[5, 7] = bad
        found, _ = arrived("int4", given)
        assert not found[5, 7].isfinite()
        assert found[:4].isfinite().all()
    zeros, _ = arrived("int4", torch.zeros(64, 48))
    assert zeros.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e18, 1e37])
def test_what_directions_overflow_in_arrives(scale: float, dtype: torch.dtype) -> None:
    given = (torch.randn(64, 48) * scale).to(dtype)
    found, _ = arrived("int4", given)
    assert (found.double() - given.double()).norm() < 0.2 * given.double().norm()


def test_directions_are_of_one_dtype_and_device_whatever_the_defaults_are() -> None:
    given = torch.randn(64, 45)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            packet = pack(codec := activation_codec("int4"), given, Header(codec.identifier, codec.block_size, 0, 0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(packet, pack(codec, given, Header(codec.identifier, codec.block_size, 0, 0)))
