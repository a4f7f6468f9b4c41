"""A cluster of one node that carries out the commands of docs/migration.md.

The commands run in a shell, and the ``kubectl`` of this shell sends each command to this process. Labels, affinity and DaemonSets
determine which programs of pods this process starts and ends. A command that is unknown to this cluster is an error. A moment
with two proxies or without a proxy is also an error.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
NODE = "worker-1"
_KUBECTL = """\
#!/bin/bash
folder=${0%/*}
case " $* " in
    *" kustomize "*) @KUSTOMIZE@ ;;
    *" apply -f - "*) cat >"$folder/given" ;;
esac
echo "$*" >"$folder/asked"
cat "$folder/answer"
"""
_WITHOUT_KUSTOMIZE = "exec cat manifests/cleanup/job.yaml"
"""The command that replaces kustomize on a machine without kubectl. The command prints the manifest of the cleanup Job, whatever
folder is to be built. This is enough, because each folder that docs/migration.md builds contains the container of this Job (see
``tests/test_kustomize.py``)."""
_OTHER_TOOLS = {"ipvsproxy": f'#!/bin/sh\nexec {sys.executable} -m ipvsproxy "$@"\n', "sleep": "#!/bin/sh\n"}
_POD_LABELS = {"app.kubernetes.io/component=proxy": "replace-kube-proxy", "k8s-app=kube-proxy": "kube-proxy"}
"""For each label of pods, the DaemonSet whose pods have this label."""


class Pod(NamedTuple):
    """A pod on the node; the pod's program is ipvsproxy or kube-proxy.

    ``daemon_set`` is ``kube-proxy``, or the name of the kustomize overlay that contains the pod's DaemonSet.
    """

    daemon_set: str
    is_ours: bool

    @property
    def is_shadow(self) -> bool:
        """Whether the program only compares, and changes nothing."""
        return self.daemon_set == "beside-kube-proxy"


class KubeProxy(NamedTuple):
    """The DaemonSet ``kube-proxy``.

    ``is_ours`` means that its program is ipvsproxy. If a node's label ``service-proxy`` has a value in ``avoided``, the DaemonSet
    runs no pod on the node.
    """

    is_ours: bool = False
    avoided: tuple[str, ...] = ()

    def patched(self, patch: dict[str, Any]) -> "KubeProxy":
        """The DaemonSet after a strategic merge of this patch."""
        pod = patch["spec"]["template"]["spec"]
        if "affinity" not in pod:
            (container,) = pod["containers"]
            return self._replace(is_ours=container["command"][0] == "ipvsproxy")
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (expression,) = term["matchExpressions"]
        assert (expression["key"], expression["operator"]) == ("service-proxy", "NotIn")
        return self._replace(avoided=tuple(expression["values"]))


class OneNode:
    """The cluster.

    ``start`` makes the program of a pod ready, and returns the function that ends it. ``clean_up`` gets the YAML text of a Job or
    DaemonSet, and runs the cleanup command of this object. ``config_map`` is the file in kube-proxy's ConfigMap, and ``log`` is
    the log file of the shadow (``--dry-run``).
    """

    def __init__(
        self,
        folder: Path,
        config_map: Path,
        log: Path,
        start: Callable[[Pod], Callable[[], None]],
        clean_up: Callable[[str], None],
    ) -> None:
        self._config_map, self._log, self._start, self._clean_up = config_map, log, start, clean_up
        self._label = ""
        self._overlays: set[str] = set()
        self._kube_proxy = [KubeProxy()]
        self._pods: dict[Pod, Callable[[], None]] = {}
        self._folder, self._tools = folder, folder / "tools"
        self._tools.mkdir(parents=True)
        (folder / "manifests").symlink_to(ROOT / "manifests")
        real = shutil.which("kubectl")
        kubectl = _KUBECTL.replace("@KUSTOMIZE@", f'exec {real} "$@"' if real else _WITHOUT_KUSTOMIZE)
        for name, text in {"kubectl": kubectl, **_OTHER_TOOLS}.items():
            (self._tools / name).write_text(text)
            (self._tools / name).chmod(0o755)
        for name in ("asked", "answer"):
            os.mkfifo(self._tools / name)
        self._run_pods()

    def close(self) -> None:
        """End the programs of all pods."""
        while self._pods:
            self._pods.popitem()[1]()

    @property
    def pods(self) -> set[Pod]:
        """The pods of the node."""
        return set(self._pods)

    def type_in(self, commands: str) -> str:
        """Run commands in one shell; return their output.

        Raises:
            AssertionError: a command failed, or asked for something that this cluster cannot do.
        """
        path = f"{self._tools}:{os.environ['PATH']}"
        script = f"trap 'echo failed: $BASH_COMMAND' ERR\n{commands}"
        with tempfile.TemporaryFile() as output, (self._tools / "asked").open("r+b", buffering=0) as asked:
            shell = subprocess.Popen(
                # without pipefail, like an operator's shell; otherwise a pipe into head could fail
                ("bash", "-eEu", "-c", script),
                cwd=self._folder,
                env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while shell.poll() is None:
                    if select.select([asked], [], [], 0.05)[0]:
                        answer = self._answer(*asked.readline().decode().replace("-n kube-system ", "").split())
                        (self._tools / "answer").write_text(answer)
            finally:
                with contextlib.suppress(ProcessLookupError):  # the shell may have ended by itself
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
            output.seek(0)
            said = output.read().decode()
        assert shell.returncode == 0, said
        return said

    def _answer(self, *words: str) -> str:
        """Carry out a command of kubectl; return its output.

        Commands that wait, such as ``rollout status``, return at once, because each change is complete at once.
        """
        match words:
            case "get", "configmap", "kube-proxy", "-o", _:
                return self._config_map.read_text()
            case "get", "nodes", "-l", selector, "-o", _:
                is_meant = {"kubernetes.io/os=linux,!service-proxy": "", "service-proxy=ipvsproxy": "ipvsproxy"}[selector]
                return NODE if self._label == is_meant else ""
            case "get", "pods", "-l", label, "--field-selector", where, "-o", "name":
                return self._pods_with(label, where)
            case "get", "pods", "-o", "wide", "--field-selector", where:
                return self._pods_with("", where)
            case "logs", "-l", "app.kubernetes.io/component=shadow", *_:
                return self._log.read_text()
            case "wait", "pod", "-l", label, "--field-selector", where, "--for=condition=Ready", _:
                assert self._pods_with(label, where)
            case ("rollout", "status", _) | ("delete", "job", *_) | ("wait", "--for=condition=complete", *_):
                pass
            case _:
                self._change(*words)
                self._run_pods()
        return ""

    def _pods_with(self, label: str, where: str) -> str:
        assert where == f"spec.nodeName={NODE}"
        names = [pod.daemon_set for pod in self._pods if not label or pod.daemon_set == _POD_LABELS[label]]
        return "".join(f"pod/{name}\n" for name in names)

    def _change(self, *words: str) -> None:
        match words:
            case "patch", "daemonset", "kube-proxy", "--patch-file", file:
                patch = yaml.safe_load((self._folder / file).read_text())
                self._kube_proxy.append(self._kube_proxy[-1].patched(patch))
            case "rollout", "undo", "daemonset/kube-proxy":
                self._kube_proxy.append(self._kube_proxy[-2])
            case "apply", "-k", folder:
                self._overlays.add(self._overlay(folder))
            case "delete", "-k", folder:
                self._overlays.discard(self._overlay(folder))
            case "label", "node", node, label:
                key, _, self._label = label.removesuffix("-").partition("=")
                assert (node, key) == (NODE, "service-proxy")
            case "apply", "-f", "-":
                self._clean_up((self._tools / "given").read_text())
            case _:
                raise AssertionError(f"not known: kubectl {' '.join(words)}")

    def _overlay(self, folder: str) -> str:
        path = self._folder / folder
        assert (path / "kustomization.yaml").exists()
        return path.name

    def _run_pods(self) -> None:
        """End the programs of pods that should not run, and then start the programs of other pods, as a DaemonSet does."""
        kube_proxy = self._kube_proxy[-1]
        wanted = [Pod("kube-proxy", kube_proxy.is_ours)] if self._label not in kube_proxy.avoided else []
        if self._label == "ipvsproxy" and "replace-kube-proxy" in self._overlays:
            wanted.append(Pod("replace-kube-proxy", is_ours=True))
        assert len(wanted) == 1, f"{len(wanted)} proxies on one node"
        if "beside-kube-proxy" in self._overlays:
            wanted.append(Pod("beside-kube-proxy", is_ours=True))
        for pod in [one for one in self._pods if one not in wanted]:
            self._pods.pop(pod)()
        for pod in [one for one in wanted if one not in self._pods]:
            self._pods[pod] = self._start(pod)
