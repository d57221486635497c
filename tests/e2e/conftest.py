"""Gives these tests a deployment of the fingerprint model, random models, and the command."""

from command_run import run
from fingerprint_llm import llm, shared_llm
from random_model import make_llama, make_model

__all__ = ["llm", "make_llama", "make_model", "run", "shared_llm"]
