"""Encoders over flat batches: model families as a table, heads and labels, Hugging Face weights in and out."""
