"""The engine that the settings describe, made without importing Ray before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.extras.ray.engine import RayEngine


def ray_engine(config: Config) -> RayEngine:
    """Return the engine that the settings in `precompute.ray` describe, to be entered.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        from stoker.extras.ray.engine import RayEngine
    except ImportError as error:
        raise ConfigError(
            "precompute.engine=ray (--engine ray) needs Ray", hint="Install it: pip install 'stoker[ray]'"
        ) from error
    return RayEngine(config.precompute.ray)
