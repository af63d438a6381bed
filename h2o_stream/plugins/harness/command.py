"""``h2o-lm-eval``: the lm-evaluation-harness's own command, which knows the model ``h2o``."""

from __future__ import annotations

import sys

from h2o_stream.errors import H2OStreamError


def main() -> None:
    """Entry point."""
    try:
        require_harness()
    except H2OStreamError as error:
        sys.exit(f"h2o-lm-eval: {error}")
    from lm_eval.__main__ import cli_evaluate

    from h2o_stream.plugins.harness.model import register

    register()
    cli_evaluate()


def require_harness() -> None:
    """Check that the harness is installed.

    Raises:
        H2OStreamError: it is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise H2OStreamError("tasks need the lm-evaluation-harness; pip install 'h2o-stream[eval]'") from error
