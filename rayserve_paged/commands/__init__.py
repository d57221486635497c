"""The commands of `rayserve-paged`, one module each; they import what is heavy when they run."""
