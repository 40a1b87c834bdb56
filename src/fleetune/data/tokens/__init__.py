"""Token tables: examples become tokens, in memory-mapped arrays, in a cache that finds them again."""

from fleetune.data.tokens.blocks import table_of_blocks
from fleetune.data.tokens.cache import CachedTable, Progress, TableRequest, load_or_build
from fleetune.data.tokens.table import UNLABELLED, DamagedTableError, TokenTable
from fleetune.data.tokens.tokenizing import (
    Encoder,
    TextEncoder,
    Tokenizer,
    tokenise,
    tokenizer_identity,
    usable_length,
)
from fleetune.data.tokens.windows import WindowEncoder
from fleetune.data.tokens.words import WordEncoder

__all__ = [
    "UNLABELLED",
    "CachedTable",
    "DamagedTableError",
    "Encoder",
    "Progress",
    "TableRequest",
    "TextEncoder",
    "TokenTable",
    "Tokenizer",
    "WindowEncoder",
    "WordEncoder",
    "load_or_build",
    "table_of_blocks",
    "tokenise",
    "tokenizer_identity",
    "usable_length",
]
