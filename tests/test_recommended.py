"""Which better models are recommended."""

import pytest

from h2o_stream.models import recommended
from h2o_stream.models.recommended import Recommended, best, better_models


@pytest.mark.parametrize(
    ("free", "bandwidth", "found"),
    [(24e9, 60e9, "Qwen3-8B"), (6e9, 60e9, "Qwen3-4B"), (24e9, 1e9, "0.5B"), (2e9, 15e9, "1.5B"), (0.3e9, 15e9, None)],
)
def test_the_largest_that_fits_and_writes_as_fast_as_people_read(
    monkeypatch: pytest.MonkeyPatch, free: float, bandwidth: float, found: str | None
) -> None:
    monkeypatch.setattr(recommended, "free_bytes", lambda: free)
    monkeypatch.setattr(recommended, "bandwidth", lambda *_: bandwidth)
    model = best(recommended.recommended())
    assert (model.name if model else "").count(found or "") > 0
    assert ("h2o-chat -m Qwen/" in better_models()) == (found is not None)
    assert better_models().endswith("too.")


def test_of_this_machine() -> None:
    for model in recommended.recommended():
        assert isinstance(model, Recommended)
        assert 0.01 < model.tokens_per_s < 5000
