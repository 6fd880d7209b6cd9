"""A stage that answers rows in parts, interrupted when some of them are done."""

from typing import Any

import pytest


def run_interrupted(stage: Any, config: Any, *, parts: int) -> None:
    """Run `predict` or `extract`, a module, in this process, until it has made so many parts."""
    make_parts, numbers = stage.make_parts, list[int]()

    def make_some(*arguments: Any) -> Any:
        *others, work, kind = arguments

        def make_or_interrupt(item: tuple[int, Any]) -> Any:
            if len(numbers) == parts:
                raise KeyboardInterrupt
            numbers.append(item[0])
            return work(item)

        return make_parts(*others, make_or_interrupt, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "make_parts", make_some)
        with pytest.raises(KeyboardInterrupt):
            stage.run(config)
