"""Attention by length: time and memory, dense and block-sparse."""
