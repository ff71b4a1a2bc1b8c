"""Small models of residual layers that count their runs, and Hugging Face models small enough for a test."""

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.pld import ProgressiveLayerDrop

WIDTH = 12


class Residual(nn.Module):
    """A pre-LN layer that counts its forwards and backwards."""

    def __init__(self, width: int = WIDTH, in_tuple: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.in_tuple = in_tuple
        self.forwards = self.backwards = 0

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        self.forwards += 1
        branch = self.down(torch.tanh(self.up(self.norm(hidden))))
        if branch.requires_grad:
            branch.register_hook(self._count)
        output = hidden + branch if mask is None else hidden + branch * mask
        return (output, None) if self.in_tuple else output

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


class Stack(nn.Module):
    """Embedding, residual layers, head: one forward to a scalar."""

    def __init__(self, layers: int = 4, in_tuple: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([Residual(in_tuple=in_tuple) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden)


def make_stack(seed: int = 0, layers: int = 4, in_tuple: bool = False) -> Stack:
    """The same weights for the same seed."""
    model = Stack(layers, in_tuple)
    generator = torch.Generator().manual_seed(seed)  # not the global one, which ranks on threads share
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def settled(theta: float = 0.5, step: int = 1) -> ProgressiveLayerDrop:
    """A schedule that has fallen to theta."""
    schedule = ProgressiveLayerDrop(theta, 1000.0)
    schedule.update_state(step)
    return schedule


def batch(*key: int, rows: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(rows, 5, generator=generator)


_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_MODELS = {
    "gpt2": ("GPT2", "LMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}),
    "llama": ("Llama", "ForCausalLM", _SMALL | {"num_key_value_heads": 2}),
    "roberta_prelayernorm": ("RobertaPreLayerNorm", "ForMaskedLM", _SMALL),
    "bert": ("Bert", "ForMaskedLM", _SMALL),
    "roberta": ("Roberta", "ForMaskedLM", _SMALL),
    "distilbert": ("DistilBert", "ForMaskedLM", {"vocab_size": 40, "dim": 16, "n_layers": 3, "n_heads": 2}),
}


def hugging_face(name: str) -> nn.Module:
    import transformers  # takes long to import, and processes that use only the stacks are many

    torch.manual_seed(3)
    kind, head, sizes = _MODELS[name]
    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))
