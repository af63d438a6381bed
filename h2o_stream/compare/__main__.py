"""``python -m h2o_stream.compare`` is ``h2o-compare``, for launchers that want a module."""

from __future__ import annotations

from h2o_stream.cli.compare import main

if __name__ == "__main__":
    main()
