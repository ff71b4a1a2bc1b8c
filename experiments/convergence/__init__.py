"""1-bit optimizers beside their exact parents, over seeds."""
