"""What a job feeds its model: loaders, their order, and batch sizes."""
