"""``h2o-lm-eval``: the lm-evaluation-harness's own command, which knows the model ``h2o``."""

from __future__ import annotations

import sys

import typer

from h2o_stream.cli import run


def main() -> None:
    """Entry point."""
    try:
        with run.reporting("h2o-lm-eval", debug=False):
            from h2o_stream.compare.tasks import require_harness

            require_harness()
    except typer.Exit as left:
        sys.exit(left.exit_code)
    from lm_eval.__main__ import cli_evaluate

    from h2o_stream.compare.harness import register

    register()
    cli_evaluate()
