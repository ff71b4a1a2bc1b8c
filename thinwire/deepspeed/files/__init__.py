"""DeepSpeed's own checkpoints, read without DeepSpeed, and weights in the form of its zero_to_fp32."""
