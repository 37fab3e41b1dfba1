"""Small commands beside the three scripts."""
