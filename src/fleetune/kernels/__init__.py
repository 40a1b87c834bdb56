"""Fused CPU kernels: C++ compiled for this very machine, and the same operations in plain PyTorch."""
