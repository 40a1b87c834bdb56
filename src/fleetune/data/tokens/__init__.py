"""Token tables: examples become tokens, in memory-mapped arrays, in a cache that finds them again."""

from fleetune.data.tokens.cache import CachedTable, Progress, TableRequest, load_or_build
from fleetune.data.tokens.table import DamagedTableError, TokenTable
from fleetune.data.tokens.tokenizing import Tokenizer, tokenise, tokenizer_identity, usable_length

__all__ = [
    "CachedTable",
    "DamagedTableError",
    "Progress",
    "TableRequest",
    "TokenTable",
    "Tokenizer",
    "load_or_build",
    "tokenise",
    "tokenizer_identity",
    "usable_length",
]
