"""Layouts, by which blocks of queries attend blocks of keys: by name, their configuration and their pictures."""
