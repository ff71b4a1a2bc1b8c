"""BERT with and without progressive layer drop."""
