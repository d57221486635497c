"""Measures what steps, messages and starts take, for the simulator."""
