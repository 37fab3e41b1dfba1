"""A dialogue with a trained agent over one's own database."""
