"""What pytest imports first. The process that only distributes tests to others starts them without importing torch."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")
