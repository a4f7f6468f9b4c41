"""Tests kubeconfig, service account, tokens, plugins and TLS over real HTTP. The tests also check that no secret is logged."""

import base64
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import structlog
import structlog.testing
import yaml
from aiohttp import test_utils, web  # noqa: TID251  # the test serves an issuer of tokens

from ipvsproxy.daemon.sources import credentials, watch
from ipvsproxy.daemon.sources.source import Trouble
from tests.daemon.sources.test_rotation import Mutual
from tests.support import api_server
from tests.support.api_server import ApiServer
from tests.support.api_store import SERVICES, Object
from tests.support.following import Sink, following, running_task, service, wait_for_trouble, web_arrives


async def test_a_rotated_token_is_read_again_after_status_401(tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    async with ApiServer(token="old") as server, following(server, tmp_path, token_file=str(token)) as running:
        await running.sink.until(lambda: running.sink.lists() == 1)
        await server.watched(SERVICES)
        server.token = "new"
        server.cut_watches(SERVICES)
        await server.asked(SERVICES, watch=False, times=2)
        token.write_text("new\n")
        server.put(SERVICES, service("web"))
        await running.sink.until(running.sink.has("web"))
        assert Trouble.UNAUTHORIZED in running.troubles()
        assert running.sink.lists() == 1


async def test_a_server_with_a_certificate_of_an_unknown_authority_receives_no_request(tmp_path: pathlib.Path) -> None:
    async with ApiServer(tls=api_server.Certificates(tmp_path)) as server:
        with structlog.testing.capture_logs() as logs:
            async with following(server, tmp_path) as running:
                await wait_for_trouble(running, Trouble.UNREACHABLE)
        assert server.requests == []
        assert "CERTIFICATE_VERIFY_FAILED" in logs[0]["error"]


async def test_the_service_account_is_used_inside_a_pod(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = api_server.Certificates(tmp_path)
    (tmp_path / "token").write_text("pod-token")
    async with ApiServer(tls=certificates, token="pod-token") as server:
        host, port = server.url.removeprefix("https://").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        server.put(SERVICES, service("web"))
        sink = Sink()
        source = watch.KubernetesSource(node_name="n1", service_account=str(tmp_path))
        await source.check()
        async with running_task(source.run(sink.deliver)):
            await sink.until(sink.has("web"))


async def test_the_master_flag_overrides_the_server_of_the_kubeconfig(tmp_path: pathlib.Path) -> None:
    async with ApiServer() as server:
        server.put(SERVICES, service("web"))
        kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", "http://192.0.2.1:1")
        sink = Sink()
        source = watch.KubernetesSource(node_name="n1", kubeconfig=kubeconfig, master=server.url + "/")
        async with running_task(source.run(sink.deliver)):
            await sink.until(sink.has("web"))


async def test_no_secret_is_logged(tmp_path: pathlib.Path) -> None:
    async with ApiServer(token="good") as server:
        user = {"token": "very-secret-token"}
        with structlog.testing.capture_logs() as logs:
            async with following(server, tmp_path, user=user) as running:
                await wait_for_trouble(running, Trouble.UNAUTHORIZED)
    assert logs
    assert "very-secret-token" not in str(logs)


def write_kubeconfig(path: pathlib.Path, url: str, **changes: Any) -> str:
    """Write a kubeconfig for a server, with ``changes`` instead of the usual values of top-level fields; return its path."""
    written = api_server.write_kubeconfig(path, url)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return written


async def refusal(path: pathlib.Path) -> str:
    """The error message of a source that refuses a kubeconfig."""
    with pytest.raises(credentials.SourceError) as raised:
        await watch.KubernetesSource(node_name="n1", kubeconfig=str(path)).check()
    return str(raised.value)


async def test_the_password_in_a_proxy_url_is_not_logged_when_the_url_is_wrong(tmp_path: pathlib.Path) -> None:
    async with ApiServer() as server:
        cluster = {"server": server.url, "proxy-url": "http://me:very-secret@127.0.0.1:99999"}
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", server.url, clusters=[{"name": "test", "cluster": cluster}])
        with structlog.testing.capture_logs() as logs:
            async with following(server, kubeconfig) as running:
                await wait_for_trouble(running, Trouble.UNREACHABLE)
                described = running.source.describe()
    assert "http://127.0.0.1:99999" in described
    assert "secret" not in described + str(logs)


# Kubeconfig files and flags that cannot work


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        ("a: b: secret", "line 1 is not YAML"),
        ("\x00", "is not YAML"),
        ("[]", "holds no configuration"),
        ("{}", "Expected key current-context in kube-config"),
        ("current-context: x\ncontexts: []\n", "Expected object with name x in kube-config/contexts list"),
    ],
)
async def test_an_unusable_kubeconfig_is_reported_in_one_sentence(
    tmp_path: pathlib.Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    refused = await refusal(path)
    assert refused.startswith(f"kubeconfig {path}: ")
    assert sentence in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clusters": [{"name": "test", "cluster": {}}]}, "an entry is empty"),
        ({"clusters": [{"name": "test", "cluster": {"tls-server-name": "x"}}]}, "'' is not the URL of an API server"),
        ({"clusters": [{"name": "test", "cluster": {"server": "https://x:secret@y"}}]}, "must not hold credentials"),
        ({"clusters": [{"name": "test", "cluster": {"server": "https://y/?token=secret"}}]}, "credentials, or a query"),
        ({"clusters": [{"name": "test", "cluster": {"server": "localhost:80"}}]}, "'localhost:80' is not the URL"),
        ({"users": [{"name": "test", "user": {"tokenFile": "absent"}}]}, "absent: No such file"),
        ({"users": [{"name": "test", "user": {"token": "secret\nX-Header: y"}}]}, "cannot be part of a token"),
        ({"users": [{"name": "test", "user": {"client-certificate-data": 7, "token": "secret"}}]}, ""),
        ({"users": [{"name": "test", "user": "secret"}]}, "wrong type"),
        (
            {"users": [{"name": "test", "user": {"exec": {"command": "secret"}}}]},
            "the user's exec: Object missing required field `apiVersion`",
        ),
    ],
)
async def test_a_wrong_entry_of_a_kubeconfig_is_reported_without_secrets(
    tmp_path: pathlib.Path, change: Object, sentence: str
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", **change)
    refused = await refusal(tmp_path / "kubeconfig")
    assert sentence in refused
    assert "secret" not in refused


async def test_a_missing_kubeconfig_flag_is_reported_if_the_process_does_not_run_in_a_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(credentials.SourceError, match=r"no --kubeconfig was given.*Service host/port is not set"):
        await watch.KubernetesSource(node_name="n1").check()


def run(program: str, *, path: str = "") -> Any:
    """Run a program in an interpreter whose ``sys.path`` begins with ``path``; return the JSON that the program printed."""
    program = f"import json, sys\nsys.path.insert(0, {path!r})\n{program}" if path else f"import json, sys\n{program}"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout)


def test_no_models_or_api_classes_of_the_kubernetes_client_are_imported(tmp_path: pathlib.Path) -> None:
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


def test_other_code_can_import_the_whole_kubernetes_client_after_ipvsproxy_has_imported_parts() -> None:
    assert run("""
from ipvsproxy.daemon.sources import credentials
import kubernetes_asyncio
from kubernetes_asyncio.client import ApiClient, V1Service, models
from kubernetes_asyncio.client.api_client import ApiClient as its_own
whole = [ApiClient is its_own, models.V1Service is V1Service, kubernetes_asyncio.__version__ > "30"]
print(json.dumps([*whole, credentials.Configuration is kubernetes_asyncio.client.Configuration]))
""") == [True, True, True, True]


def test_the_program_uses_the_kubernetes_client_library_that_is_already_imported() -> None:
    assert run("""
import kubernetes_asyncio
from ipvsproxy.daemon.sources import credentials
print(json.dumps(credentials.Configuration is kubernetes_asyncio.client.Configuration))
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
def test_the_whole_kubernetes_client_is_imported_if_its_parts_cannot_be_imported_alone(
    file: str, content: str, tmp_path: pathlib.Path
) -> None:
    for name, text in (FILES | {file: content}).items():
        path = tmp_path / "kubernetes_asyncio" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert run(
        """
from ipvsproxy.daemon.sources import credentials
import kubernetes_asyncio.client
print(json.dumps([credentials.Configuration is kubernetes_asyncio.client.Configuration]))
""",
        path=str(tmp_path),
    )[0]


# Credentials from client certificates, plugins and issuers of tokens


@pytest.mark.parametrize("by_plugin", [False, True])
async def test_a_client_certificate_from_the_kubeconfig_or_from_a_plugin_is_used(
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
        await web_arrives(server, tmp_path, authority=str(certificates.authority), user=user)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # aiohttp warns about calls by the Kubernetes client
async def test_a_token_from_an_oidc_issuer_is_refreshed(tmp_path: pathlib.Path) -> None:
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
        await web_arrives(server, tmp_path, user=user)
