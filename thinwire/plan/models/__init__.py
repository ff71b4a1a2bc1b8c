"""Which model: its shapes by name, by configuration or by its parameter count."""
