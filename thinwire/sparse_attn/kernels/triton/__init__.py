"""Block-sparse attention on GPUs, compiled by Triton."""
