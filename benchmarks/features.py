"""Examples as a tokenised data set of Hugging Face holds them: the peers' input."""

from __future__ import annotations

from fleetune.bench.features import Feature, feature_of

__all__ = ["Feature", "feature_of"]
