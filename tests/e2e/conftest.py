"""Gives the tests of this folder a deployment of the fingerprint model."""

from fingerprint_llm import llm, shared_llm

__all__ = ["llm", "shared_llm"]
