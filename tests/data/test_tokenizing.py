from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleetune.data.examples import Example
from fleetune.data.tokenizing import tokenise, tokenizer_identity, usable_length
from fleetune.errors import ConfigError
from tests.data.conftest import WordTokenizer
