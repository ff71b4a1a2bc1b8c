"""Which blocks of queries attend which blocks of keys: the layouts by name, their configuration and their pictures."""
