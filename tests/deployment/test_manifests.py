"""The manifests for KubeRay fit together, and mistakes in them are found."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import check_manifests
import pytest
import rayservice_checks
import yaml
from crd_schema import CustomResource
from quantities import amount

from rayserve_paged.core.errors import InvalidInputError

MANIFESTS = check_manifests.rayservices()
GPU = MANIFESTS["rayservice.yaml"]

WORKER = "spec.rayClusterConfig.workerGroupSpecs.0"
CONTAINER = f"{WORKER}.template.spec.containers.0"
HEAD = "spec.rayClusterConfig.headGroupSpec"


def changed(path: str, value: object) -> Mapping[str, Any]:
    """Return the manifest with one value replaced, or taken out where it is None."""
    manifest: Any = copy.deepcopy(dict(GPU))
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    at = manifest
    for part in parents:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return manifest


def changed_serve(old: str, new: str) -> Mapping[str, Any]:
    text = GPU["spec"]["serveConfigV2"]
    assert old in text
    return changed("spec.serveConfigV2", text.replace(old, new))


def test_there_is_one_with_gpus_and_one_without() -> None:
    assert MANIFESTS.keys() == {"rayservice.yaml", "rayservice-cpu.yaml"}


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_nothing_is_wrong_with_those_that_ship(name: str) -> None:
    assert rayservice_checks.problems(MANIFESTS[name]) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("spec.serveConfigV2", "applications: [", "is no YAML"),
        ("spec.serveConfigV2", "- a list", "holds no mapping"),
        ("spec.upgradeStrategy.type", "Recreate", "upgradeStrategy.type: 'Recreate'"),
        ("spec.rayClusterDeletionDelaySeconds", 600, "is not 60 more than"),
        ("spec.rayClusterDeletionDelaySeconds", None, "is not 60 more than"),
        ("spec.rayClusterConfig.rayVersion", "2.9.0", "rayVersion: '2.9.0' is not"),
        (f"{WORKER}.replicas", 3, "room for 3 replicas of 8 ranks"),
        (f"{WORKER}.maxReplicas", 3, "not from 1 to maxReplicas"),
        (f"{WORKER}.rayStartParams.num-cpus", "8", "more than the pods offer"),
        (f"{WORKER}.rayStartParams.num-cpus", "7", "room for 0 replicas"),
        (f"{CONTAINER}.image", "rayserve-paged:latest", "no tag that begins with"),
        (f"{CONTAINER}.image", "registry:5000/rayserve-paged", "no tag that begins with"),
        (f"{CONTAINER}.resources.requests.memory", "256GB", "is no quantity"),
        (f"{CONTAINER}.resources.requests.memory", "512Gi", "requests 512Gi, limit 256Gi"),
        (f"{CONTAINER}.resources.requests.nvidia.com/gpu", "4", "whole GPUs"),
        (f"{CONTAINER}.resources.limits.cpu", None, "cpu: no limit"),
        (f"{CONTAINER}.readinessProbe", None, "no readinessProbe"),
        (f"{CONTAINER}.ports.0.containerPort", 8001, "port `serve` is not 8000"),
        (f"{CONTAINER}.ports.1.containerPort", 8000, "a port is there twice"),
        (f"{CONTAINER}.volumeMounts.0.mountPath", "/dev/mem", "no shared memory"),
        (f"{CONTAINER}.volumeMounts.1.name", "modles", "no volume is called modles"),
        (f"{CONTAINER}.volumeMounts.2.mountPath", "/etc/keys", "no secret is mounted at"),
        (f"{WORKER}.template.spec.terminationGracePeriodSeconds", 60, "shorter than RAY_GRACEFUL"),
        (f"{HEAD}.rayStartParams.num-cpus", None, "head: num-cpus is not 0"),
        (
            f"{HEAD}.template.spec.containers.0.env.1.name",
            "RAY_health_check_period_millis",
            "Ray knows no RAY_health_check_period_millis",
        ),
    ],
)
def test_what_does_not_fit_together_is_found(path: str, value: object, problem: str) -> None:
    # A name of a resource has a dot in it.
    if path.endswith("nvidia.com/gpu"):
        manifest: Any = copy.deepcopy(dict(GPU))
        group = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        container = group["template"]["spec"]["containers"][0]
        container["resources"]["requests"]["nvidia.com/gpu"] = value
    else:
        manifest = changed(path, value)
    assert any(problem in found for found in rayservice_checks.problems(manifest))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("block_size: 32", "block_sise: 32", "did you mean cache.block_size"),
        ("block_size: 32", "block_size: 0", "cache.block_size=0"),
        ("port: 8000", "prot: 8000", "unknown field http_options.prot"),
        ("port: 8000", "port: 80000000", "port"),
        ("port: 8000", "port: 9000", "is not 9000, where Serve listens"),
        ("import_path: rayserve_paged", "import_path: rayserve", "import_path is not"),
        ("route_prefix: /", "route_prefix: v1", "route_prefix is not /"),
        ("tensor_parallel_size: 8", "tensor_parallel_size: 16", "room for 0 replicas"),
        ("num_ingress_replicas: 4", "num_ingress_replicas: 3", "fewer ingresses"),
        ("ingress_num_cpus: 1", "ingress_num_cpus: 0", "may come to the head"),
        ("drain_timeout_s: 600", "drain_timeout_s: 900", "is not 60 more than"),
    ],
)
def test_what_the_application_would_not_take_is_found(old: str, new: str, problem: str) -> None:
    found = rayservice_checks.problems(changed_serve(old, new))
    assert any(problem in one for one in found), found


def test_the_arguments_build_the_deployment_that_is_described() -> None:
    config = rayservice_checks.endpoint_config(GPU)
    assert config.parallel.num_replicas == 4
    assert config.model_name == "llama-70b"
    with pytest.raises(InvalidInputError, match=r"parallel\.num_replica="):
        rayservice_checks.endpoint_config(changed_serve("num_replicas: 4", "num_replica: 4"))


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("500m", 0.5), ("2", 2), (3, 3), (1.5, 1.5), ("16Gi", 16 * 2**30), ("1k", 1000), (".5", 0.5)],
)
def test_quantities_are_read(quantity: object, number: float) -> None:
    assert amount(quantity) == number


@pytest.mark.parametrize("quantity", ["", "16GB", "1 Gi", "-1", "Gi", "1e3x", True, None])
def test_what_is_no_quantity_is_refused(quantity: object) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        amount(quantity)


def definition() -> dict[str, Any]:
    """Return a small definition with everything that Kubernetes adds to JSON Schema."""
    port = {
        "type": "object",
        "required": ["number"],
        "properties": {
            "number": {"type": "integer", "format": "int32"},
            "protocol": {"type": "string", "default": "TCP", "enum": ["TCP", "UDP"]},
        },
    }
    spec = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "nullable": True},
            "target": {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "pattern": "^[0-9]+$",
            },
            "ports": {
                "type": "array",
                "items": port,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["number", "protocol"],
            },
            "tags": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "empty": {"type": "object"},
        },
    }
    schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
        },
    }
    return {
        "kind": "CustomResourceDefinition",
        "spec": {
            "group": "ray.io",
            "names": {"kind": "RayService"},
            "versions": [
                {"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}},
                {"name": "v0", "served": False, "schema": {"openAPIV3Schema": {}}},
            ],
        },
    }


def resource(**spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "one", "labels": {"a": "b"}},
        "spec": {"name": "x", **spec},
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"name": None},
        {"target": 8000},
        {"target": "8000"},
        {"ports": [{"number": 1}, {"number": 1, "protocol": "UDP"}]},
        {"labels": {"any": "name"}},
        {"free": {"any": ["thing"]}},
        {"empty": {}},
        {"tags": ["a", "b"]},
    ],
)
def test_what_an_api_server_takes_is_taken(spec: dict[str, object]) -> None:
    assert CustomResource(definition()).problems(resource(**spec)) == []


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"targt": 1}, "spec: unknown field 'targt', did you mean target?"),
        ({"ports": [{"number": 1, "host": "x"}]}, "spec.ports[0]: unknown field 'host'"),
        ({"empty": {"a": 1}}, "spec.empty: unknown field 'a'"),
        ({"labels": {"a": 1}}, "spec.labels.a: 1 is not of type 'string'"),
        ({"name": 1}, "spec.name: 1 is not of type 'string', 'null'"),
        ({"target": 1.5}, "spec.target: 1.5 is not valid under any of the given schemas"),
        ({"target": "x"}, "spec.target: 'x' does not match ^[0-9]+$"),
        ({"ports": [{"protocol": "TCP"}]}, "spec.ports[0]: 'number' is a required property"),
        ({"ports": [{"number": 2**31}]}, "spec.ports[0].number: 2147483648 is no int32"),
        (
            {"ports": [{"number": 1}, {"number": 1, "protocol": "TCP"}]},
            "spec.ports: number=1, protocol='TCP' is there twice",
        ),
        ({"tags": ["a", "a"]}, "spec.tags: 'a' is there twice"),
    ],
)
def test_what_an_api_server_refuses_or_drops_is_found(
    spec: dict[str, object], problem: str
) -> None:
    assert CustomResource(definition()).problems(resource(**spec)) == [problem]


def test_an_unknown_version_and_an_unknown_field_of_the_head_are_found() -> None:
    crd = CustomResource(definition())
    assert crd.problems(resource() | {"apiVersion": "ray.io/v0"}) == [
        "apiVersion: 'ray.io/v0' is none of ray.io/v1"
    ]
    unknown = resource() | {"specs": {}}
    unknown["metadata"]["label"] = {}
    assert crd.problems(unknown) == [
        "(top): unknown field 'specs', did you mean spec?",
        "metadata: unknown field 'label', did you mean labels?",
    ]


def test_the_command_says_what_to_download_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_manifests.main([]) == 2
    said = capsys.readouterr()
    assert "rayservice.yaml: ok" in said.out
    assert "ray.io_rayservices.yaml" in said.err
    assert check_manifests.main([str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err

    crd = tmp_path / "crd.yaml"
    crd.write_text(yaml.safe_dump(definition()))
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "one.yaml").write_text(yaml.safe_dump(resource(targt=1)))
    assert check_manifests.main([str(crd)], tmp_path / "manifests") == 1
    assert "one.yaml: spec: unknown field 'targt'" in capsys.readouterr().out
    crd.write_text("kind: ConfigMap")
    assert check_manifests.main([str(crd)]) == 2
    assert "kind='ConfigMap'" in capsys.readouterr().err


def test_the_network_policy_selects_the_pods_of_the_rayservice() -> None:
    folder = check_manifests.FOLDER
    template = GPU["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    policy = yaml.safe_load((folder / "network-policy.yaml").read_text("utf-8"))
    assert policy["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    head = GPU["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    ports |= {port["name"] for port in head["spec"]["containers"][0]["ports"]}
    named = {one["port"] for rule in policy["spec"]["ingress"] for one in rule.get("ports", [])}
    assert named <= ports
