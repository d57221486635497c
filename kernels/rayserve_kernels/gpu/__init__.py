"""Triton kernels over the paged pool; imported only where they run, since that needs triton."""
