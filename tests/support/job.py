"""Runs the containers of the Jobs given on standard input on this machine, as a kubelet would do in the host network.

The argument is the folder that replaces the mounted ConfigMap.
"""

import subprocess
import sys

import yaml


def main() -> int:
    """Run the command and the arguments of each container; returns the first status that is not 0."""
    for job in filter(None, yaml.safe_load_all(sys.stdin)):
        for container in job["spec"]["template"]["spec"]["containers"]:
            (mounted,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "config")
            arguments = [one.replace(mounted, sys.argv[1]) for one in container["args"]]
            command = (sys.executable, "-m", *container["command"], *arguments)
            status = subprocess.run(command, check=False).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
