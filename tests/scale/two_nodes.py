"""A Ray cluster of two nodes on this machine, as a program: `two_nodes.py CPUS`.

Prints its address, and takes lines: `kill` ends the second node at once. The end of input ends the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(cpus):
    node = {"num_cpus": int(cpus), "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    del node["include_dashboard"]
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
