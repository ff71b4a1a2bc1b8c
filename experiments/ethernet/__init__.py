"""Races over emulated Ethernet: DDP, PowerSGD, 1-bit and 0/1 Adam."""
