"""The model `h2o` of the tool `llm`, by the package's own classes."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm")


@pytest.fixture
def model() -> Any:
    doors = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]["llm"]
    found: list[Any] = []
    importlib.import_module(doors["h2o"]).register_models(found.append)
    assert [made.model_id for made in found] == ["h2o"]
    return found[0]


def test_a_chat_keeps_its_cache_and_another_process_reads_it_again(model: Any, tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), "temperature": 0, "max_tokens": 6}
    talk = model.conversation()
    first = talk.prompt("hello", system="Be short.", **options)
    assert len(list(first)) > 3
    engine = model._open.ours.engine
    second = talk.prompt("and now?", **options)
    assert second.text()
    assert model._open.ours.engine is engine
    assert second.usage().output == 6
    assert second.usage().input < first.usage().input
    other = type(model)()
    again = other.conversation()
    again.responses = talk.responses[:1]
    assert again.prompt("and now?", **options).text() == second.text()


def test_another_conversation_is_not_continued(model: Any, tiny_folder: Path) -> None:
    """Nor is one with other settings; one with a schema is."""
    options = {"model": str(tiny_folder), "temperature": 0, "max_tokens": 6}
    engines = []
    for word in ("hello", "goodbye"):
        talk = model.conversation()
        assert talk.prompt(word, **options).text()
        assert model._open.theirs is talk
        assert talk.prompt("and now?", **options).text()
        engines.append(model._open.ours.engine)
    assert engines[0] is not engines[1]
    assert talk.prompt("and now?", schema={"enum": [1, 2]}, **options).text() in ("1", "2")
    assert model._open.ours.engine is engines[1]
    assert talk.prompt("and now?", **options, window=64).text()
    assert model._open.ours.engine is not engines[1]


def test_schemas_and_errors(model: Any, tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), "temperature": 2, "seed": 3, "max_tokens": 60}
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    assert '"x"' in model.prompt("hello", schema=schema, **options).text()
    with pytest.raises(llm.ModelError, match="temp must be"):
        model.prompt("hello", **options | {"temperature": -1}).text()
    with pytest.raises(llm.ModelError, match="nowhere does not exist"):
        model.prompt("hello", **options | {"model": "./nowhere"}).text()
