"""SQL as text: what needs no parser, most of it as the official evaluation does it before execution."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from mtsql.data.names import folded

QUOTED = r"""'(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)"""
PIECE = re.compile(rf"{QUOTED} | --[^\n]* | /\*.*?(?:\*/|\Z) | \w+ | .", re.VERBOSE | re.DOTALL)
SPLIT_OPERATOR = re.compile(rf"({QUOTED}) | ([<>!])[ ]=", re.VERBOSE)
VALUE = re.compile(
    r"""'(?:''|[^'])*' | "(?:""|[^"])*" | (?<![\w\].)])-?(?:\d+(?:\.\d+)?|\.\d+)(?![\w.])""", re.VERBOSE
)
MAX_ALTERNATIVES = 10_000


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


def with_gold_values(gold_sql: str, pred_sql: str) -> Iterator[str]:
    """The prediction, then every assignment of the gold query's values to its values.

    The official evaluation tries all assignments (exec_eval.py, plug_value), here the first
    MAX_ALTERNATIVES are. A value is a number or a quoted text, wherever it stands, LIMIT included.
    """
    yield pred_sql
    pred = "".join(first_statement(pred_sql))
    values = sorted(set(VALUE.findall(gold_sql)))
    between = VALUE.split(pred)
    for chosen in islice(product(values, repeat=len(between) - 1), MAX_ALTERNATIVES):
        yield "".join(text + value for text, value in zip(between, (*chosen, ""), strict=True))


def official_prediction(sql: str) -> str:
    """A prediction as the official evaluation rewrites it first: "value" becomes "1" everywhere."""
    return sql.replace("value", "1")
