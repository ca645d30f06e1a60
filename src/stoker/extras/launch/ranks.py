"""A command of stoker under torchrun, ended in time, with the exit code of the rank that failed first.

`python -m stoker.extras.launch.ranks COUNT SECONDS COMMAND ...`: what the start-up script runs. torchrun
alone ends with exit code 1 whatever its ranks ended with, and leaves them 30 seconds once it is asked to end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stoker.errors import Interrupted


def run_ranks(count: int, timeout_s: int, words: Sequence[str]) -> int:
    """Run `stoker words` as `count` ranks; the exit code of the first that failed.

    Args:
        timeout_s: How long ranks may take to end, once this process is asked to.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(timeout_s)
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(count), "-m", "stoker", *words]))
    except SignalException:
        return Interrupted.exit_code
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
