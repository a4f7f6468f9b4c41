"""The program's configuration file, and the flags that are used with this file."""

import json
from pathlib import Path

from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding

OTHER_BINDING = {Binding.ADDRESSES: Binding.ROUTES, Binding.ROUTES: Binding.ADDRESSES}
SCHEDULERS = ("rr", "lc")
"""The usual scheduler, and the scheduler after a reload."""
_KUBECONFIG = "--kubeconfig="


class Configuration:
    """``flags`` name the file and the cluster. ``scheduler``, ``binding`` and ``backend`` are the present values in the file.

    With the first of the two ``SCHEDULERS``, the file has the usual ``binding``. With the second scheduler, the file has the
    other ``binding``, so a change of ``scheduler`` also changes ``binding``.
    """

    def __init__(
        self,
        directory: Path,
        cluster_flag: str,
        binding: Binding = Binding.ADDRESSES,
        backend: Backend = Backend.IPTABLES,
        *,
        direct_return: bool = False,
    ) -> None:
        self.direct_return = direct_return
        self._usual_binding = binding
        self.backend = backend
        self._path = directory / "config.json"
        # If there is a configuration file, the program ignores ``--kubeconfig``, but not ``--manifests`` and
        # ``--hostname-override``.
        self._kubeconfig = cluster_flag.removeprefix(_KUBECONFIG) if cluster_flag.startswith(_KUBECONFIG) else ""
        beside = () if self._kubeconfig else (cluster_flag,)
        self.flags = (f"--config={self._path}", "--hostname-override=node-a", *beside)
        self.write(SCHEDULERS[0])

    def move(self, backend: Backend) -> None:
        """Replace the file by a file in which ``rulesBackend`` is this backend."""
        self.backend = backend
        self.write(self.scheduler)

    def write(self, scheduler: str) -> None:
        """Replace the file atomically by a rename."""
        self.scheduler = scheduler
        self.binding = self._usual_binding if scheduler == SCHEDULERS[0] else OTHER_BINDING[self._usual_binding]
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "ipvs",
            "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
            "conntrack": {"maxPerCore": 0},
            "ipvs": {"scheduler": scheduler},
            "ipvsproxy": {
                "vipBinding": self.binding,
                "rulesBackend": self.backend,
                "trafficScopes": "api",
                "directReturn": "on" if self.direct_return else "off",
            },
            "clientConnection": {"kubeconfig": self._kubeconfig},
        }
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(document))
        draft.rename(self._path)
