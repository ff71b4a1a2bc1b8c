"""What cannot be dropped is refused, with the reason: at the call where the layer shows it, else at its first run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.pld.models import WIDTH, Residual, Stack, hugging_face, make_stack
from thinwire.pld import ProgressiveLayerDrop, drop_layers

SCHEDULE = ProgressiveLayerDrop()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_post_ln_of_hugging_face(name: str) -> None:
    with pytest.raises(ValueError, match=r"post-LN: its output.* comes after the residual sum.*pre-LN"):
        drop_layers(hugging_face(name), SCHEDULE)


def test_post_ln_of_torch() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8), 2)
    with pytest.raises(ValueError, match="norm_first=False"):
        drop_layers(encoder, SCHEDULE)
    assert not any("forward" in layer.__dict__ for layer in encoder.layers)


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.branch(hidden))


class Widening(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, hidden], -1)


class Biased(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 1.5, hidden


class Dictionary(nn.Module):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden}


@pytest.mark.parametrize("step", [0, 1000])
@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (PostNorm, ValueError, "normalises what it returns"),
        (lambda: nn.Linear(WIDTH, WIDTH), ValueError, "is not residual"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), ValueError, "normalises|is not residual"),
        (Widening, ValueError, r"shape \(5, 12\) into \(5, 24\)"),
        (Biased, ValueError, r"more than hidden states \(Tensor\)"),
        (Dictionary, TypeError, "returned dict"),
    ],
)
def test_layers_that_show_it_when_run(
    make: Callable[[], nn.Module], error: type[Exception], match: str, step: int
) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Residual(), make()])
    schedule = ProgressiveLayerDrop(0.0, 1.0)
    schedule.update_state(step)
    drop_layers(layers, schedule)
    hidden = torch.randn(5, WIDTH)
    with pytest.raises(error, match=match):
        layers[1](layers[0](hidden))
    assert all(module.training for module in layers.modules())


class Squared(nn.Module):
    """Residual, and not homogeneous: its branch outgrows its input."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.sign * 0.3 * hidden.abs() * hidden


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_residual_layer_that_outgrows_its_input_is_accepted(sign: float) -> None:
    torch.manual_seed(0)
    layer = Squared(sign)
    drop_layers([layer], SCHEDULE)
    layer(torch.randn(5, WIDTH))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Residual()])


def test_layers_that_are_not_found() -> None:
    with pytest.raises(ValueError, match="'layers', 'layer', 'h', 'blocks', 'block'"):
        drop_layers(Towers(), SCHEDULE)
    with pytest.raises(ValueError, match="empty"):
        drop_layers(nn.ModuleList(), SCHEDULE)
    with pytest.raises(TypeError, match="a layer is a module, not int"):
        drop_layers([3], SCHEDULE)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"several stacks of layers: encoder\.layers, decoder\.layers"):
        drop_layers(nn.Transformer(8, 2, 1, 1, 8), SCHEDULE)


def test_shared_layers() -> None:
    layer = Residual()
    with pytest.raises(ValueError, match="layer 2 is the same module"):
        drop_layers([layer, layer], SCHEDULE)


def test_arguments() -> None:
    with pytest.raises(TypeError, match="ProgressiveLayerDrop"):
        drop_layers(make_stack(), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed"):
        drop_layers(make_stack(), SCHEDULE, seed=2**63)
    model: Stack = make_stack()
    drop_layers(model, SCHEDULE)
    with pytest.raises(TypeError, match="got NoneType as its first argument"):
        model.layers[0](mask=None)
