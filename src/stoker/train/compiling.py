"""`torch.compile` switched off, for debugging: breakpoints, prints and error lines are those of the code."""

from __future__ import annotations

from types import TracebackType

import torch


class disable_torch_compile:  # noqa: N801 - reads as the function it also is
    """Switches `torch.compile` off, also for functions that are compiled already.

    As a function it holds until `restore`, or for good; in a `with` block until its end.

        disable_torch_compile()

        with disable_torch_compile():
            model(batch)
    """

    def __init__(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    def restore(self) -> None:
        """As it was before."""
        self._stance.__exit__(None, None, None)

    def __enter__(self) -> disable_torch_compile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
