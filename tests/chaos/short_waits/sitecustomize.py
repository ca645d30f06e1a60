"""Waits of seconds in place of minutes, in every process that has this folder on its path.

The guardian starts commands in processes of their own, and settings name few of these waits.
"""

import importlib
import os
import sys

if "STOKER_SHORT_WAITS" in os.environ:
    WAIT_S = float(os.environ["STOKER_SHORT_WAITS"])

    def module(name):
        """Not `import a.b as c`: some packages have functions that are called like their modules."""
        return importlib.import_module(f"stoker.{name}")

    remote = module("store.remote")  # before those that take its constant
    remote.TIMEOUT_S = WAIT_S
    remote.Retries.run.__defaults__ = (WAIT_S,)
    remote.ANSWER_S = remote.PUT_S = WAIT_S / 3
    threads = module("runtime.threads")
    threads.MAP_TIMEOUT_S = threads.MAP_CLOSE_S = WAIT_S
    threads.map_in_order.__kwdefaults__["timeout_s"] = WAIT_S
    module("plan.resources").DISK_TIMEOUT_S = WAIT_S
    rates = module("plan.rates")
    rates.TIMEOUT_S = rates.ANSWER_S = WAIT_S
    module("runtime.guard").EXIT_S = WAIT_S
    module("cli.process").STORAGE_S = WAIT_S
    if "serve" in sys.orig_argv:
        serve = module("service.server")
        serve.STOP_S = serve.CLOSE_S = WAIT_S
