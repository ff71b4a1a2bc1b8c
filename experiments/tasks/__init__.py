"""What is learned: text, digits, models."""
