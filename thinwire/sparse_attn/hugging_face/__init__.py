"""The plug into Hugging Face models: attention swapped, masks padded, positions extended."""
