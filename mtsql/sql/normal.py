"""One way to write a query: what the policy is shown and taught, so that it need not guess how to spell it.

Data sets write the same query in many ways: table names in another case than the schema's, blanks around
every sign, texts in double quotes. A policy that is trained on all of them spends its loss on a choice
without meaning. Verdicts are given on the queries as they are: no score depends on this form.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mtsql.data.datasets import Example
from mtsql.data.names import RESERVED, folded
from mtsql.data.schema import Schema
from mtsql.sql.execute import as_executed
from mtsql.sql.text import PIECE, is_blank

KEYWORDS = RESERVED | set(
    "asc by cross desc end full glob inner left like natural offset outer right with".split()
)
FUNCTIONS = frozenset("avg count max min sum".split())
ALIAS = re.compile(r"t\d+", re.IGNORECASE)
LAST_WORD = re.compile(r"\w+$")
QUOTES = "'\"`["
NO_BLANK_AFTER, NO_BLANK_BEFORE = "(.", "),.;"
SIGNS = "<>=!|&"  # those of an operator stay together,
ARITHMETIC = "+-/%~"  # and these as they were: a sign may belong to its number


def in_normal_form(example: Example, schema: Schema) -> Example:
    """The question with its earlier SQL in normal form; its own gold SQL stays as the data set has it."""
    history = tuple(
        turn if turn.sql is None else replace(turn, sql=normal_form(turn.sql, schema))
        for turn in example.history
    )
    return replace(example, history=history)


def normal_form(sql: str, schema: Schema) -> str:
    """`sql` as it runs, with keywords in capitals, the schema's names as the schema has them, single
    blanks, single quotes.

    Aggregate functions and aliases such as t1 are in small letters. Comments and the last
    semicolon go; of what is in quotes only the quotes change, and only around what is no name. A query with
    an open quote stays as it is.
    """
    sql = as_executed(sql, keep_distinct=True)
    pieces = PIECE.findall(sql)
    if "'" in pieces or '"' in pieces:
        return sql
    mentioned = {folded(piece).strip('"') for piece in pieces}
    tables = sorted(schema.tables, key=lambda table: folded(table.name) in mentioned)  # whose names come last
    names = {folded(column): column for table in tables for column, _ in table.columns}
    names |= {folded(table.name): table.name for table in tables}
    words = [piece for piece in pieces if not is_blank(piece)]
    following = iter([*words[1:], ""])
    written, separated = "", False
    for piece in pieces:
        if is_blank(piece):
            separated = True
            continue
        if written and _blank(written, piece, separated):
            written += " "
        written += _spelt(piece, names, called=next(following) == "(")
        separated = False
    return written.rstrip("; ")


def _spelt(piece: str, names: dict[str, str], called: bool) -> str:
    """A word as the normal form has it; a bracket behind it tells a function from a column."""
    word = folded(piece)
    if word in FUNCTIONS and called:
        return word
    if word in KEYWORDS:
        return piece.upper()
    if piece[0] == '"' and folded(piece[1:-1]) not in names:
        inner = piece[1:-1].replace('""', '"').replace("'", "''")
        return f"'{inner}'"
    if piece[0] in QUOTES:
        return piece
    return names.get(word) or (word if ALIAS.fullmatch(piece) else piece)


def _blank(written: str, piece: str, separated: bool) -> bool:
    """Whether a blank stands between what is written and the next piece; `separated` if there was one."""
    last = written[-1]
    if piece in NO_BLANK_BEFORE or last in NO_BLANK_AFTER:
        return False
    if piece == "(":  # of a function's arguments, or of anything else
        word = LAST_WORD.search(written)
        return word is None or word[0].lower() in KEYWORDS
    if (last in SIGNS and piece in SIGNS) or last in ARITHMETIC or piece in ARITHMETIC:
        return separated
    return True
