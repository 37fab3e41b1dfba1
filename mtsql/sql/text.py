"""SQL as text: repairs and cuts that need no parser, as before execution in the official evaluation."""

from __future__ import annotations

import re

PIECE = re.compile(
    r"""'(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)
    | --[^\n]* | /\*.*?(?:\*/|\Z) | \w+ | .""",
    re.VERBOSE | re.DOTALL,
)
SPLIT_OPERATOR = re.compile("([<>!]) =")


def join_operators(sql: str) -> str:
    """Writes "> =", "< =" and "! =" as one operator."""
    return SPLIT_OPERATOR.sub(r"\1=", sql)


def first_statement(sql: str) -> list[str]:
    """The pieces of the first statement: words, quoted texts, comments, single characters."""
    pieces = PIECE.findall(sql)
    return pieces[: pieces.index(";")] if ";" in pieces else pieces


def without_distinct(sql: str) -> str:
    """The first statement of `sql` without any word DISTINCT."""
    return "".join(piece for piece in first_statement(sql) if piece.lower() != "distinct")
