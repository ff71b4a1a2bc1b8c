"""What the engine does to a model before it trains: precision, checkpointed activations, plugs."""
