"""``h2o-lm-eval``: the lm-evaluation-harness's own command, which knows the model ``h2o``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from h2o_stream.base.resources import require_package
from h2o_stream.errors import ConfigError, H2OStreamError


def main() -> None:
    """Entry point."""
    try:
        require_harness()
        _require_model(sys.argv[1:])
        from lm_eval.__main__ import cli_evaluate

        from h2o_lab.harness.model import register

        register()
        cli_evaluate()
    except H2OStreamError as error:
        sys.exit(f"h2o-lm-eval: {error}")


def require_harness() -> None:
    """Check that the harness is installed.

    Raises:
        H2OStreamError: it is not installed.
    """
    require_package("lm_eval", "'lm-eval[hf]'", "tasks need the lm-evaluation-harness")


def _require_model(arguments: Sequence[str]) -> None:
    """Check that an evaluation says of which model. The harness would take transformers' own, without our cache.

    Raises:
        ConfigError: it does not say so.
    """
    evaluates = len(arguments) > 1 and arguments[0] not in ("ls", "validate")
    options = {argument.partition("=")[0] for argument in arguments}
    named = {"--model", "--config", "-h", "--help"} | {option for option in options if option.startswith(("-M", "-C"))}
    if evaluates and not options & named:
        raise ConfigError("no --model was given; add --model h2o --model_args pretrained=NAME,policy=h2o,window=256")
