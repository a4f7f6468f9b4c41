"""Runs ``scripts/release`` in clones of a repository.

The tests check what the script refuses, which files it makes, and what it leaves to a person.

A real image takes minutes, and an SBOM needs packages of PyPI, so only .ci/full makes both. All other runs use a small OCI layout
instead of an image. If ``scripts/image`` needs certain options to reach PyPI, set ``IPVSPROXY_TEST_IMAGE_OPTIONS`` to these
options.
"""

import concurrent.futures
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable

import pytest

from tests.support import patience

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
SCRIPTS = ("release", "image", "setup")
VERSION = "0.1.0"
LIGHT = ("--leave-out", "image", "--leave-out", "sbom")
PUBLISHING = ("cosign", "podman", "skopeo", "buildah", "docker", "twine")


def git(folder: pathlib.Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(("git", *identity, *words), cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(name="origin", scope="module")
def _origin(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A repository with the files of a release, and with a changelog that contains ``VERSION``. No test changes the files."""
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
    """A clone with a record which says that the tests have passed on the clone's commit."""
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


def test_builds_of_a_release_have_equal_checksums_only_if_source_date_epoch_is_equal(
    origin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = clone(origin, tmp_path / "one")
    sums = []
    for name, seconds in (("a", "1800000000"), ("b", "1800000000"), ("c", "1800000001")):
        done = release(folder, VERSION, "--build", *LIGHT, "--output", str(tmp_path / name), SOURCE_DATE_EPOCH=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        sums.append((tmp_path / name / "SHA256SUMS").read_text())
    assert sums[0] == sums[1]
    assert sums[1] != sums[2]


@patience.THOROUGH
@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("apt-get") is None, reason="images are built by root on Debian")
def test_two_clones_make_the_same_image_and_sbom_byte_for_byte(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = [f"--image-option={one}" for one in shlex.split(os.environ.get("IPVSPROXY_TEST_IMAGE_OPTIONS", ""))]
    subprocess.run((origin / "scripts/setup", "--image-builder-only"), check=True)

    def build(name: str, umask: int, zone: str) -> dict[str, bytes]:
        folder = clone(origin, tmp_path / name)
        modes = {0o022: "u=rwX,go=rX", 0o077: "go="}
        subprocess.run(("chmod", "-R", modes[umask], *NEEDED), cwd=folder, check=True)
        done = release(folder, VERSION, "--build", *options, umask=umask, TZ=zone)
        assert done.returncode == 0, done.stdout + done.stderr
        return files(folder / "build/release" / VERSION)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = list(pool.map(build, ("one", "deeper/other"), (0o022, 0o077), ("UTC", "Asia/Tokyo")))
    one, other = ({name: hashlib.sha256(content).hexdigest() for name, content in each.items()} for each in made)
    assert {f"ipvsproxy-{VERSION}-image.tar", f"ipvsproxy-{VERSION}.cdx.json"} <= one.keys()
    assert one == other
    sbom = json.loads(made[0][f"ipvsproxy-{VERSION}.cdx.json"])
    assert sbom["metadata"]["component"]["name"] == "ipvsproxy"
    assert {"pyroute2", "textual", "iptables", "libssl3"} <= {component["name"] for component in sbom["components"]}
    provenance = json.loads(made[0][f"ipvsproxy-{VERSION}.provenance.json"])
    uris = {each["uri"].partition("@")[0] for each in provenance["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert {"pkg:deb/debian/iptables", "pkg:deb/debian/gcc"} <= uris


@patience.THOROUGH
def test_two_clones_write_the_same_sbom(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    written = []
    for name in ("one", "deeper/other"):
        folder = clone(origin, tmp_path / name)
        (output := folder / "build/release").mkdir()
        script = loaded(folder)
        assert script.write_sbom(script.Release(VERSION, "0" * 40, 1_800_000_000, output, pathlib.Path(sys.executable))) == 0
        written.append((output / f"ipvsproxy-{VERSION}.cdx.json").read_bytes())
    assert written[0] == written[1]
    names = {component["name"] for component in json.loads(written[0])["components"]}
    assert {"aiohttp", "pyroute2", "textual"} <= names
    assert not {"pip", "setuptools", "pytest"} & names


def test_the_printed_commands_build_an_image_with_podman_and_sign_the_image(origin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder, tools = clone(origin, tmp_path / "one"), tmp_path / "tools"
    tools.mkdir()
    note = f'#!/bin/sh\necho "$(basename "$0") $*" >>{tmp_path}/calls\n'
    (tools / "cosign").write_text(note)
    (tools / "podman").write_text(note + '[ "$1" != push ] || printf sha256:abc >"$3"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = loaded(folder)
    (output := tmp_path / "output").mkdir()
    (output / f"ipvsproxy-{VERSION}.cdx.json").touch()
    made = script.Release(VERSION, "0" * 40, 1_800_000_000, output, pathlib.Path(sys.executable))
    lines = [line for line in script.commands(made, "registry.example.com", "") if not line.startswith("git ")]
    path = f"{tools}:{os.environ['PATH']}"
    subprocess.run(("sh", "-ec", "\n".join(lines)), env={**os.environ, "PATH": path}, check=True)
    image = "registry.example.com/ipvsproxy"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "cosign sign-blob --key cosign.key --bundle SHA256SUMS.sigstore.json SHA256SUMS",
        f"podman build -t {image}:{VERSION} {folder}",
        f"podman push --digestfile image.digest {image}:{VERSION}",
        f"cosign sign --key cosign.key {image}@sha256:abc",
        f"cosign attest --key cosign.key --type cyclonedx --predicate ipvsproxy-{VERSION}.cdx.json {image}@sha256:abc",
    ]


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
def test_a_release_is_refused_if_its_version_is_invalid_or_the_repository_is_not_ready(
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


def test_packed_manifests_name_the_digest_of_an_image_index_that_lists_both_architectures(
    origin: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = clone(origin, tmp_path / "one"), tmp_path / "output"
    output.mkdir()
    expected = [layout(output / f"image-{name}", name) for name in ("amd64", "arm64")]
    said = "echo '== Base'; echo '== Debian packages'; echo '2 packages, those of a lock'; echo '== Size'"
    (folder / "scripts/image").write_text(f'#!/bin/sh\necho "$@" $SOURCE_DATE_EPOCH >>{tmp_path}/calls\n{said}\n')
    git(folder, "commit", "--all", "--quiet", "--message=image")
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
    assert "Debian for arm64: 2 packages, those of a lock\n" in capsys.readouterr().out
    assert [call.partition("--arch ")[2] for call in calls] == [
        f"{name} --volume=/mirror:/run/mirror 1800000000" for name in ("amd64", "arm64")
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


FAKE_BUILDAH = """#!/bin/sh
shift 6 # the options for the store
case $1 in
    build) printf 'STEP 1\\nlibx:amd64\\t1:2.0+b1\\ngcc\\t12\\n'; echo "$@" >>"$CALLS" ;;
    push) for last; do :; done; mkdir "$(dirname "${last#oci:}")/oci" ;;
    mount) echo "$MOUNTED" ;;
esac
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("dpkg-query") is None, reason="scripts/image needs root on Debian")
@pytest.mark.parametrize(
    ("locked", "said"),
    [
        ("gcc\t12\nlibx:amd64\t1:2.0+b1\n", ["2 packages, those of .ci/debian-amd64.lock"]),
        (
            "gcc\t12\nlibx:amd64\t1:1.9\n",
            ["< libx:amd64\t1:1.9", "> libx:amd64\t1:2.0+b1", "packages of .ci/debian-amd64.lock (<)"],
        ),
        (None, ["> gcc\t12", "To lock the packages of this build (>): cp "]),
    ],
)
def test_the_image_script_prints_the_packages_that_differ_from_the_lock_file(
    tmp_path: pathlib.Path, locked: str | None, said: list[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/image", tmp_path / "scripts")
    tools = {"scripts/setup": "#!/bin/sh\n", "bin/mmdebstrap": '#!/bin/sh\ntouch "$MADE"\n', "bin/buildah": FAKE_BUILDAH}
    for name, text in tools.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    status = tmp_path / "mounted/var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: dpkg\nStatus: install ok installed\nMaintainer: a\nArchitecture: amd64\nVersion: 1\nDescription: x\n"
    )
    (tmp_path / "mounted/opt/ipvsproxy").mkdir(parents=True)
    if locked is not None:
        (tmp_path / ".ci").mkdir()
        (tmp_path / ".ci/debian-amd64.lock").write_text(locked)
    work = tmp_path / "work"
    variables = {"CALLS": f"{tmp_path}/calls", "MOUNTED": f"{tmp_path}/mounted", "MADE": f"{work}/base.part"}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SOURCE_DATE_EPOCH": "1800000000"}
    (sources := tmp_path / "sources.list").touch()
    done = subprocess.run(
        (tmp_path / "scripts/image", "--work", work, f"--sources={sources}"),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in said:
        assert line in done.stdout
    assert ("other bytes" in done.stdout) == (len(said) > 1)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert f"--volume {sources}:/etc/apt/sources.list:ro" in call
    assert "--timestamp 1800000000" in call


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
