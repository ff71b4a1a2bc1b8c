"""Experiments: each module reproduces one published claim and writes its numbers and its picture."""
