"""scripts/try-on-kind with stand-ins for kind, kubectl and docker: the commands, their arguments, and the printed lines.

The stand-in for kubectl runs the real kustomize to build the manifests. A real kind cluster is not tested, because no container
engine is available.
"""

import os
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from ipvsproxy.config import load
from scripts.kernels import control

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/try-on-kind"
IMAGE = "docker.io/library/ipvsproxy:0.1.0"
DOCKER = """\
#!/bin/bash
echo "docker $*" >>{folder}/calls
[[ $1 != image || -e {folder}/image-exists ]]
"""
KIND = """\
#!/bin/bash
echo "kind $*" >>{folder}/calls
[[ $1 != create ]] || cat >{folder}/cluster.yaml
"""
KUBECTL = """\
#!/bin/bash
echo "kubectl $*" >>{folder}/calls
[[ $1 == --context && $2 == kind-ipvsproxy ]] || exit 9
shift 2
case " $* " in
    *" {failing} "*) exit 1 ;;
    " apply -k "*) exec {kubectl} kustomize "${{!#}}" >{folder}/applied.yaml ;;
    *" get pods "*" -o name "*) echo pod/ipvsproxy-a pod/ipvsproxy-b ;;
    *" get service kubernetes "*) echo 10.96.0.1 ;;
    *" get service kube-dns "*) echo 10.96.0.10 ;;
esac
"""
NOTHING = "nothing fails"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which brings kustomize, is not installed")


class Trial:
    """One run of ``scripts/try-on-kind``, with stand-ins for kubectl and for the given ``tools``.

    The stand-ins record their calls in ``folder``. A stand-in fails if its command line contains ``failing``.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *options: str,
        failing: str = NOTHING,
        tools: tuple[str, ...] = ("docker", "kind"),
        script: pathlib.Path = SCRIPT,
    ) -> None:
        self._folder, binaries = folder, folder / "bin"
        binaries.mkdir()
        texts = {"docker": DOCKER, "kind": KIND, "kubectl": KUBECTL}
        for name in (*tools, "kubectl"):
            text = texts[name].format(folder=folder, kubectl=shutil.which("kubectl"), failing=failing)
            control.write_program(binaries / name, text)
        for name in ("bash", "basename", "cat", "cp", "dirname", "mktemp", "rm", "sed"):
            (binaries / name).symlink_to(shutil.which(name) or name)
        environment = {"PATH": str(binaries), "HOME": os.environ["HOME"], "TMPDIR": str(folder)}
        done = subprocess.run((script, *options), env=environment, capture_output=True, text=True, check=False)
        self.status, self.said = done.returncode, done.stdout + done.stderr

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def called(self, start: str) -> bool:
        return any(call.startswith(start) for call in self.calls)

    def read(self, name: str) -> list[Any]:
        return list(yaml.safe_load_all((self._folder / name).read_text()))


def test_the_trial_on_kind_creates_a_cluster_without_kube_proxy_and_applies_our_manifests(tmp_path: pathlib.Path) -> None:
    trial = Trial(tmp_path)
    assert trial.status == 0, trial.said
    (cluster,) = trial.read("cluster.yaml")
    assert cluster["networking"] == {"kubeProxyMode": "none", "podSubnet": "10.244.0.0/16"}
    applied = {item["kind"]: item for item in trial.read("applied.yaml")}
    (container,) = applied["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert IMAGE.endswith(f"/{container['image']}")
    files = {f"/var/lib/kube-proxy/{name}": text.encode() for name, text in applied["ConfigMap"]["data"].items()}
    config = load.load(container["command"][1:], hostname="node-1", read_file=files.__getitem__)
    assert (config.notices, config.without_effect) == ((), ())
    assert yaml.safe_load(files["/var/lib/kube-proxy/config.conf"])["conntrack"] == {"maxPerCore": 0}
    server = yaml.safe_load(files["/var/lib/kube-proxy/kubeconfig.conf"])["clusters"][0]["cluster"]["server"]
    assert server == "https://ipvsproxy-control-plane:6443"


def test_the_trial_on_kind_uses_the_loaded_image_although_the_manifests_name_a_registry(tmp_path: pathlib.Path) -> None:
    shutil.copytree(ROOT / "manifests", tmp_path / "copy/manifests")
    (tmp_path / "copy/scripts").mkdir()
    base = tmp_path / "copy/manifests/components/image/kustomization.yaml"
    named = "  - name: ipvsproxy\n"
    assert named in base.read_text()
    base.write_text(base.read_text().replace(named, f"{named}    newName: registry.example.com/ipvsproxy\n"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "copy")
    trial = Trial(tmp_path, script=pathlib.Path(shutil.copy(SCRIPT, tmp_path / "copy/scripts")))
    assert trial.status == 0, trial.said
    (daemon_set,) = (item for item in trial.read("applied.yaml") if item["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    assert {one["image"] for one in (*pod["initContainers"], *pod["containers"])} == {"ipvsproxy:0.1.0"}
    assert "registry.example.com" in base.read_text(), "the repository's own manifests stay"


def test_the_trial_on_kind_loads_the_image_then_applies_manifests_then_checks_every_node(tmp_path: pathlib.Path) -> None:
    trial = Trial(tmp_path)
    order = [f"docker build -t {IMAGE}", "kind load image-archive", "kubectl --context kind-ipvsproxy apply -k"]
    order += [f"kubectl --context kind-ipvsproxy -n kube-system exec pod/ipvsproxy-{node} " for node in "ab"]
    found = [next(number for number, call in enumerate(trial.calls) if call.startswith(start)) for start in order]
    assert found == sorted(found)
    for node in "ab":
        inside = [call for call in trial.calls if f"exec pod/ipvsproxy-{node} " in call]
        assert [word for call in inside for word in ("10.96.0.1'", "10.96.0.10'", "ipvsproxy verify") if word in call] == [
            "10.96.0.1'",
            "10.96.0.10'",
            "ipvsproxy verify",
        ]


def test_an_image_that_already_exists_is_not_built(tmp_path: pathlib.Path) -> None:
    (tmp_path / "image-exists").touch()
    trial = Trial(tmp_path)
    assert trial.called("docker save")
    assert not trial.called("docker build")


def test_a_missing_tool_is_reported_and_no_command_runs(tmp_path: pathlib.Path) -> None:
    trial = Trial(tmp_path, tools=())
    assert trial.status == 2
    assert "missing: kind, docker or podman." in trial.said
    assert trial.calls == []


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("rollout status daemonset/ipvsproxy", "not ready on every node"),
        ("create_connection(('10.96.0.1', 443), 5)", "pod/ipvsproxy-a: no connection to default/kubernetes at 10.96.0.1"),
        ("ipvsproxy verify", "pod/ipvsproxy-a: the kernel is not in its desired state"),
    ],
)
def test_the_script_ends_with_status_1_and_keeps_the_cluster_if_a_command_fails(
    tmp_path: pathlib.Path, failing: str, said: str
) -> None:
    trial = Trial(tmp_path, failing=f'"*"{failing}"*"')
    assert trial.status == 1
    assert said in trial.said
    assert not trial.called("kind delete")
    assert trial.called("kubectl --context kind-ipvsproxy logs") is ("not ready" in said)


def test_the_trial_with_migration_starts_kube_proxy_in_ipvs_mode_and_does_not_install_ipvsproxy(tmp_path: pathlib.Path) -> None:
    trial = Trial(tmp_path, "--migration")
    assert trial.status == 0
    assert trial.read("cluster.yaml")[0]["networking"]["kubeProxyMode"] == "ipvs"
    assert trial.called("kind load image-archive")
    assert not trial.called("kubectl")
    assert "docs/migration.md" in trial.said


def test_the_delete_option_deletes_only_the_cluster_of_the_trial(tmp_path: pathlib.Path) -> None:
    assert Trial(tmp_path, "--delete").calls == ["kind delete cluster --name ipvsproxy"]


def test_an_unknown_option_of_the_trial_is_refused(tmp_path: pathlib.Path) -> None:
    trial = Trial(tmp_path, "--keep")
    assert (trial.status, trial.calls) == (2, [])
    assert "--migration and --delete exist" in trial.said
