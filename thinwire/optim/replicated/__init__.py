"""The home of optimizers whose state every rank holds."""
