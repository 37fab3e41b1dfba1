"""What a user got wrong, and how a terminal may show it."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input; the message is one sentence for the user, who gets it with exit code 2.

    Any other exception but MissingDatabase is a defect, ours or a student's, and keeps its traceback.
    """


class MissingDatabase(FileNotFoundError):
    """A database file is not there, or is no longer; a command ends with that sentence and exit code 2."""


def printable(text: str) -> str:
    """The text with control characters made visible, so that no database or server steers the terminal."""
    keep = "\n\t"
    return "".join(c if c in keep or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
