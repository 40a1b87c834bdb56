"""The example corpus: English sentence pairs, paraphrases and near misses, written by a small grammar.

An event is a scene with its facts. A paraphrase is one event told twice, with another sentence plan, other verbs and
another order of clauses. A near miss tells an event, and then the same event with exactly one fact changed, rewritten
just as much: how many words two sentences share says little about the label.

The same seed gives the same bytes on every platform: all chance comes from `random.Random.random`, the one sequence
that Python promises to keep.
"""

from fleetune.data.demo.corpus import DemoFiles, Pair, paraphrase_pairs, write_demo_corpus

__all__ = ["DemoFiles", "Pair", "paraphrase_pairs", "write_demo_corpus"]
