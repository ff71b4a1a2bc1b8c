"""DeepSpeed's dialect of configurations, put into the engine's words before anything is checked."""
