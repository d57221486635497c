"""Benchmarks and experiments that print what was measured."""
