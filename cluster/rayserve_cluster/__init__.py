"""Ray actors, tensor-parallel groups and the step loop that drive the core."""
