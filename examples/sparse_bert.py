"""BERT on long text: attention over blocks, so that 2,048 characters cost what 512 do with dense attention.

    python examples/sparse_bert.py --text book.txt
    torchrun --nproc-per-node 2 examples/sparse_bert.py --text book.txt

What differs from a dense BERT: the line with `sparsify`. Without `--text` it reads Python's own documentation.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import thinwire
from thinwire.sparse_attn import BigBird, sparsify

MASK, CHARACTERS = 128, 129
"""The character that stands for a hidden one, and how many there are: ASCII and it."""


def masked(text: Tensor, length: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four passages [4, length] of characters, of which a seventh is hidden; and the hidden ones, -100 elsewhere."""
    starts = torch.randint(len(text) - length, (4, 1), generator=draws)
    characters = text[starts + torch.arange(length)]
    hidden = torch.rand(characters.shape, generator=draws) < 0.15
    return characters.masked_fill(hidden, MASK), characters.masked_fill(~hidden, -100)


def main() -> None:
    """Train, save, and say how much of dense attention's work is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file of text to learn")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=2048, help="characters a passage")
    parser.add_argument("--save", type=Path, help="a folder for the trained model")
    arguments = parser.parse_args()
    words = arguments.text.read_text() if arguments.text else "".join(pydoc_data.topics.topics.values())
    text = torch.tensor(list(words.encode("ascii", "ignore")))

    comm = thinwire.comm.init()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForMaskedLM(BertConfig(vocab_size=CHARACTERS, **sizes))
    layout = BigBird(num_heads=4, block=16)
    sparsify(model, layout, max_positions=arguments.length)  # before the optimizer: the table of positions grows
    optimizer = thinwire.OneBitAdam(model.named_parameters(), lr=2e-3, freeze_step=arguments.steps // 5, comm=comm)

    draws = torch.Generator().manual_seed(comm.rank)
    for step in range(arguments.steps):
        characters, hidden = masked(text, arguments.length, draws)
        loss = model(input_ids=characters, labels=hidden).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and (step == 0 or (step + 1) % max(1, arguments.steps // 4) == 0):
            print(f"step {step + 1:4}  loss {loss.item():.3f}")
    if comm.rank == 0:
        share = layout.make_layout(arguments.length).float().mean().item()
        print(f"attention computed {share:.1%} of all pairs of characters")
        if arguments.save:
            model.save_pretrained(arguments.save)  # the layout goes with it


if __name__ == "__main__":
    main()
