"""Optimizers that torch lacks or that need whole parameters, uncompressed: torch optimizers, which ShardedOptimizer
shards."""
