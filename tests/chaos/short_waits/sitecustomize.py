"""Waits of seconds in place of minutes, in every process that has this folder on its path.

The guardian starts commands in processes of their own, and settings name few of these waits.
"""

import importlib
import os
import sys


def shorten(wait_s):
    """Set the waits; a name that has moved ends the process, since `site` would only mention an error."""

    def put(name, values):
        # Not `import a.b as c`: some packages have functions that are called like their modules.
        found = importlib.import_module(f"stoker.{name}")
        for key, value in values.items():
            getattr(found, key)
            setattr(found, key, value)
        return found

    # remote, threads and signals before those that take their constants
    remote = put("store.remote", {"TIMEOUT_S": wait_s, "ANSWER_S": wait_s / 3, "PUT_S": wait_s / 3})
    remote.Retries.run.__defaults__ = (wait_s,)
    threads = put("runtime.threads", {"MAP_TIMEOUT_S": wait_s, "MAP_CLOSE_S": wait_s})
    threads.map_in_order.__kwdefaults__["timeout_s"] = wait_s
    put("runtime.signals", {"EXIT_S": wait_s})
    put("loader.disk", {"READ_TIMEOUT_S": wait_s})
    put("plan.resources", {"DISK_TIMEOUT_S": wait_s})
    put("plan.rates", {"TIMEOUT_S": wait_s, "ANSWER_S": wait_s})
    put("cli.process", {"STORAGE_S": wait_s})
    if "serve" in sys.orig_argv:
        put("service.server", {"STOP_S": wait_s, "CLOSE_S": wait_s})


if "STOKER_SHORT_WAITS" in os.environ:
    try:
        shorten(float(os.environ["STOKER_SHORT_WAITS"]))
    except (ImportError, AttributeError) as moved:
        sys.exit(f"{__file__}: {moved}")
