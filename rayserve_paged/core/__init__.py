"""Pure state machines of the runtime: no torch, no ray, no clock, no environment."""
