"""Names of tables and columns as SQLite reads them: which are equal, and what needs quotes."""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase

from mtsql.data.sql_worker import quoted

RESERVED = frozenset(
    """add all alter and as autoincrement between case cast check collate commit constraint create
    current_date current_time current_timestamp default deferrable delete distinct drop else escape
    except exists foreign from group having in index insert intersect into is isnull join limit not
    nothing notnull null on or order primary raise references returning select set table then to
    transaction union unique update using values when where""".split()
)
LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
BARE = re.compile(r"[^\W\d][\w$]*|_[\w$]*")


def folded(name: str) -> str:
    """The name as SQLite compares it: in lower case as far as its letters are ASCII."""
    return name.translate(LOWER)


def written(name: str) -> str:
    """The name as a query has to write it: in quotes only where SQLite needs them."""
    return name if BARE.fullmatch(name) and name.lower() not in RESERVED else quoted(name)
