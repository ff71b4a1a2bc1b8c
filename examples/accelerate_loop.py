"""A loop with Hugging Face's Accelerate and 1-bit Adam: a small BERT learns which of two words was said more often.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

What differs from Accelerate with torch.optim.AdamW: the optimizer's class, and its import.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import thinwire

LENGTH = 15


def sentences(number: int) -> list[dict[str, Tensor]]:
    """Rows of two tokens, and which of them is in the majority."""
    rows = torch.randint(2, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (2 * row.sum() > LENGTH).long()} for row in rows]


def main(steps: int = 200) -> Any:
    """Train for so many steps, and return the optimizer."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=2, intermediate_size=64, max_position_embeddings=LENGTH, **sizes)
    model: torch.nn.Module = BertForSequenceClassification(config)
    # Compression begins after half of these few steps, once the variance has settled.
    optimizer = thinwire.OneBitAdam(model.named_parameters(), lr=2e-3, freeze_step=steps // 2)
    loader = DataLoader(sentences(16 * 2 * steps * accelerator.num_processes), batch_size=16)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
        losses.append(loss.item())
        if len(losses) % (steps // 2) == 0:
            recent = losses[-(steps // 2) :]
            accelerator.print(f"step {len(losses) // 2:4}  loss {sum(recent) / len(recent):.3f}")
    accelerator.print(
        f"{optimizer.bytes_sent / 1e6:.1f} MB sent, uncompressed {optimizer.bytes_uncompressed / 1e6:.1f} MB"
    )
    return optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
