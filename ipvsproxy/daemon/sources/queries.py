"""The API objects that a node needs, and the URLs of their lists and watches."""

import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.model.service import ObjectKind, ServiceName

PAGE_ITEMS = 500
"""The number of objects in a page, and in a part of a list from the watch cache. The watch cache may ignore this limit, and send
the whole list as one page."""
ANY_VERSION, LATEST = "0", ""


class Resource(NamedTuple):
    """The URL path of the objects of one kind, and the selectors for the objects that this node needs.

    ``cluster_object`` is set only for a kind without namespaces. It is the name of the object that ``probe_query`` asks for; this
    object does not have to exist.
    """

    path: str
    label_selector: str = ""
    field_selector: str = ""
    cluster_object: str = ""

    def list_query(self, version: str, *, limit: int, continue_token: str = "") -> str:
        """The query for one page of a list; a ``limit`` of 0 means all objects.

        ``version`` is ``LATEST``, ``ANY_VERSION``, or the oldest version that the answer may have. If ``version`` is the oldest
        version that the answer may have, ``limit`` must be 0. With a limit, the server would treat ``version`` as an exact
        version.
        """
        return self._query({"limit": str(limit) if limit else "", "continue": continue_token, "resourceVersion": version})

    def of_service(self, name: ServiceName) -> "Resource":
        """The resource for the EndpointSlices of one Service; call this method only on the resource for all EndpointSlices."""
        parent, _, plural = self.path.rpartition("/")
        label = f"kubernetes.io/service-name={name.name},{self.label_selector}"
        return Resource(f"{parent}/namespaces/{urllib.parse.quote(name.namespace, safe='')}/{plural}", label)

    def probe_query(self, version: str) -> str:
        """The query for at most one object. The server answers from its watch cache, and only if it has reached ``version``.

        The query names the object (and its namespace, if the kind has namespaces), so that the cache finds the object without a
        scan. The object does not have to exist.
        """
        parent, _, plural = self.path.rpartition("/")
        path = self.path if self.cluster_object else f"{parent}/namespaces/default/{plural}"
        selector = f"metadata.name={self.cluster_object or 'kubernetes'}"
        return Resource(path, field_selector=selector).list_query(version, limit=0)

    def watch_query(self, version: str, timeout_s: float) -> str:
        """The query for all changes after a given version.

        The query requests that the server end the watch after ``timeout_s``.
        """
        timeout = str(max(1, round(timeout_s)))
        return self._query({"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": timeout})

    def _query(self, parameters: Mapping[str, str]) -> str:
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        given = {name: value for name, value in {**selectors, **parameters}.items() if value}
        return f"{self.path}?{urllib.parse.urlencode(given)}"


def watched(node_name: str, *, all_nodes: bool = False) -> Mapping[ObjectKind, Resource]:
    """The resources that the proxy of a node watches, with the same selectors as kube-proxy (``cmd/kube-proxy/app/server.go``).

    With ``all_nodes``, the Nodes of other nodes are watched as well.
    """
    return {
        ObjectKind.SERVICE: Resource("/api/v1/services", "!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
        ObjectKind.ENDPOINT_SLICE: Resource("/apis/discovery.k8s.io/v1/endpointslices", "!service.kubernetes.io/headless"),
        ObjectKind.NODE: Resource(
            "/api/v1/nodes", field_selector="" if all_nodes else f"metadata.name={node_name}", cluster_object=node_name
        ),
    }
