"""LoRA with peft, Hugging Face's Trainer and 1-bit Adam: a small BERT has learnt which of two words a row has more of,
and adapters teach it the same of two other words. Of the second training only the adapters are sent and saved.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import thinwire
from thinwire.hugging_face import Trainer  # instead of transformers'

LENGTH = 15


def rows(number: int, first: int, second: int) -> list[dict[str, Tensor]]:
    """Rows of the words 0 to 3; the label is whether the second of two is there more often than the first."""
    tokens = torch.randint(4, (number, LENGTH), generator=torch.Generator().manual_seed(first))
    excess = (tokens == second).sum(dim=1) - (tokens == first).sum(dim=1)
    return [
        {"input_ids": row, "labels": (more > 0).long()} for row, more in zip(tokens, excess, strict=True) if more != 0
    ]


def accuracy(found: Any) -> dict[str, float]:
    """Of predictions, for the Trainer."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def train(model: nn.Module, samples: list[dict[str, Tensor]], folder: str, steps: int) -> Trainer:
    """Train what of the model requires gradients."""
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=5e-3 if hasattr(model, "peft_config") else 2e-3,
        logging_steps=steps // 4,
        save_steps=steps,
        average_tokens_across_devices=False,  # BERT's loss is a mean by itself
        report_to="none",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=samples[256:],
        eval_dataset=samples[:256],
        compute_metrics=accuracy,
        # One of LoRA's two matrices begins at zero, the other's gradient with it: compression has to wait for both.
        optimizer_cls_and_kwargs=(thinwire.OneBitAdam, {"freeze_step": steps // 3}),
    )
    trainer.train()
    return trainer


def main(folder: str, steps: int = 150) -> Trainer:
    """Train the whole on the words 0 and 1, then adapters on 2 and 3; the second Trainer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=4, intermediate_size=64, max_position_embeddings=LENGTH, **sizes)
    model = BertForSequenceClassification(config)
    train(model, rows(4000, 0, 1), f"{folder}/whole", steps)
    adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules="all-linear")
    return train(get_peft_model(model, adapters), rows(4000, 2, 3), f"{folder}/adapters", steps)


if __name__ == "__main__":
    trained = main("runs/lora")
    print(trained.evaluate())
    trained.model.print_trainable_parameters()
