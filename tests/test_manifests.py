"""Manifests and Containerfile agree with the program: flags, configuration, ports, permissions, image.

The module tests/test_kustomize.py checks manifests with kustomize and the API's schema. The tests do not cover how a cluster
treats the objects, for example whether a cluster admits a privileged pod.
"""

import importlib.metadata
import json
import pathlib
import shlex
from typing import Any

import pytest
import yaml

from ipvsproxy.config import load
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.sources import queries, watch
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.model.annotations import Annotation
from ipvsproxy.model.service import Skipped
from ipvsproxy.translate.api import fields

ROOT = pathlib.Path(__file__).parents[1]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ("beside-kube-proxy", "cleanup-on-all-nodes", "own-configuration", "replace-kube-proxy")
COMPONENTS = ("fleet", "image", "labelled-nodes", "nftables-only", "scraped-as-kube-proxy", "selinux")
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"

Object = dict[str, Any]

_NO_VOLUMES: Object = {"template": {"spec": {"volumes": []}}}


def _read(name: str) -> list[Object]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def _base() -> dict[str, Object]:
    """The objects of the base directory, by kind."""
    objects = [each for name in _kustomization("base")["resources"] for each in _read(f"base/{name}")]
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def _kustomization(folder: str) -> Object:
    (only,) = _read(f"{folder}/kustomization.yaml")
    return only


def _pod(objects: dict[str, Object]) -> Object:
    pod: Object = objects["DaemonSet"]["spec"]["template"]["spec"]
    return pod


def _container(objects: dict[str, Object]) -> Object:
    (only,) = _pod(objects)["containers"]
    assert isinstance(only, dict)
    return only


def _load(objects: dict[str, Object]) -> Config:
    """The configuration that the container's command line gives, with the files of the ConfigMap at their mount paths."""
    pod, container = _pod(objects), _container(objects)
    (folder,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "config")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "config")
    assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    files = {f"{folder}/{name}": text.encode() for name, text in objects["ConfigMap"]["data"].items()}
    config = load.load(
        [argument.replace("$(NODE_NAME)", "node-1") for argument in container["command"][1:]],
        hostname="never-asked",
        read_file=files.__getitem__,
    )
    assert config.source.kubeconfig in files
    return config


def test_every_manifest_is_valid_yaml_and_is_either_a_patch_or_listed_in_a_kustomization() -> None:
    listed = {f"base/{name}" for name in [*_kustomization("base")["resources"], "kustomization.yaml"]}
    listed |= {f"{folder}/{name}" for folder in ("cleanup", "monitoring") for name in _kustomization(folder)["resources"]}
    listed |= {"cleanup/kustomization.yaml", "monitoring/kustomization.yaml", "monitoring/rules.test.yaml"}
    listed |= {f"overlays/{name}/kustomization.yaml" for name in OVERLAYS}
    listed |= {f"components/{name}/kustomization.yaml" for name in COMPONENTS}
    listed.add("components/fleet/role.yaml")
    found = {str(path.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("*.yaml")}
    assert {name for name in found if not name.startswith(("demo/", "examples/", "patches/"))} == listed
    assert all(all(_read(name)) for name in found)


def test_the_example_objects_have_every_annotation_and_all_values_are_valid() -> None:
    objects = _read("examples/annotations.yaml")
    skipped: list[Skipped] = []
    given = {name for each in objects for name in each["metadata"]["annotations"]}
    assert given == {annotation.whole for annotation in Annotation}
    for each in objects:
        text = each["metadata"]["annotations"]
        if each["kind"] == "Service":
            fields.parse_service_annotations(text, skipped)
        else:
            assert fields.parse_slice_weight(text, skipped) == 1
    assert skipped == []


def test_the_daemon_set_selects_its_own_pods() -> None:
    spec = _base()["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_configuration_of_the_manifests_loads_without_notices() -> None:
    config = _load(_base())
    assert (config.notices, config.without_effect) == ((), ())
    assert config.node_name == "node-1"
    assert config.translation.cluster_networks


def test_the_probes_of_the_pod_use_the_configured_port() -> None:
    objects = _base()
    servers = _load(objects).servers
    assert servers.health is not None
    assert str(servers.health.address) == "0.0.0.0", "the kubelet uses the node's address"
    probes = {name: _container(objects)[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {servers.health.port}
    assert [probe["path"] for probe in probes.values()] == ["/livez", "/healthz"]


async def test_the_kubernetes_source_can_use_the_kubeconfig_of_the_manifests(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("a-token")
    text = str(_base()["ConfigMap"]["data"]["kubeconfig.conf"])
    assert f"{TOKENS}/ca.crt" in text
    # The test removes the field with the authority's certificate, because the field would need a real certificate.
    document = yaml.safe_load(text.replace(TOKENS, str(tmp_path)))
    del document["clusters"][0]["cluster"]["certificate-authority"]
    kubeconfig = tmp_path / "kubeconfig.conf"
    kubeconfig.write_text(yaml.safe_dump(document))
    source = watch.KubernetesSource(node_name="node-1", kubeconfig=str(kubeconfig))
    await source.check()
    assert source.describe() == "API server https://control-plane.example.com:6443"


def test_the_role_allows_exactly_the_requests_that_the_program_makes() -> None:
    allowed = {
        (group, resource, verb)
        for rule in _base()["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = set()
    for resource in queries.watched("node-1").values():
        # /api/v1/services, /apis/discovery.k8s.io/v1/endpointslices
        _, top, *group, _, name = resource.path.split("/")
        assert (top, len(group)) in {("api", 0), ("apis", 1)}
        asked |= {("".join(group), name, verb) for verb in ("list", "watch")}
    asked.add(("events.k8s.io", "events", "create"))
    assert allowed == asked


def test_the_role_is_bound_to_the_service_account_of_the_pods() -> None:
    objects = _base()
    account, binding = objects["ServiceAccount"]["metadata"], objects["ClusterRoleBinding"]
    assert _pod(objects)["serviceAccountName"] == account["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}]
    assert binding["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    assert {objects[kind]["metadata"]["namespace"] for kind in ("DaemonSet", "ConfigMap", "ServiceAccount")} == {"kube-system"}


def test_the_pod_runs_on_every_node() -> None:
    pod = _pod(_base())
    assert pod["hostNetwork"] is True
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert pod["priorityClassName"] == "system-node-critical"


def test_the_serving_container_has_one_capability_and_can_write_only_the_iptables_lock_of_the_host() -> None:
    # tests/test_running.py shows on a real kernel that one capability is enough.
    container = _container(_base())
    assert container["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    volumes = {volume["name"]: volume for volume in _pod(_base())["volumes"]}
    writable = [volumes[mount["name"]] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert [volume.get("hostPath", {}).get("path") for volume in writable] == ["/run/xtables.lock", None]
    assert "emptyDir" in writable[1]


def test_the_init_container_runs_the_command_of_the_serving_container_plus_the_flag_init_only() -> None:
    objects = _base()
    (prepare,) = _pod(objects)["initContainers"]
    serve = _container(objects)
    assert prepare["command"] == [*serve["command"], "--init-only"]
    assert (prepare["image"], prepare["env"]) == (serve["image"], serve["env"])
    assert prepare["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in prepare["volumeMounts"]}
    assert mounts == {"/var/lib/kube-proxy": True, "/run/xtables.lock": False, "/lib/modules": True}


def test_the_cleanup_job_accepts_options_and_has_the_privileges_of_the_serving_container() -> None:
    pod = _read("cleanup/job.yaml")[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    serving = _container(_base())
    assert (container["securityContext"], container["image"]) == (serving["securityContext"], serving["image"])
    assert (pod["hostNetwork"], pod["automountServiceAccountToken"]) == (True, False)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    configuration, *others = pod["volumes"]
    assert [volume for volume in _pod(_base())["volumes"] if volume["name"] in mounted - {"config"}] == others
    (replaced,) = (
        volume
        for patch in _kustomization("overlays/replace-kube-proxy")["patches"]
        for volume in yaml.safe_load(patch["patch"]).get("spec", _NO_VOLUMES)["template"]["spec"]["volumes"]
    )
    assert configuration == {**replaced, "configMap": {**replaced["configMap"], "optional": True}}
    assert container["volumeMounts"][0] in serving["volumeMounts"]
    assert container["args"][0] in serving["command"]
    assert _kustomization("cleanup")["components"] == _kustomization("base")["components"] == ["../components/image"]
    assert container["command"] == ["ipvsproxy", "cleanup"]
    file = _base()["ConfigMap"]["data"]["config.conf"] + "ipvsproxy: {routeProtocol: 99}\n"
    for given, dry_run in ((container["args"], False), ([*container["args"], "--dry-run=true"], True)):
        config = load.load(["--cleanup", *given], hostname="node-1", read_file=lambda _: file.encode(), command="cleanup")
        assert (config.cleanup, config.dry_run, config.drivers.route_protocol) == (True, dry_run, 99)


def test_every_mount_has_a_volume_and_every_volume_is_mounted() -> None:
    pod = _pod(_base())
    mounted = {mount["name"] for each in [*pod["initContainers"], *pod["containers"]] for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_ipvsproxy_runs_only_on_labelled_nodes_and_kube_proxy_only_on_all_other_nodes() -> None:
    patches = [yaml.safe_load(patch["patch"]) for patch in _kustomization("overlays/replace-kube-proxy")["patches"]]
    pod = next(patch for patch in patches if patch["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    (key, value), *_ = pod["nodeSelector"].items()
    (off,) = _read("patches/keep-kube-proxy-off.yaml")
    affinity = off["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": key, "operator": "NotIn", "values": [value, "none"]}]


def test_the_patched_kube_proxy_daemon_set_runs_the_same_command_as_our_own_daemon_set() -> None:
    (patch,) = _read("patches/replace-kube-proxy.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "kube-proxy", "the name of kubeadm's container; another name would add a second container"
    assert container["command"] == _container(_base())["command"]
    assert container["readinessProbe"] == _container(_base())["readinessProbe"]
    assert container["image"] == f"ipvsproxy:{importlib.metadata.version('ipvsproxy')}"


def _instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, with continued lines joined."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def test_the_containerfile_copies_only_existing_files() -> None:
    copied = [argument.split() for name, argument in _instructions() if name == "COPY" and "--from" not in argument]
    assert copied
    for *sources, _ in copied:
        assert all((ROOT / source).exists() for source in sources), sources


def test_the_image_and_the_pods_start_the_same_command_which_the_package_installs() -> None:
    (entry,) = (json.loads(argument) for name, argument in _instructions() if name == "ENTRYPOINT")
    scripts = importlib.metadata.entry_points(group="console_scripts", name=entry[0])
    assert [script.value for script in scripts] == ["ipvsproxy.cli:main"]
    assert _container(_base())["command"][0] == entry[0]


def test_the_image_has_the_version_of_the_python_package() -> None:
    version = importlib.metadata.version("ipvsproxy")
    (label,) = (argument for name, argument in _instructions() if name == "LABEL")
    labels = dict(word.split("=", 1) for word in shlex.split(label))
    assert labels["org.opencontainers.image.version"] == version
    assert labels["org.opencontainers.image.licenses"] == importlib.metadata.metadata("ipvsproxy")["License-Expression"]
    assert _kustomization("components/image")["images"] == [{"name": _container(_base())["image"], "newTag": version}]


@pytest.mark.parametrize("program", [*iptables.COMMANDS.values(), "modprobe"])
def test_the_containerfile_installs_every_program_that_ipvsproxy_starts(program: str) -> None:
    packages = {"iptables": "iptables", "ip6tables": "iptables", "modprobe": "kmod"}
    last_stage = max(at for at, (name, _) in enumerate(_instructions()) if name == "FROM")
    (install,) = (text for name, text in _instructions()[last_stage:] if name == "RUN" and "apt-get install" in text)
    assert packages[program] in install.split()


def test_the_image_checks_its_health_at_livez_on_the_default_port() -> None:
    (check,) = (argument for name, argument in _instructions() if name == "HEALTHCHECK")
    code = json.loads(check[check.index("[") :])[-1]
    compile(code, "HEALTHCHECK", "exec")
    health = load.load(["--proxy-mode=ipvs"], hostname="node-1", read_file=lambda _: b"").servers.health
    assert health is not None
    assert f"'127.0.0.1', {health.port}," in code
    assert "'/livez'" in code
