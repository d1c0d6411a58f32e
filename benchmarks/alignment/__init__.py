"""Benchmarks of word alignment."""
