"""An experiment of a few seconds, as YAML and as files."""

from pathlib import Path
from typing import Any

import yaml

SMALL: dict[str, Any] = {
    "title": "Two placements",
    "question": "Which one?",
    "workload": {
        "synthetic": {
            "num_requests": 12,
            "arrivals": {"kind": "poisson", "rate_per_s": 8},
            "prompt_tokens": {"median": 64, "sigma": 0.5, "low": 8, "high": 200},
            "output_tokens": {"median": 8},
            "system_prompts": {"count": 2, "num_tokens": 64},
        }
    },
    "parallel": {"num_replicas": 2},
    "simulation": {"gpu": "H200", "model_shape": "llama-8b"},
    "cache": {"block_size": 16, "num_blocks": 64},
    "batch": {"max_num_seqs": 4, "max_num_batched_tokens": 256},
    "sample_every_s": 0.125,
    "axes": {
        "placement": ["round-robin", "prefix-aware"],
        "workload.time_scale": [1, 0.25],
    },
    "seeds": [0, 1],
    "slo": {"ttft_s": 0.005, "itl_s": 0.02},
}


def write(folder: Path, **changes: object) -> Path:
    """Write the experiment with other top-level values; None leaves one out."""
    content = {key: value for key, value in (SMALL | changes).items() if value is not None}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
