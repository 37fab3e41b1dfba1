"""Model, losses, advantages, selection, checkpoints."""
