"""``python -m h2o_stream`` is ``h2o-chat``."""

from h2o_stream.cli.chat import main

if __name__ == "__main__":
    main()
