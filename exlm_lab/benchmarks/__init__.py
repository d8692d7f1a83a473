"""Benchmarks: time and memory of the alignment backends and of whole training steps."""
