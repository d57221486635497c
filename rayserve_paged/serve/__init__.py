"""The HTTP endpoint: an OpenAI-compatible API over a deployment, on Ray Serve or alone."""
