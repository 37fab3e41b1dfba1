"""What a user got wrong."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input; the message is one sentence for the user, who gets it with exit code 2.

    Any other exception but MissingDatabase is a defect, ours or a student's, and keeps its traceback.
    """


class MissingDatabase(FileNotFoundError):
    """A database file is not there, or is no longer; a command ends with that sentence and exit code 2."""
