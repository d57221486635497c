"""Gives these tests a deployment of the fingerprint model, random Llamas, and the command."""

from command_run import run
from fingerprint_llm import llm, shared_llm
from random_llama import make_llama

__all__ = ["llm", "make_llama", "run", "shared_llm"]
