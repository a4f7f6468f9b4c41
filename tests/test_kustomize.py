"""kustomize builds manifests/, and every object has the fields and types of the API's schema.

The schema is the models of kubernetes_asyncio, which are generated from the API's. kustomize is the one in kubectl; without it,
only the files themselves are checked against the schema. Not tested: CustomResourceDefinitions of the Prometheus operator.
"""

import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from kubernetes_asyncio.client import models

from ipvsproxy.commands import dry_run
from ipvsproxy.config import load

MANIFESTS = pathlib.Path(__file__).parents[1] / "manifests"
BUILT = ("base", "monitoring", "overlays/beside-kube-proxy", "overlays/replace-kube-proxy")
OF_THE_OPERATOR = ("PodMonitor", "PrometheusRule")
SCALARS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}

Object = dict[str, Any]


def errors(value: Any, kind: str, where: str) -> list[str]:
    """The differences of a value from the schema: unknown fields, wrong types, missing required fields."""
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        items = value if isinstance(value, list) else None
        if items is None:
            return [f"{where} is no list"]
        return [error for number, item in enumerate(items) for error in errors(item, inner[1], f"{where}[{number}]")]
    if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return [error for key, item in value.items() for error in errors(item, inner[1], f"{where}.{key}")]
    if kind in SCALARS:
        fits = isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{where}: {value!r} is no {kind}"]
    if kind in ("object", "IntOrString", "datetime"):
        return []
    model = getattr(models, kind)
    names = {json: python for python, json in model.attribute_map.items()}
    found = [f"{where}.{name}: no such field" for name in value.keys() - names.keys()]
    for name in value.keys() & names.keys():
        found += errors(value[name], model.openapi_types[names[name]], f"{where}.{name}")
    if not found:
        try:  # the models themselves check required fields
            model(**{names[name]: item for name, item in value.items()})
        except ValueError as error:
            found.append(f"{where}: {error}")
    return found


def model_of(item: Object) -> str:
    return "V1" + str(item["kind"])


def build(folder: str) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which brings kustomize, is not installed")
    done = subprocess.run((kubectl, "kustomize", str(MANIFESTS / folder)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing is deprecated"
    return list(yaml.safe_load_all(done.stdout))


def files() -> list[pathlib.Path]:
    return [path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.parent.name in ("base", "demo", "monitoring")]


@pytest.mark.parametrize("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_object_matches_the_schema_of_the_api(path: pathlib.Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        if "apiVersion" in item and "kustomize" not in item["apiVersion"] and item["kind"] not in OF_THE_OPERATOR:
            assert errors(item, model_of(item), item["kind"]) == []


def test_errors_are_found() -> None:
    pod = {"containers": [{"name": 7, "image": "a", "securityContext": {"privilegd": True}}], "hostNetwork": "yes"}
    assert sorted(errors(pod, "V1PodSpec", "spec")) == [
        "spec.containers[0].name: 7 is no str",
        "spec.containers[0].securityContext.privilegd: no such field",
        "spec.hostNetwork: 'yes' is no bool",
    ]
    assert "must not be `None`" in errors({"hostNetwork": True}, "V1PodSpec", "spec")[0]


@pytest.mark.parametrize("folder", BUILT)
def test_built_objects_match_the_schema(folder: str) -> None:
    built = build(folder)
    for item in built:
        if item["kind"] not in OF_THE_OPERATOR:
            assert errors(item, model_of(item), item["kind"]) == []
            cluster_wide = item["kind"].startswith("Cluster")
            assert item["metadata"].get("namespace") == (None if cluster_wide else "kube-system")
    assert len({(item["kind"], item["metadata"]["name"]) for item in built}) == len(built)


@pytest.mark.parametrize("folder", ["overlays/beside-kube-proxy", "overlays/replace-kube-proxy"])
def test_the_overlays_use_the_configuration_of_kube_proxy_and_have_none(folder: str) -> None:
    built = {item["kind"]: item for item in build(folder)}
    assert "ConfigMap" not in built
    volumes = {volume["name"]: volume for volume in built["DaemonSet"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == "kube-proxy"


def test_the_shadow_differs_from_the_proxy_in_name_labels_and_ports_and_prepares_nothing() -> None:
    shadow = {item["kind"]: item for item in build("overlays/beside-kube-proxy")}
    proxy = {item["kind"]: item for item in build("overlays/replace-kube-proxy")}
    assert {kind: item["metadata"]["name"] for kind, item in shadow.items()} == dict.fromkeys(shadow, "ipvsproxy-shadow")
    one, other = shadow["DaemonSet"]["spec"], proxy["DaemonSet"]["spec"]
    assert not one["selector"]["matchLabels"].items() <= other["template"]["metadata"]["labels"].items()
    assert not other["selector"]["matchLabels"].items() <= one["template"]["metadata"]["labels"].items()
    pod = one["template"]["spec"]
    assert "initContainers" not in pod
    (container,) = pod["containers"]
    assert container["command"][-1] == "--dry-run"
    assert container["ports"][0]["containerPort"] == dry_run.OTHER_PORTS[10249]
    health = load.load(["--proxy-mode=ipvs"], hostname="node", read_file=lambda _: b"").servers.health
    assert health is not None
    asked = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    assert asked == {dry_run.beside_kube_proxy(health).port}
