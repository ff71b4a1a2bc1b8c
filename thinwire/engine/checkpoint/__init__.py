"""Checkpoints that survive a kill at any moment: safetensors files with a manifest of checksums, published whole,
verified before use, and read by any number of ranks."""
