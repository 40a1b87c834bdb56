"""Counted things in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number and the noun in the form it asks for: "1 cell", "2 cells"; the plural is made with an s."""
    return f"{number} {noun if number == 1 else noun + 's'}"
