"""Ethernet clusters that experiments make for themselves, on one machine, out of Linux network namespaces."""
