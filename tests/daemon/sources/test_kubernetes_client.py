"""Covers the imported parts of kubernetes-asyncio, their use, and versions that cannot be imported in parts."""

import base64
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import test_utils, web  # noqa: TID251  # an issuer of tokens

from tests.daemon.sources.test_rotation import Mutual
from tests.support import api_server
from tests.support.api_server import ApiServer
from tests.support.api_store import SERVICES
from tests.support.following import following, service


def run(program: str, *, path: str = "") -> Any:
    """Run a program in an interpreter of its own, with ``path`` before its path; returns the JSON that it prints."""
    program = f"import json, sys\nsys.path.insert(0, {path!r})\n{program}" if path else f"import json, sys\n{program}"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_no_model_or_api_of_the_client_is_imported(tmp_path: pathlib.Path) -> None:
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", user={"token": "x"})
    loaded = run(f"""
import asyncio
import ipvsproxy.daemon.app
from ipvsproxy.daemon.sources import watch
asyncio.run(watch.KubernetesSource(node_name="node-a", kubeconfig={kubeconfig!r}).check())
print(json.dumps([name for name in sys.modules if name.startswith("kubernetes_asyncio")]))
""")
    assert "kubernetes_asyncio.config.kube_config" in loaded
    assert [name for name in loaded if "client.models" in name or "client.api" in name] == []
    assert len(loaded) < 20


def test_other_importers_of_the_library_get_all_of_it() -> None:
    assert run("""
from ipvsproxy.daemon.sources import kubernetes_client
import kubernetes_asyncio
from kubernetes_asyncio.client import ApiClient, V1Service, models
from kubernetes_asyncio.client.api_client import ApiClient as its_own
whole = [ApiClient is its_own, models.V1Service is V1Service, kubernetes_asyncio.__version__ > "30"]
print(json.dumps([*whole, kubernetes_client.Configuration is kubernetes_asyncio.client.Configuration]))
""") == [True, True, True, True]


def test_a_library_that_is_already_loaded_is_used() -> None:
    assert run("""
import kubernetes_asyncio
from ipvsproxy.daemon.sources import kubernetes_client
print(json.dumps(kubernetes_client.Configuration is kubernetes_asyncio.client.Configuration))
""")


FILES = {
    "__init__.py": "from kubernetes_asyncio import client",
    "client/__init__.py": """
class Base: pass
from kubernetes_asyncio.client.configuration import Configuration
class V2Token: pass
""",
    "client/configuration.py": "class Configuration: pass",
    "client/rest.py": "class RESTClientObject: pass",
    "config/__init__.py": "",
    "config/config_exception.py": "class ConfigException(Exception): pass",
    "config/incluster_config.py": "class InClusterConfigLoader: pass",
    "config/kube_config.py": "class KubeConfigLoader: pass",
}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config/kube_config.py", "from kubernetes_asyncio.client import V2Token\nclass KubeConfigLoader: token = V2Token"),
        ("config/kube_config.py", "from kubernetes_asyncio import client\nclass KubeConfigLoader: token = client.V2Token"),
        ("client/configuration.py", "from kubernetes_asyncio.client import Base\nclass Configuration(Base): pass"),
    ],
    ids=["a model is imported", "a model is used", "its modules import each other"],
)
def test_a_library_that_cannot_be_imported_in_parts_is_imported_whole(file: str, content: str, tmp_path: pathlib.Path) -> None:
    for name, text in (FILES | {file: content}).items():
        path = tmp_path / "kubernetes_asyncio" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert run(
        """
from ipvsproxy.daemon.sources import kubernetes_client
import kubernetes_asyncio.client
print(json.dumps([kubernetes_client.Configuration is kubernetes_asyncio.client.Configuration]))
""",
        path=str(tmp_path),
    )[0]


# Sources of credentials that test_credentials and test_rotation do not cover


@pytest.mark.parametrize("by_plugin", [False, True])
async def test_a_client_certificate_of_the_kubeconfig_itself_or_of_a_plugin_is_used(
    tmp_path: pathlib.Path, *, by_plugin: bool
) -> None:
    certificates = Mutual(tmp_path / "tls")
    certificate, key = (certificates.directory / name for name in ("server.crt", "server.key"))
    plugin = tmp_path / "plugin.json"
    version = "client.authentication.k8s.io/v1"
    status = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
    plugin.write_text(json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status}))
    user: dict[str, Any] = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
    if by_plugin:
        user = {"exec": {"apiVersion": version, "command": "cat", "args": [str(plugin)]}}
    async with ApiServer(tls=certificates) as server:
        server.put(SERVICES, service("web"))
        kubeconfig = api_server.write_kubeconfig(
            tmp_path / "kubeconfig", server.url, authority=str(certificates.authority), user=user
        )
        async with following(server, kubeconfig) as running:
            await running.sink.until(running.sink.has("web"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of aiohttp, for how the library calls it
async def test_a_token_of_an_issuer_is_refreshed(tmp_path: pathlib.Path) -> None:
    async def describe(request: web.Request) -> web.Response:
        return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})

    async def refresh(request: web.Request) -> web.Response:
        assert (await request.post())["refresh_token"] == "old"
        return web.json_response({"id_token": "fresh", "refresh_token": "next"})

    issuer = web.Application()
    issuer.router.add_get("/.well-known/openid-configuration", describe)
    issuer.router.add_post("/token", refresh)
    async with test_utils.TestServer(issuer) as issuing, ApiServer(token="fresh") as server:
        config = {"client-id": "us", "client-secret": "x", "idp-issuer-url": str(issuing.make_url("/")), "refresh-token": "old"}
        user = {"auth-provider": {"name": "oidc", "config": config}}
        server.put(SERVICES, service("web"))
        kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", server.url, user=user)
        async with following(server, kubeconfig) as running:
            await running.sink.until(running.sink.has("web"))
