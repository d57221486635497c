"""Checks a RayService beyond its schema: that its parts fit together, and to this project."""

import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from quantities import amount
from ray.serve.schema import ServeDeploySchema

from rayserve_cluster.placement import rank_resources
from rayserve_paged import __version__
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.serve_config import EndpointConfig

ROOT = Path(__file__).parent.parent.parent
IMPORT_PATH = "rayserve_paged.serve.build:app"

_GPU = "nvidia.com/gpu"
_UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
_MIN_SPARE_S = 60.0
_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"

Object = Mapping[str, Any]


def problems(manifest: Object) -> list[str]:
    """Return what is wrong with a RayService; empty where nothing is."""
    checks: tuple[Callable[[Object], Iterator[str]], ...] = (
        _serve_problems,
        _upgrade_problems,
        _pod_problems,
        _version_problems,
    )
    return [problem for check in checks for problem in check(manifest)]


def serve_config(manifest: Object) -> Object:
    """Return Serve's configuration, which stands in a RayService as text.

    Raises:
        ValueError: It is no mapping in YAML.
    """
    try:
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    except yaml.YAMLError as error:
        raise ValueError(f"serveConfigV2 is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError("serveConfigV2 holds no mapping")
    return config


def endpoint_config(manifest: Object) -> EndpointConfig:
    """Return what the application is configured by.

    Raises:
        InvalidInputError: A name is unknown, or a value is refused.
    """
    (application,) = serve_config(manifest).get("applications", [{}])
    return load_config_as(EndpointConfig, flags=application.get("args", {}), environ={})


def _serve_problems(manifest: Object) -> Iterator[str]:
    try:
        config = serve_config(manifest)
        schema = ServeDeploySchema.model_validate(config)
    except (ValueError, ValidationError) as error:
        yield f"serveConfigV2: {error}"
        return
    # Serve ignores what it does not know.
    known = schema.model_dump(exclude_unset=True)
    yield from (f"serveConfigV2: unknown field {name}" for name in _dropped(config, known))
    if len(config["applications"]) != 1:
        yield "serveConfigV2: one application"
        return
    (application,) = config["applications"]
    if application["import_path"] != IMPORT_PATH:
        yield f"serveConfigV2: import_path is not {IMPORT_PATH}"
    # Ray does not look at it before it starts.
    if application.get("route_prefix", "/") != "/":
        yield "serveConfigV2: route_prefix is not /, where clients look for /v1"
    module, _, name = IMPORT_PATH.partition(":")
    if not callable(getattr(importlib.import_module(module), name, None)):
        yield f"{IMPORT_PATH} does not exist"
    try:
        endpoint = endpoint_config(manifest)
    except InvalidInputError as error:
        yield f"serveConfigV2: args: {error}"
        return
    yield from _room_problems(manifest, endpoint)
    yield from _keys_problems(manifest, endpoint)


def _dropped(given: object, known: object, path: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known:
                yield f"{path}{name}"
            elif name != "args":
                yield from _dropped(value, known[name], f"{path}{name}.")
    elif isinstance(given, list) and isinstance(known, list):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _dropped(one, other, f"{path}{index}.")


def _room_problems(manifest: Object, endpoint: EndpointConfig) -> Iterator[str]:
    """See to it that the cluster has room for the ranks and the ingresses."""
    groups = manifest["spec"]["rayClusterConfig"].get("workerGroupSpecs", [])
    pods = [_offered(group) for group in groups for _ in range(group.get("replicas", 0))]
    has_gpus = any(pod["GPU"] for pod in pods)
    rank = rank_resources({"GPU": float(has_gpus)})
    width, num_replicas = (
        endpoint.parallel.tensor_parallel_size,
        endpoint.parallel.num_replicas,
    )
    # A replica's ranks share a node, with an ingress if there is one for each.
    num_fitting = sum(
        int(min(pod[name] / (Fraction(each) * width) for name, each in rank.items()))
        for pod in pods
    )
    if num_fitting < num_replicas:
        yield (
            f"there is room for {num_fitting} replicas of {width} ranks, one node each, and not "
            f"for {num_replicas}"
        )
    asked = num_replicas * width * Fraction(rank["CPU"])
    asked += endpoint.serve.num_ingress_replicas * Fraction(endpoint.serve.ingress_num_cpus)
    if asked > sum(pod["CPU"] for pod in pods):
        yield f"ranks and ingresses ask for {float(asked):g} cores, more than the pods offer"
    if endpoint.serve.num_ingress_replicas < len(pods):
        yield "fewer ingresses than worker pods: a pod without one is never ready"
    if endpoint.serve.ingress_num_cpus == 0:
        yield "ingresses that ask for no core may come to the head"


def _keys_problems(manifest: Object, endpoint: EndpointConfig) -> Iterator[str]:
    """See to it that every pod with an ingress has the keys."""
    if endpoint.serve.keys_file is None:
        return
    folder = str(PurePosixPath(endpoint.serve.keys_file).parent)
    for group in manifest["spec"]["rayClusterConfig"].get("workerGroupSpecs", []):
        spec = group["template"]["spec"]
        secrets = {volume["name"] for volume in spec.get("volumes", []) if "secret" in volume}
        mounts = spec["containers"][0].get("volumeMounts", [])
        if not any(m["mountPath"] == folder and m["name"] in secrets for m in mounts):
            yield f"{group['groupName']}: no secret is mounted at {folder}, for serve.keys_file"


def _offered(group: Object) -> dict[str, Fraction]:
    """Return the cores and GPUs that Ray sees in a pod of a group."""
    container = group["template"]["spec"]["containers"][0]
    limits = container.get("resources", {}).get("limits", {})
    num_cpus = group.get("rayStartParams", {}).get("num-cpus", limits.get("cpu", 0))
    return {"CPU": amount(num_cpus), "GPU": amount(limits.get(_GPU, 0))}


def _upgrade_problems(manifest: Object) -> Iterator[str]:
    spec = manifest["spec"]
    kind = spec.get("upgradeStrategy", {}).get("type")
    if kind not in _UPGRADES:
        yield f"upgradeStrategy.type: {kind!r} is none of {', '.join(_UPGRADES)}"
    delay_s = spec.get("rayClusterDeletionDelaySeconds", 60)
    try:
        drain_s = endpoint_config(manifest).serve.drain_timeout_s
    except (ValueError, KeyError, InvalidInputError):
        return  # Told elsewhere.
    if delay_s < drain_s + _MIN_SPARE_S:
        yield (
            f"rayClusterDeletionDelaySeconds: {delay_s} is not {_MIN_SPARE_S:g} more than "
            f"serve.drain_timeout_s, {drain_s:g}"
        )


def _pod_problems(manifest: Object) -> Iterator[str]:
    cluster = manifest["spec"]["rayClusterConfig"]
    port = serve_port(manifest)
    groups = {"head": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])
    }
    for name, group in groups.items():
        spec = group["template"]["spec"]
        for container in spec["containers"]:
            yield from (f"{name}: {problem}" for problem in _container_problems(container, spec))
        first = spec["containers"][0]
        ports = {port.get("name"): port["containerPort"] for port in first.get("ports", [])}
        if ports.get("serve") != port:
            yield f"{name}: its port `serve` is not {port}, where Serve listens"
        if name == "head":
            if group.get("rayStartParams", {}).get("num-cpus") != "0":
                yield "head: num-cpus is not 0, so that ranks may come to it"
            if _GPU in first.get("resources", {}).get("limits", {}):
                yield "head: it has GPUs, and nothing runs on it"
        elif not 0 < group.get("replicas", 0) <= group.get("maxReplicas", math.inf):
            yield f"{name}: replicas are not from 1 to maxReplicas"


def serve_port(manifest: Object) -> int:
    """Return the port on which Serve listens."""
    try:
        return int(serve_config(manifest).get("http_options", {}).get("port", 8000))
    except ValueError:
        return 8000  # Told elsewhere.


def _container_problems(container: Object, pod: Object) -> Iterator[str]:
    image = container.get("image", "")
    tag = re.fullmatch(r"[a-z0-9./_-]+(?::\d+/[a-z0-9./_-]+)?:(?P<tag>[\w.-]+)", image)
    if tag is None or not tag["tag"].startswith(__version__):
        yield f"image {image} has no tag that begins with {__version__}"
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name in ("cpu", "memory"):
        if name not in limits:
            yield f"resources: {name}: no limit, by which Ray knows what it has"
    for name in sorted(limits.keys() | requests.keys()):
        try:
            asked, at_most = amount(requests.get(name, 0)), amount(limits.get(name, 0))
        except ValueError as error:
            yield f"resources: {name}: {error}"
            continue
        if asked > at_most:
            yield f"resources: {name}: requests {requests[name]}, limit {limits.get(name)}"
        if name == _GPU and (asked != at_most or at_most.denominator != 1):
            yield f"resources: {name}: whole GPUs, as many requested as the limit says"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
    yield from (f"no volume is called {name}" for name in set(mounts.values()) - volumes)
    if "/dev/shm" not in mounts:
        yield "no shared memory at /dev/shm"
    for kind in ("livenessProbe", "readinessProbe"):
        if kind not in container:
            yield f"no {kind}"
    numbers = [port["containerPort"] for port in container.get("ports", [])]
    if len(set(numbers)) < len(numbers):
        yield f"a port is there twice: {numbers}"
    yield from _environment_problems(container, pod)


def _environment_problems(container: Object, pod: Object) -> Iterator[str]:
    for variable in container.get("env", []):
        name, value = variable["name"], variable.get("value")
        # A misspelt one is ignored. The core's settings are in lower case, behind the prefix.
        if name.startswith("RAY_") and name.removeprefix("RAY_").encode() not in _ray_sources():
            yield f"env: Ray knows no {name}"
        if value is not None and not isinstance(value, str):
            yield f"env: {name} is no text"
        if name == _DRAIN and float(value or 0) > pod.get("terminationGracePeriodSeconds", 30):
            yield f"terminationGracePeriodSeconds is shorter than {_DRAIN}, {value}"


@functools.cache
def _ray_sources() -> bytes:
    folder = Path(ray.__file__).parent
    sources = (path for name in ("_private", "_common") for path in (folder / name).rglob("*.py"))
    return b"".join(path.read_bytes() for path in (folder / "_raylet.so", *sources))


def _version_problems(manifest: Object) -> Iterator[str]:
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (pinned,) = (pin.partition("==")[2] for pin in pins if pin.startswith("ray=="))
    version = manifest["spec"]["rayClusterConfig"].get("rayVersion")
    if version != pinned:
        yield f"rayVersion: {version!r} is not {pinned}, the pinned one"
