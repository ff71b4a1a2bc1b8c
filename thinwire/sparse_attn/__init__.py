"""Attention over the blocks of a layout: ten times longer sequences in the same memory, on CPU and GPU."""
