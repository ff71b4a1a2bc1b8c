"""Hugging Face's Trainer with 1-bit Adam beside the unchanged Trainer with AdamW and DDP, on text classification."""
