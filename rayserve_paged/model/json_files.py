"""Reads the JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from rayserve_paged.core.errors import InvalidInputError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        InvalidInputError: The file is not JSON in UTF-8, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError("model", str(path), f"a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise InvalidInputError("model", str(path), "a JSON file that holds an object")
    return content
