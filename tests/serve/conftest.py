"""Gives these tests an endpoint of the fingerprint model, and a hold on its steps."""

from http_endpoint import endpoint, gate, shared_endpoint
from random_model import make_llama, make_model

__all__ = ["endpoint", "gate", "make_llama", "make_model", "shared_endpoint"]
