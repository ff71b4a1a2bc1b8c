"""BERT on long documents: sparse, dense and truncated."""
