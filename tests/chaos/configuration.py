"""The program's configuration file, and the flags beside it."""

import json
from pathlib import Path

SCHEDULERS = ("rr", "lc")
"""The usual scheduler, and that of the reload."""
_KUBECONFIG = "--kubeconfig="


class Configuration:
    """``flags`` name the file and the cluster. ``scheduler`` is the one in the file."""

    def __init__(self, directory: Path, cluster_flag: str) -> None:
        self._path = directory / "config.json"
        # A kubeconfig counts only in the file; manifests and the node's name also count beside it.
        self._kubeconfig = cluster_flag.removeprefix(_KUBECONFIG) if cluster_flag.startswith(_KUBECONFIG) else ""
        beside = () if self._kubeconfig else (cluster_flag,)
        self.flags = (f"--config={self._path}", "--hostname-override=node-a", *beside)
        self.write(SCHEDULERS[0])

    def write(self, scheduler: str) -> None:
        """Replace the file by one rename."""
        self.scheduler = scheduler
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "ipvs",
            "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
            "conntrack": {"maxPerCore": 0},
            "ipvs": {"scheduler": scheduler},
            "clientConnection": {"kubeconfig": self._kubeconfig},
        }
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(document))
        draft.rename(self._path)
