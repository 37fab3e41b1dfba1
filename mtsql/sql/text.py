"""SQL as text: repairs and cuts that need no parser, as before execution in the official evaluation."""

from __future__ import annotations

import re
from collections.abc import Collection

from mtsql.data.names import folded

PIECE = re.compile(
    r"""'(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)
    | --[^\n]* | /\*.*?(?:\*/|\Z) | \w+ | .""",
    re.VERBOSE | re.DOTALL,
)
SPLIT_OPERATOR = re.compile(
    r"""('(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)) | ([<>!])[ ]=""", re.VERBOSE
)


def join_operators(sql: str) -> str:
    """Writes "> =", "< =" and "! =" as one operator, but in quotes."""
    return SPLIT_OPERATOR.sub(lambda found: found[1] or f"{found[2]}=", sql)


def first_statement(sql: str) -> list[str]:
    """The pieces of the first statement: words, quoted texts, comments, single characters."""
    pieces = PIECE.findall(sql)
    return pieces[: pieces.index(";")] if ";" in pieces else pieces


def same_query(a: str, b: str) -> bool:
    """Whether two texts differ only in white space, comments, final semicolons and letter case.

    Quoted names and texts have to be the same to the letter, and so have letters beyond ASCII, whose case
    SQLite does not fold.
    """
    return query_words(a) == query_words(b)


def query_words(sql: str) -> tuple[str, ...]:
    """The words and signs of a query, those in quotes whole: equal for what is the same query."""
    words = [
        piece if piece[0] in "'\"`[" else folded(piece) for piece in PIECE.findall(sql) if not is_blank(piece)
    ]
    while words and words[-1] == ";":
        words.pop()
    return tuple(words)


def single_quoted(sql: str, names: Collection[str]) -> str:
    """Double quotes around texts made single, as standard SQL has them; those around `names` stay.

    `names` are `folded`.
    """

    def written(piece: str) -> str:
        if len(piece) < 2 or piece[0] != '"' or folded(piece[1:-1]) in names:
            return piece
        inner = piece[1:-1].replace('""', '"').replace("'", "''")
        return f"'{inner}'"

    return "".join(map(written, PIECE.findall(sql)))


def without_distinct(sql: str) -> str:
    """The first statement of `sql` without the word DISTINCT, but in the operator IS DISTINCT FROM."""
    kept, before = [], ""
    for piece in first_statement(sql):
        word = piece.lower()
        if word == "distinct" and before not in ("is", "is not"):
            continue
        kept.append(piece)
        if not is_blank(piece):
            before = "is not" if (before, word) == ("is", "not") else word
    return "".join(kept)


def is_blank(piece: str) -> bool:
    """Whether a piece is white space or a comment."""
    return piece.isspace() or piece.startswith(("--", "/*"))
