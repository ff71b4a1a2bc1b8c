"""Losses by ZeRO stage, sharded or not, resumed or not."""
