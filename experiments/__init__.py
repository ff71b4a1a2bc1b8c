"""Experiments: a folder a published claim, which writes its numbers and its picture; what they share stands below."""
