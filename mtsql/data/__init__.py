"""Dialogues in: SParC-format files, schemas, and the embedded toy benchmark."""
