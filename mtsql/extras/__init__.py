"""What is used beside the core, which imports nothing of this."""
