"""Paged-attention kernels and the physical KV pool; needs torch alone."""
