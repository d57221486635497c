"""Benchmarks of the kernels on a GPU; only some modules need triton."""
