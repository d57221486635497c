"""A distributed, multi-GPU KV-cache runtime for LLM serving on Ray."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayserve_paged.core.attachments import Attachment
    from rayserve_paged.core.block_identity import Adapter, RequestScope
    from rayserve_paged.core.retention import RetentionRange
    from rayserve_paged.core.sampling_params import SamplingParams
    from rayserve_paged.llm import LLM
    from rayserve_paged.request_options import RequestOptions

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Adapter",
    "Attachment",
    "RequestOptions",
    "RequestScope",
    "RetentionRange",
    "SamplingParams",
]

# Imported on first use: `import rayserve_paged.core` must load neither torch nor ray.
_LAZY = {
    "LLM": "rayserve_paged.llm",
    "Adapter": "rayserve_paged.core.block_identity",
    "Attachment": "rayserve_paged.core.attachments",
    "RequestOptions": "rayserve_paged.request_options",
    "RequestScope": "rayserve_paged.core.block_identity",
    "RetentionRange": "rayserve_paged.core.retention",
    "SamplingParams": "rayserve_paged.core.sampling_params",
}

if not TYPE_CHECKING:  # A type checker that sees `__getattr__` accepts every name.

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)
