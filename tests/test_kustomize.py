"""kustomize can build manifests/, and every built object matches the schema of the API.

The schema consists of the models of kubernetes_asyncio, which are generated from the API. The tests use the kustomize in kubectl;
if kubectl is missing, only the files themselves are checked against the schema. The CustomResourceDefinitions of the Prometheus
operator are not tested.
"""

import functools
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from kubernetes_asyncio.client import models

from ipvsproxy.commands import dry_run
from ipvsproxy.config import load

MANIFESTS = pathlib.Path(__file__).parents[1] / "manifests"
BUILT = (
    "base",
    "cleanup",
    "monitoring",
    "overlays/beside-kube-proxy",
    "overlays/cleanup-on-all-nodes",
    "overlays/own-configuration",
    "overlays/replace-kube-proxy",
)
OTHER_SETTINGS = {
    "apiServer": "https://127.0.0.1:7443",
    "clusterCIDR": "10.42.0.0/16,fd00:42::/56",
    "scheduler": "wrr",
    "rulesBackend": "nftables",
    "vipBinding": "routes",
    "metricsBindAddress": "0.0.0.0:10249",
    "maxUnavailable": "5%",
}
RUNS = ("DaemonSet", "Job")
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
        try:  # the constructor of a model raises ValueError if a required field is missing
            model(**{names[name]: item for name, item in value.items()})
        except ValueError as error:
            found.append(f"{where}: {error}")
    return found


def model_of(item: Object) -> str:
    return "V1" + str(item["kind"])


@functools.cache
def shipped(folder: str) -> list[Object]:
    """The objects that kustomize builds from this folder of the unchanged manifests."""
    return build(folder, MANIFESTS)


@pytest.fixture
def manifests(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the manifests, which a test may change."""
    return shutil.copytree(MANIFESTS, tmp_path / "manifests")


def build(folder: str, manifests: pathlib.Path) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which brings kustomize, is not installed")
    done = subprocess.run((kubectl, "kustomize", str(manifests / folder)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing is deprecated"
    return list(yaml.safe_load_all(done.stdout))


def files() -> list[pathlib.Path]:
    return [path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.parent.name in ("base", "cleanup", "demo", "monitoring")]


@pytest.mark.parametrize("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_object_in_the_manifests_matches_the_schema_of_the_api(path: pathlib.Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        if "apiVersion" in item and "kustomize" not in item["apiVersion"] and item["kind"] not in OF_THE_OPERATOR:
            assert errors(item, model_of(item), item["kind"]) == []


def test_the_schema_check_finds_errors() -> None:
    pod = {"containers": [{"name": 7, "image": "a", "securityContext": {"privilegd": True}}], "hostNetwork": "yes"}
    assert sorted(errors(pod, "V1PodSpec", "spec")) == [
        "spec.containers[0].name: 7 is no str",
        "spec.containers[0].securityContext.privilegd: no such field",
        "spec.hostNetwork: 'yes' is no bool",
    ]
    assert "must not be `None`" in errors({"hostNetwork": True}, "V1PodSpec", "spec")[0]


@pytest.mark.parametrize("folder", BUILT)
def test_objects_built_by_kustomize_match_the_schema(folder: str) -> None:
    built = shipped(folder)
    for item in built:
        if item["kind"] not in OF_THE_OPERATOR:
            assert errors(item, model_of(item), item["kind"]) == []
            cluster_wide = item["kind"].startswith("Cluster")
            assert item["metadata"].get("namespace") == (None if cluster_wide else "kube-system")
    assert len({(item["kind"], item["metadata"]["name"]) for item in built}) == len(built)


@pytest.mark.parametrize("folder", ["overlays/beside-kube-proxy", "overlays/replace-kube-proxy"])
def test_the_overlays_use_the_config_map_of_kube_proxy_and_create_no_config_map(folder: str) -> None:
    built = {item["kind"]: item for item in shipped(folder)}
    assert "ConfigMap" not in built
    volumes = {volume["name"]: volume for volume in built["DaemonSet"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == "kube-proxy"


def test_the_overlay_beside_kube_proxy_has_its_own_names_labels_and_ports_but_no_init_container() -> None:
    shadow = {item["kind"]: item for item in shipped("overlays/beside-kube-proxy")}
    proxy = {item["kind"]: item for item in shipped("overlays/replace-kube-proxy")}
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
    assert asked == {dry_run.OTHER_PORTS[health.port]}


def own_configuration(objects: list[Object]) -> Mapping[str, str]:
    """The settings in the built objects of the overlay own-configuration; the key is the name of the setting in cluster.env."""
    built = {item["kind"]: item for item in objects}
    daemon_set, config_map = built["DaemonSet"], built["ConfigMap"]
    volumes = {volume["name"]: volume for volume in daemon_set["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    files = {f"/var/lib/kube-proxy/{file}": text for file, text in config_map["data"].items()}
    config = load.load(container["command"][1:], hostname="node-1", read_file=lambda path: files[path].encode())
    assert (config.notices, config.without_effect) == ((), ())
    file, kubeconfig = (yaml.safe_load(config_map["data"][name]) for name in ("config.conf", "kubeconfig.conf"))
    assert file["clientConnection"]["kubeconfig"] in files
    return {
        "apiServer": kubeconfig["clusters"][0]["cluster"]["server"],
        "clusterCIDR": file["clusterCIDR"],
        "scheduler": file["ipvs"]["scheduler"],
        "rulesBackend": file["ipvsproxy"]["rulesBackend"],
        "vipBinding": file["ipvsproxy"]["vipBinding"],
        "metricsBindAddress": file["metricsBindAddress"],
        "maxUnavailable": daemon_set["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"],
    }


def test_each_setting_in_cluster_env_reaches_the_built_objects(manifests: pathlib.Path) -> None:
    settings = manifests / "overlays/own-configuration/cluster.env"
    before = dict(re.findall(r"^(\w+)=(.+)$", settings.read_text(), re.MULTILINE))
    assert own_configuration(shipped("overlays/own-configuration")) == before
    settings.write_text("".join(f"{name}={value}\n" for name, value in OTHER_SETTINGS.items()))
    assert own_configuration(build("overlays/own-configuration", manifests)) == OTHER_SETTINGS


def test_a_changed_configuration_renames_its_config_map_so_that_the_pods_are_replaced(manifests: pathlib.Path) -> None:
    settings = manifests / "overlays/own-configuration/cluster.env"
    settings.write_text(settings.read_text().replace("scheduler=rr", "scheduler=wrr"))
    both = shipped("overlays/own-configuration") + build("overlays/own-configuration", manifests)
    assert len({item["metadata"]["name"] for item in both if item["kind"] == "ConfigMap"}) == 2


def test_the_command_in_the_platforms_page_prints_the_name_of_the_config_map_that_the_cleanup_job_needs(
    tmp_path: pathlib.Path,
) -> None:
    built = {item["kind"]: item for item in shipped("overlays/own-configuration")}
    page = (MANIFESTS.parent / "docs/platforms.md").read_text()
    (path,) = re.findall(r"`kubectl -n kube-system get daemonset ipvsproxy -o jsonpath='(.+)'`", page)
    (tmp_path / "daemonset.yaml").write_text(yaml.safe_dump(built["DaemonSet"]))
    command = ("kubectl", "patch", "--local", "-f", str(tmp_path / "daemonset.yaml"), "-p", "{}", "-o", f"jsonpath={path}")
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == built["ConfigMap"]["metadata"]["name"]


def test_removing_the_comment_signs_in_the_overlay_own_configuration_enables_its_components(manifests: pathlib.Path) -> None:
    overlay = manifests / "overlays/own-configuration/kustomization.yaml"
    text = overlay.read_text()
    offered = re.findall(r"^# (components:|  - ../../components/.+)$", text, re.MULTILINE)
    assert [one.rpartition("/")[2] for one in offered] == ["components:", "labelled-nodes", "selinux", "nftables-only"]
    overlay.write_text(re.sub(r"^# (components:|  - ../../components/)", r"\1", text, flags=re.MULTILINE))
    built = build("overlays/own-configuration", manifests)
    assert own_configuration(built) == own_configuration(shipped("overlays/own-configuration"))
    (daemon_set,) = (item for item in built if item["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["service-proxy"] == "ipvsproxy"
    assert pod["containers"][0]["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert "xtables-lock" not in {volume["name"] for volume in pod["volumes"]}


def base_with(manifests: pathlib.Path, *components: str) -> list[Object]:
    """The objects of the base with these kustomize components."""
    (manifests / "chosen").mkdir()
    names = [f"../components/{name}" for name in components]
    (manifests / "chosen/kustomization.yaml").write_text(yaml.safe_dump({"resources": ["../base"], "components": names}))
    built = build("chosen", manifests)
    assert [error for item in built for error in errors(item, model_of(item), item["kind"])] == []
    return built


def test_each_kustomize_component_makes_the_change_that_its_name_says(manifests: pathlib.Path) -> None:
    built = base_with(manifests, "labelled-nodes", "selinux", "nftables-only")
    (daemon_set,) = (item for item in built if item["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "service-proxy": "ipvsproxy"}
    (container,), (prepare,) = pod["containers"], pod["initContainers"]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert paths == {"/lib/modules"}
    mounted = {mount["name"] for each in (container, prepare) for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} == {"config", "modules", "scratch"}


@pytest.mark.parametrize("folder", [folder for folder in BUILT if folder != "monitoring"])
def test_a_digest_in_the_image_component_applies_to_the_image_of_every_container(manifests: pathlib.Path, folder: str) -> None:
    pinned = f"registry.example.com/ipvsproxy:0.1.0@sha256:{'0' * 64}"
    with (manifests / "components/image/kustomization.yaml").open("a") as file:
        file.write(f"    newName: registry.example.com/ipvsproxy\n    digest: sha256:{'0' * 64}\n")
    templates = [item["spec"]["template"]["spec"] for item in build(folder, manifests) if item["kind"] in RUNS]
    images = [one["image"] for pod in templates for one in (*pod.get("initContainers", ()), *pod["containers"])]
    assert set(images) == {pinned}


def test_the_role_for_fleet_has_two_rights_in_one_namespace_and_is_bound_to_no_one(manifests: pathlib.Path) -> None:
    (role,) = (item for item in base_with(manifests, "fleet") if item["metadata"]["name"] == "ipvsproxy-fleet")
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "kube-system")
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [(["pods"], ["list"]), (["pods/proxy"], ["get"])]


@pytest.mark.parametrize("folder", ["cleanup", "overlays/cleanup-on-all-nodes"])
def test_the_component_for_hosts_with_selinux_can_be_added_to_the_cleanup_job(manifests: pathlib.Path, folder: str) -> None:
    with (manifests / "cleanup/kustomization.yaml").open("a") as file:
        file.write("  - ../components/selinux\n")
    (built,) = build(folder, manifests)
    assert errors(built, model_of(built), built["kind"]) == []
    pod = built["spec"]["template"]["spec"]
    (cleaning,) = (one for one in (*pod.get("initContainers", ()), *pod["containers"]) if "args" in one)
    assert cleaning["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


def test_the_cleanup_of_all_nodes_runs_the_container_of_the_cleanup_job_as_an_init_container() -> None:
    (job,), (daemon_set,) = shipped("cleanup"), shipped("overlays/cleanup-on-all-nodes")
    one, all_nodes = job["spec"]["template"]["spec"], daemon_set["spec"]["template"]["spec"]
    assert all_nodes["initContainers"] == one["containers"]
    assert all_nodes["volumes"] == one["volumes"]
    assert (one["nodeName"], job["metadata"]["name"]) == ("NODE", "ipvsproxy-cleanup")
    assert (daemon_set["kind"], daemon_set["metadata"]["name"]) == ("DaemonSet", "ipvsproxy-cleanup")
    assert daemon_set["spec"]["selector"]["matchLabels"] == daemon_set["spec"]["template"]["metadata"]["labels"]
    proxy = {item["kind"]: item for item in shipped("base")}["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert not proxy.items() <= daemon_set["spec"]["template"]["metadata"]["labels"].items()
    (waiting,) = all_nodes["containers"]
    assert waiting["image"] == all_nodes["initContainers"][0]["image"]
    assert waiting["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_kustomize_builds_a_dashboard_and_alerts_with_the_chosen_runbook_url(
    manifests: pathlib.Path,
) -> None:
    settings = manifests / "monitoring/kustomization.yaml"
    before = settings.read_text()
    changed = before.replace(
        "runbook=https://git.example.com/ipvsproxy/docs/runbook.md", "runbook=https://wiki.example.com/on-call"
    )
    assert changed != before
    settings.write_text(changed + "components:\n  - ../components/scraped-as-kube-proxy\n")
    built = {item["kind"]: item for item in build("monitoring", manifests)}
    rules = [rule for group in built["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example.com/on-call#{rule['alert'].lower()}"
    (endpoint,) = built["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert [one["targetLabel"] for one in endpoint["relabelings"]] == ["node", "job"]
    assert endpoint["relabelings"][1]["replacement"] == "kube-proxy"
    dashboard = built["ConfigMap"]
    assert dashboard["metadata"]["name"] == "ipvsproxy-dashboard"
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["ipvsproxy.json"]) == json.loads((MANIFESTS / "monitoring/dashboard.json").read_text())
