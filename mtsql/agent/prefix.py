"""What token sequences begin with together: for questions over one database it is the schema."""

from __future__ import annotations

from collections.abc import Sequence

WORTH_SHARING = 64  # tokens, below which a copy in the cache saves nothing


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def families(sequences: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Sequences that begin alike, as (number of tokens that they share, their places in `sequences`).

    Each is in exactly one family, and a family of several shares at least WORTH_SHARING tokens. What its
    members go on with may have families of its own: behind a system message, those of each database.
    """
    found: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        if found:
            shared, places = found[-1]
            common = shared_length(sequences[places[0]][:shared], sequences[place])
            if common >= WORTH_SHARING:
                found[-1] = (common, [*places, place])
                continue
        found.append((len(sequences[place]), [place]))
    return found
