"""A Ray cluster of two nodes on this machine, as a program: `two_nodes.py CPUS [FOLDER OTHER]`.

Prints its address, and takes lines: `kill` ends the second node at once. The end of input ends the cluster.
The second node has OTHER at the path FOLDER, as if that were a disk of its own; exit code 2 where that is not
permitted.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

from ray.cluster_utils import Cluster

CLONE_NEWNS = 0x20000


def put_there(other, folder):
    """Processes that this one starts from now on see `other` at the path of `folder`."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        sys.exit(2)
    for words in (["--make-rprivate", "/"], ["--bind", other, folder]):
        if subprocess.run(["mount", *words], timeout=20).returncode:
            sys.exit(2)


def main(cpus, folder=None, other=None):
    node = {"num_cpus": int(cpus), "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    del node["include_dashboard"]
    if folder:
        put_there(other, folder)
    second = cluster.add_node(**node)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    try:
        for line in sys.stdin:
            if line.strip() == "kill":
                cluster.remove_node(second, allow_graceful=False)
                sys.stdout.write("killed\n")
                sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
