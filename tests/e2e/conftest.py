"""Gives the tests of this folder a deployment of the fingerprint model, and random Llamas."""

from fingerprint_llm import llm, shared_llm
from random_llama import make_llama

__all__ = ["llm", "make_llama", "shared_llm"]
