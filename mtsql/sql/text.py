"""SQL as text: repairs and cuts that need no parser, as before execution in the official evaluation."""

from __future__ import annotations

import re
from collections.abc import Collection

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


def same_query(a: str, b: str) -> bool:
    """Whether two texts differ only in white space, comments, final semicolons and letter case.

    Quoted names and texts have to be the same to the letter, and so have words beyond ASCII, whose case
    SQLite does not fold.
    """
    return query_words(a) == query_words(b)


def query_words(sql: str) -> tuple[str, ...]:
    """The words and signs of a query, those in quotes whole: equal for what is the same query."""
    words = [
        piece.lower() if piece.isascii() and piece[0] not in "'\"`[" else piece
        for piece in PIECE.findall(sql)
        if not piece.isspace() and not piece.startswith(("--", "/*"))
    ]
    while words and words[-1] == ";":
        words.pop()
    return tuple(words)


def single_quoted(sql: str, names: Collection[str]) -> str:
    """Double quotes around texts made single, as standard SQL has them; those around `names` stay.

    `names` are in lower case.
    """

    def written(piece: str) -> str:
        if len(piece) < 2 or piece[0] != '"' or piece[1:-1].lower() in names:
            return piece
        inner = piece[1:-1].replace('""', '"').replace("'", "''")
        return f"'{inner}'"

    return "".join(map(written, PIECE.findall(sql)))


def without_distinct(sql: str) -> str:
    """The first statement of `sql` without any word DISTINCT."""
    return "".join(piece for piece in first_statement(sql) if piece.lower() != "distinct")
