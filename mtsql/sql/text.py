"""SQL as text: what needs no parser, most of it as the official evaluation does it before execution.

The rest is one way to write a query, the normal form. Data sets write the same query in many ways: table
names in another case than the schema's, blanks around every sign, texts in double quotes. A policy that is
trained on all of them spends its loss on a choice without meaning. Verdicts are given on the queries as
they are: no score depends on this form.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from mtsql.data.datasets import Example
from mtsql.data.schema import RESERVED, Schema, folded
from mtsql.data.sql_worker import MAX_SQL_BYTES

QUOTED = r"""'(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)"""
NAME = r"[\w$\u0080-\ufefe\uff00-\U0010ffff]+"  # as SQLite has it: of all beyond ASCII but a byte order mark
PIECE = re.compile(rf"{QUOTED} | --[^\n]* | /\*.*?(?:\*/|\Z) | \d+\.\w* | {NAME} | .", re.VERBOSE | re.DOTALL)
SPLIT_OPERATOR = re.compile(rf"({QUOTED}) | ([<>!])[ ]=", re.VERBOSE)
CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)  # as the official one
KEYWORDS = RESERVED | set(
    "asc by cross desc end full glob inner left like natural offset outer right with".split()
)
FUNCTIONS = frozenset("avg count max min sum".split())
ROW_IDS = ("rowid", "oid", "_rowid_")  # columns that every table has
ALIAS = re.compile(r"t\d+", re.IGNORECASE)
WORD = re.compile(NAME)
QUOTES = "'\"`["
OPERAND_ENDS = ")]`'\"."
NO_BLANK_AFTER, NO_BLANK_BEFORE = "(.", "),.;"
SIGNS = "<>=!|&"  # those of an operator stay together,
ARITHMETIC = "+-/%~"  # and these as they were: a sign may belong to its number


def join_operators(sql: str) -> str:
    """Writes "> =", "< =" and "! =" as one operator, but in quotes."""
    return SPLIT_OPERATOR.sub(lambda found: found[1] or f"{found[2]}=", sql)


def first_statement(sql: str) -> list[str]:
    """The pieces of the first statement: words, quoted texts, comments, single characters."""
    pieces = PIECE.findall(sql.lstrip("; \t\n\r"))
    return pieces[: pieces.index(";")] if ";" in pieces else pieces


def same_query(a: str, b: str) -> bool:
    """Whether two texts differ only in white space, comments, final semicolons and letter case.

    Quoted names and texts have to be the same to the letter, and so have letters beyond ASCII, whose case
    SQLite does not fold.
    """
    return query_words(a) == query_words(b)


def query_words(sql: str) -> tuple[str, ...]:
    """The words and operators of a query, those in quotes whole: equal for what is the same query."""
    words, before = [], ""
    for piece in PIECE.findall(sql):
        if before and before in SIGNS and piece in SIGNS:  # ">=" runs, "> =" does not
            words[-1] += piece
        elif not is_blank(piece):
            words.append(piece if piece[0] in QUOTES else folded(piece))
        before = piece
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


def as_executed(sql: str, keep_distinct: bool) -> str:
    """`sql` as the official evaluation runs it.

    Repairs split operators, and the year function even in quotes, as officially; unless `keep_distinct`,
    drops every DISTINCT and everything after the first statement. What is too long to be run stays as it is.
    """
    if len(sql) > MAX_SQL_BYTES:
        return sql
    sql = CURRENT_YEAR.sub("2020", join_operators(sql))
    return sql if keep_distinct else without_distinct(sql)


def is_blank(piece: str) -> bool:
    """Whether a piece is white space, as SQLite has it, or a comment."""
    return piece in " \t\n\r\f\ufeff" or piece.startswith(("--", "/*"))


def in_normal_form(example: Example, schema: Schema) -> Example:
    """The question with its earlier SQL in normal form; its own gold SQL stays as the data set has it."""
    turns = (replace(turn, sql=turn.sql and normal_form(turn.sql, schema)) for turn in example.history)
    return replace(example, history=tuple(turns))


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
    names = dict(zip(ROW_IDS, ROW_IDS, strict=True))
    names |= {folded(column): column for table in tables for column, _ in table.columns}
    names |= {folded(table.name): table.name for table in tables}
    words = [piece for piece in pieces if not is_blank(piece)]
    # What stands behind AS, an operand or a dot is the query's own name, and so may be all that WITH defines.
    own = {
        folded(word).strip('"`[]')
        for before, word in pairwise(words)
        if before[-1] in OPERAND_ENDS or (WORD.fullmatch(before) and folded(before) not in KEYWORDS - {"as"})
    }
    quoted = {word for word in words if word[0] == '"'}
    kept = {word for word in quoted if "with" in mentioned or folded(word).strip('"') in own}
    following = iter([*words[1:], ""])
    written, separated = [], False
    for piece in pieces:
        if is_blank(piece):
            separated = True
            continue
        if written and _blank(written[-1], piece, separated):
            written.append(" ")
        called = next(following) == "("
        written.append(piece if piece in kept else _spelt(piece, names, called))
        separated = False
    return "".join(written).rstrip("; ")


def _spelt(piece: str, names: dict[str, str], called: bool) -> str:
    """A word as the normal form has it; a bracket behind it tells a function from a column."""
    word = folded(piece)
    if word in FUNCTIONS and called:
        return word
    if word in KEYWORDS:
        return piece.upper()
    inner = piece[1:-1].replace('""', '"')
    if piece[0] == '"' and not called and folded(inner) not in names:
        return "'" + inner.replace("'", "''") + "'"
    if piece[0] in QUOTES:
        return piece
    return names.get(word) or (word if ALIAS.fullmatch(piece) else piece)


def _blank(before: str, piece: str, separated: bool) -> bool:
    """Whether a blank stands between two pieces; `separated` if there was one."""
    last = before[-1]
    if before in ("x", "X") and piece[0] == "'":  # of a blob
        return separated
    if piece in NO_BLANK_BEFORE or before in NO_BLANK_AFTER:
        return False
    if piece == "(":  # of a function's arguments, or of anything else
        return not WORD.fullmatch(before) or before.lower() in KEYWORDS
    if (last in SIGNS and piece in SIGNS) or last in ARITHMETIC or piece in ARITHMETIC:
        return separated
    return True
