"""What the engine reports of a run: losses, timers, scalar files."""
