"""What is used beside the three scripts: they import nothing of this."""
