"""What pytest imports first."""

import gc
import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background
    gc.disable()  # it would look at all that is imported and collected again and again
    interpreted = ("tests.gpu_interpreter",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
    for plugin in ("tests.fixtures", "tests.native_builds", "tests.native_streams", "tests.histories", *interpreted):
        config.pluginmanager.import_plugin(plugin)
