"""The styles of the toy benchmark: the default, a shifted one for evaluation out of domain, unseen words.

A policy is trained in the default style and evaluated in the shifted one too (MTSQL-R1, Table 3). The words
of these two are the same: the tiny model hardly copies words that it has never met. The shifted style differs
as CoSQL's queries differ from SParC's: its first questions have more counts, joins, LIMIT 1 and nesting, its
follow-ups more conditions and fewer groups (the weights in `FIRST_QUESTIONS` and `FOLLOW_UPS`). Its topics
change, too: without that a dialogue that begins with groups would rarely reach three turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Style:
    """What differs between the styles, beside the weights of the kinds of question.

    `turns` is drawn from uniformly; a dialogue that comes out shorter than the least of them is left out.
    `renamed` is the share of columns whose stored name is drawn from all names that the column can have,
    of which most are not the question's word. `suffix` goes into the database ids. With `unseen`, themes,
    names, values and ways of asking are others than in all other splits.
    """

    shifted: bool
    turns: tuple[int, ...]
    renamed: float
    suffix: str
    unseen: bool = False


DEFAULT = Style(shifted=False, turns=(1, 2, 2, 3, 3, 3, 4, 4, 5), renamed=0.1, suffix="")
SHIFTED = Style(shifted=True, turns=(3, 4, 4, 5, 5, 6, 7), renamed=0.4, suffix="_shifted")
UNSEEN = replace(DEFAULT, suffix="_unseen", unseen=True)
