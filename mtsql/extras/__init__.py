"""What the three scripts do not need: other ways in, other ways out, long reproductions."""
