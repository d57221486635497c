"""Workloads, and what the runtime would make of them, without a model or a cluster."""
