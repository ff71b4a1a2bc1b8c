"""The home of optimizers whose state is divided among the ranks."""
