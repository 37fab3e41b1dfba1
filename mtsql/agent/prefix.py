"""What token sequences begin with together: for questions over one database it is the schema."""

from __future__ import annotations

from collections.abc import Sequence

WORTH_SHARING = 64  # tokens, below which a copy in the cache saves nothing


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def families(prompts: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Prompts that begin alike, as (number of tokens that they share, their places in `prompts`).

    Each prompt is in exactly one family. In lexical order a prompt joins the family before it, unless that
    would leave the family with fewer than WORTH_SHARING tokens in common, or half as many as before; so a
    system message that all prompts share does not put those of different databases together.
    """
    found: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(prompts)), key=lambda i: tuple(prompts[i])):
        if found:
            shared, places = found[-1]
            common = shared_length(prompts[places[0]][:shared], prompts[place])
            if common >= WORTH_SHARING and (len(places) == 1 or 2 * common > shared):
                found[-1] = (common, [*places, place])
                continue
        found.append((len(prompts[place]), [place]))
    return found
