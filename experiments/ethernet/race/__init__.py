"""The race over slow networks: contenders, what is measured of them, what it says, and its pictures."""
