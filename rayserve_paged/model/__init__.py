"""What runs a step: loading, sharding, the forward pass and sampling."""
