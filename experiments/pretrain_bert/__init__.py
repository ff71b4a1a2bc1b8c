"""Pretrain a small BERT with two optimizers and draw both: `make train`."""
