"""DeepSpeed's own checkpoints, read without DeepSpeed: their pickles in a process of its own, their layout here."""
