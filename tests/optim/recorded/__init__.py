"""The bits that every optimizer gave once, and what replays them: see record.py."""
