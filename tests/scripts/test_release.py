"""``scripts/release`` in clones of a repository: what the script refuses, which files it makes, and what it leaves to a person.

Two steps have no test: the SBOM needs packages of PyPI, and a real image takes minutes, so an image layout replaces it.
"""

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NEEDED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Containerfile",
    ".gitignore",
    ".ci",
    "manifests",
    "ipvsproxy",
)
SCRIPTS = ("release", "image")
VERSION = "0.1.0"
LIGHT = ("--leave-out", "image", "--leave-out", "sbom")
PUBLISHING = ("cosign", "podman", "skopeo", "buildah", "docker", "twine")


def git(folder: pathlib.Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(("git", *identity, *words), cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(name="origin", scope="module")
def _origin(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A repository with the files from which a release is made; its changelog has the version. No test changes the files."""
    folder = tmp_path_factory.mktemp("origin")
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (*NEEDED, *(f"scripts/{script}" for script in SCRIPTS)):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / name, target, ignore=left_out) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, target)
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} (2026-12-01)\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=all")
    return folder


def clone(origin: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A clone that records that the tests have passed on its commit."""
    folder.parent.mkdir(exist_ok=True)
    git(origin, "clone", "--quiet", str(origin), str(folder))
    (folder / "build").mkdir()
    (folder / "build/tested").write_text(git(origin, "rev-parse", "HEAD") + "\n")
    return folder


def release(folder: pathlib.Path, *words: str, umask: int = 0o022, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "scripts/release"
    return subprocess.run(
        (sys.executable, str(script), *words, "--python", sys.executable),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
        env={**os.environ, **variables},
    )


def loaded(folder: pathlib.Path) -> types.ModuleType:
    """The release script of a clone, loaded as a module."""
    loader = importlib.machinery.SourceFileLoader("release", str(folder / "scripts/release"))
    specification = importlib.util.spec_from_loader("release", loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_two_clones_make_identical_release_files_and_publish_nothing(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in PUBLISHING:
        (tools / name).write_text(f"#!/bin/sh\ntouch {tools}/called\nexit 9\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    one, other = clone(origin, tmp_path / "one"), clone(origin, tmp_path / "deeper/other")
    first = release(one, VERSION, "--build", *LIGHT, PATH=path, TZ="UTC")
    second = release(other, VERSION, "--build", *LIGHT, umask=0o077, PATH=path, TZ="Asia/Tokyo", LC_ALL="C")
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout + first.stderr + second.stderr
    output = one / "build/release" / VERSION
    made = files(output)
    assert made == files(other / "build/release" / VERSION)

    pure, sdist = f"ipvsproxy-{VERSION}-py3-none-any.whl", f"ipvsproxy-{VERSION}.tar.gz"
    assert {
        pure,
        sdist,
        f"ipvsproxy-{VERSION}-manifests.tar.gz",
        f"ipvsproxy-{VERSION}.provenance.json",
        "SHA256SUMS",
    } <= made.keys()
    with tarfile.open(output / sdist) as tar:
        in_sdist = set(tar.getnames())
    sources = {path for path in git(origin, "ls-files", "ipvsproxy").splitlines() if not path.endswith(".c")}
    assert {f"ipvsproxy-{VERSION}/{source}" for source in sources} <= in_sdist
    for name in made:
        if name.endswith(".whl"):
            inside = set(zipfile.ZipFile(output / name).namelist())
            assert sources <= inside
            libraries = [one for one in inside if one.endswith(".so")]
            assert libraries == ([] if name == pure else ["ipvsproxy/kernel/iptables/datagram.abi3.so"])
    subprocess.run(("sha256sum", "--check", "--strict", "SHA256SUMS"), cwd=output, capture_output=True, check=True)
    summed = {line.split()[1] for line in made["SHA256SUMS"].decode().splitlines()}
    assert summed == made.keys() - {"SHA256SUMS"}
    provenance = json.loads(made[f"ipvsproxy-{VERSION}.provenance.json"])
    assert {subject["name"] for subject in provenance["subject"]} == summed - {f"ipvsproxy-{VERSION}.provenance.json"}
    (commit, *_) = provenance["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["digest"]["gitCommit"] == git(origin, "rev-parse", "HEAD")

    assert not (tools / "called").exists(), "signing and publishing are for a person"
    printed = first.stdout.partition("none of them has run")[2]
    assert "cosign sign-blob" in printed
    assert f"tag --sign v{VERSION} {git(origin, 'rev-parse', 'HEAD')}" in printed


@pytest.mark.parametrize(
    ("spoil", "version", "reasons"),
    [
        (lambda folder: (folder / "new").touch(), VERSION, ["1 files are not committed, such as new"]),
        (lambda folder: (folder / "build/tested").unlink(), VERSION, ["the tests have not passed on"]),
        (
            lambda folder: (folder / "build/tested").write_text("0" * 40),
            "0.2",
            [
                "the tests have not passed on",
                "'0.2' is not MAJOR.MINOR.PATCH",
                "CHANGELOG.md has no heading '## 0.2'",
                f"manifests/components/image/kustomization.yaml has the version {VERSION}",
            ],
        ),
    ],
)
def test_a_release_is_refused_if_the_repository_or_the_version_is_not_ready_for_it(
    origin: pathlib.Path, tmp_path: pathlib.Path, spoil: Callable[[pathlib.Path], object], version: str, reasons: list[str]
) -> None:
    folder = clone(origin, tmp_path / "one")
    spoil(folder)
    done = release(folder, version, "--build", *LIGHT)
    assert done.returncode == 1
    for reason in reasons:
        assert f"refused: {reason}" in done.stdout
    assert done.stdout.endswith("Nothing was made.\n")
    assert not (folder / "build/release").exists()


def test_a_release_is_refused_if_its_output_folder_has_other_files(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = clone(origin, tmp_path / "one")
    (precious := tmp_path / "precious").touch()
    done = release(folder, VERSION, "--build", *LIGHT, "--output", str(tmp_path))
    assert done.returncode == 1
    assert f"refused: {tmp_path} exists and has other files than those of {VERSION}" in done.stdout
    assert precious.exists()


def test_without_the_build_option_the_release_script_prints_what_is_missing_and_writes_nothing(
    origin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = clone(origin, tmp_path / "one")
    done = release(folder, VERSION, PATH=str(pathlib.Path(shutil.which("git") or "").parent))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("wheel for x86_64: ", "wheel for aarch64: ", "image for amd64: ", "image for arm64: "):
        assert part in done.stdout
    assert "Nothing was made. With --build" in done.stdout
    assert not (folder / "build/release").exists()


def layout(work: pathlib.Path, text: str) -> str:
    """Make an OCI layout with one manifest in the way that scripts/image does, and return the digest of the manifest."""
    content = json.dumps({"schemaVersion": 2, "of": text}).encode()
    digest = hashlib.sha256(content).hexdigest()
    (work / "oci/blobs/sha256").mkdir(parents=True)
    (work / "oci/blobs/sha256" / digest).write_bytes(content)
    manifest = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": f"sha256:{digest}", "size": len(content)}
    (work / "oci/index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    return f"sha256:{digest}"


def test_one_archive_has_the_images_of_both_architectures_and_the_manifests_use_its_digest(
    origin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder, output = clone(origin, tmp_path / "one"), tmp_path / "output"
    output.mkdir()
    expected = [layout(output / f"image-{name}", name) for name in ("amd64", "arm64")]
    (folder / "scripts/image").write_text('#!/bin/sh\necho "$@" >>../calls\n')
    script = loaded(folder)
    one = script.Release(VERSION, git(folder, "rev-parse", "HEAD"), 1_800_000_000, output, pathlib.Path(sys.executable))
    digest = script.build_image(one, ["amd64", "arm64"], ["--volume=/mirror:/run/mirror"])
    inside = script.read_tar(output / f"ipvsproxy-{VERSION}-image.tar")
    (index,) = json.loads(inside["index.json"])["manifests"]
    assert index["digest"] == digest
    blob = inside[f"blobs/sha256/{digest.removeprefix('sha256:')}"]
    assert (hashlib.sha256(blob).hexdigest(), len(blob)) == (digest.removeprefix("sha256:"), index["size"])
    described = {each["platform"]["architecture"]: each["digest"] for each in json.loads(blob)["manifests"]}
    assert described == dict(zip(("amd64", "arm64"), expected, strict=True))
    assert {f"blobs/sha256/{each.removeprefix('sha256:')}" for each in expected} <= inside.keys()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition("--arch ")[2] for call in calls] == [
        f"{name} --timestamp 1800000000 --volume=/mirror:/run/mirror" for name in ("amd64", "arm64")
    ]

    script.pack_manifests(one, "registry.example.com", digest)
    with tarfile.open(output / f"ipvsproxy-{VERSION}-manifests.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    patch = (tmp_path / f"ipvsproxy-{VERSION}" / script.IMAGE_PATCH).read_text()
    assert f"image: registry.example.com/ipvsproxy:{VERSION}@{digest}\n" in patch
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which brings kustomize, is not installed")
    base = tmp_path / f"ipvsproxy-{VERSION}/manifests/base"
    built = subprocess.run((kubectl, "kustomize", str(base)), capture_output=True, text=True, check=True)
    assert built.stdout.count(f"image: registry.example.com/ipvsproxy:{VERSION}@{digest}\n") == 2


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this is no Debian")
def test_the_debian_packages_in_an_image_become_components_of_the_sbom(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    status = tmp_path / "root/var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: libx\nStatus: install ok installed\nMaintainer: a\nArchitecture: amd64\nVersion: 1:2.0+b1\nDescription: x\n"
    )
    script = loaded(origin)
    (component,) = script.debian_packages(tmp_path / "root")
    assert component["purl"] == "pkg:deb/debian/libx@1%3A2.0%2Bb1?arch=amd64"
    assert (component["name"], component["version"]) == ("libx", "1:2.0+b1")
    assert script.debian_packages(tmp_path / "elsewhere") == []
