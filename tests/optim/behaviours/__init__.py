"""What holds of every optimizer, wherever its state lives: importing a module of this folder notes its behaviours."""

from tests.optim.behaviours import parameters, refusals, rounds, scaling, state
from tests.optim.behaviours.behaviour import SIZES, WARNS, Body

__all__ = ["SIZES", "WARNS", "Body", "parameters", "refusals", "rounds", "scaling", "state"]
