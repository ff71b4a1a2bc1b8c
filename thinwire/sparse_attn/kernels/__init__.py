"""Fused kernels of block-sparse attention, one module a device, alike in what they take: `cpu`, `triton_attention`."""
