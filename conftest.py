"""Modules that need a package which is not installed are not searched for doctests."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED_BY = {
    "mfusepy": ["tests/chaos/away_fuse.py"],
    "ray": [
        "tests/scale/two_nodes.py",
        "src/stoker/extras/ray/cluster.py",
        "src/stoker/extras/ray/engine.py",
    ],
    "triton": ["tests/loader/kernels/interpreted.py", "src/stoker/loader/triton_gather.py"],
}

collect_ignore = [
    path for package, paths in NEEDED_BY.items() if find_spec(package) is None for path in paths
]
