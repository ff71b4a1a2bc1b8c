"""Trains a small BERT with Hugging Face's Trainer and 1-bit Adam to tell comments from code in Python's own library.

On one process, or on as many as you like:

    python examples/hugging_face_trainer.py
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import thinwire
from thinwire.hugging_face import Trainer  # instead of transformers'

LENGTH = 32


def lines_of_python() -> list[dict[str, torch.Tensor]]:
    """Lines of the standard library as bytes; the label is whether it is a comment, without its number sign."""
    library = Path(argparse.__file__).parent
    samples = []
    for name in ("argparse", "ast", "calendar", "datetime", "decimal", "inspect", "pickle", "threading", "typing"):
        for line in (library / f"{name}.py").read_text(errors="replace").splitlines():
            text = line.strip().lstrip("# ")
            if len(text) > 20:
                tokens = text.encode()[:LENGTH].ljust(LENGTH, b" ")
                samples.append((line.strip().startswith("#"), torch.tensor(list(tokens))))
    comments = [sample for sample in samples if sample[0]]
    code = random.Random(0).sample([sample for sample in samples if not sample[0]], len(comments))
    return [{"input_ids": tokens, "labels": torch.tensor(int(label))} for label, tokens in comments + code]


def main(folder: str, steps: int = 150) -> Trainer:
    """Train for so many steps, with checkpoints in `folder`."""
    samples = lines_of_python()
    random.Random(1).shuffle(samples)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=256, intermediate_size=128, max_position_embeddings=LENGTH, **sizes)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        max_grad_norm=1.0,  # of the averaged gradient
        logging_steps=steps // 10,
        save_steps=steps,
        average_tokens_across_devices=False,  # BERT's loss is a mean by itself
        report_to="none",
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=samples[256:],
        eval_dataset=samples[:256],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {"freeze_step": steps // 4}),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main("runs/hugging_face_trainer")
    print(trained.evaluate())
    optimizer = trained.optimizer.optimizer  # in what Accelerate puts around it
    print(f"{optimizer.bytes_sent / 1e6:.1f} MB sent, uncompressed {optimizer.bytes_uncompressed / 1e6:.1f} MB")
