"""Dialogues, schemas, and the processes in which SQL runs."""
