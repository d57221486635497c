"""Checks the manifests of configs/kuberay: `make check-manifests CRD=FILE`.

FILE is the definition of RayService of the KubeRay release that is to take them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rayservice_checks
import yaml
from crd_schema import CustomResource

FOLDER = rayservice_checks.ROOT / "configs" / "kuberay"
SOURCE = (
    "https://raw.githubusercontent.com/ray-project/kuberay/RELEASE/"
    "helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml"
)


def rayservices(folder: Path = FOLDER) -> dict[str, Mapping[str, Any]]:
    """Return the manifests of kind RayService, by file name."""
    manifests = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if document["kind"] == "RayService":
                manifests[path.name] = document
    return manifests


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Check, print what is wrong, and return the exit status."""
    crd = None
    if arguments:
        try:
            crd = CustomResource.read(Path(arguments[0]))
        except (OSError, ValueError) as error:
            print(f"CRD={arguments[0]}: {error}", file=sys.stderr)
            return 2
    num_problems = 0
    for name, manifest in rayservices(folder).items():
        found = crd.problems(manifest) if crd is not None else []
        # Which go by what the schema requires.
        found = found or rayservice_checks.problems(manifest)
        for problem in found:
            print(f"{name}: {problem}")
        num_problems += len(found)
        if not found:
            print(f"{name}: ok")
    if crd is None:
        print(
            "Checked without the schema. Download that of your release of KubeRay (or take it from "
            f"your cluster) and name it:\n\n  curl -O {SOURCE}\n"
            "  kubectl get crd rayservices.ray.io -o yaml > ray.io_rayservices.yaml\n\n"
            "  make check-manifests CRD=ray.io_rayservices.yaml",
            file=sys.stderr,
        )
        return 2
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
