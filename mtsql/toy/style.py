"""The two styles of the toy benchmark: the default, and a shifted one to be evaluated out of domain.

A policy is trained in one style and evaluated in the other (MTSQL-R1, Table 3). The words are the same,
since the tiny model cannot copy words that it has never met.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """What differs between the styles.

    `turns` is drawn from uniformly; a dialogue that comes out shorter than the least of them is left out.
    `first` and `follow_ups` are weights by kind of question (`Speaker.ask_first`, `FOLLOW_UPS`).
    `renamed` is the share of columns whose stored name is drawn from all names that the column can have,
    of which most are not the question's word. `suffix` goes into the database ids.
    """

    turns: tuple[int, ...]
    first: dict[str, int]
    follow_ups: dict[str, int]
    renamed: float
    suffix: str


DEFAULT = Style(
    turns=(1, 2, 2, 3, 3, 3, 4, 4, 5),
    first={
        "list": 20,
        "two_columns": 9,
        "count": 9,
        "aggregate": 8,
        "group": 4,
        "having": 3,
        "superlative": 6,
        "parent_condition": 8,
        "pair": 3,
        "children": 8,
        "above_average": 3,
        "childless": 2,
        "both": 3,
    },
    follow_ups={
        "refine": 22,
        "change_property": 13,
        "change_value": 16,
        "negate": 5,
        "count_those": 8,
        "list_those": 12,
        "aggregate_those": 8,
        "sort_those": 4,
        "extreme_of_those": 5,
        "group_those": 6,
        "about_groups": 9,
        "above_average": 2,
        "combine": 3,
        "parents_of_those": 6,
    },
    renamed=0.1,
    suffix="",
)

# As CoSQL's queries differ from SParC's: first questions with more counts, joins, LIMIT 1 and nesting,
# follow-ups with more conditions and fewer groups. Its topics change, too: without that a dialogue that
# begins with groups would rarely reach three turns.
SHIFTED = Style(
    turns=(3, 4, 4, 5, 5, 6, 7),
    first={
        "list": 12,
        "two_columns": 4,
        "count": 16,
        "aggregate": 5,
        "group": 3,
        "having": 3,
        "superlative": 14,
        "parent_condition": 18,
        "pair": 2,
        "children": 10,
        "above_average": 8,
        "childless": 4,
        "both": 3,
    },
    follow_ups={
        "refine": 16,
        "change_property": 20,
        "change_value": 26,
        "negate": 10,
        "count_those": 10,
        "list_those": 16,
        "aggregate_those": 6,
        "sort_those": 3,
        "extreme_of_those": 7,
        "group_those": 2,
        "about_groups": 4,
        "above_average": 5,
        "combine": 4,
        "parents_of_those": 10,
        "change_topic": 8,
    },
    renamed=0.4,
    suffix="_shifted",
)
