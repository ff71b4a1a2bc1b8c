"""Matrices of which only a layout's blocks exist, packed one after the other: their products and their softmax."""
