"""Gives the tests of this folder the shared local cluster."""

from ray_harness import cluster

__all__ = ["cluster"]
