"""Parameters by DeepSpeed's calls: built shard by shard, whole for a while, and their state read and written."""
