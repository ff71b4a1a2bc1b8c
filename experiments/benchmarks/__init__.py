"""Speed and memory of kernels, engine and attention beside named peers."""
