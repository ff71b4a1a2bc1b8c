"""1-bit Lion beside exact Lion and AdamW, each at its own best rate."""
