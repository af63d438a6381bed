"""What a Modelfile adds to a model of ollama: used, or named as not used; never dropped."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.config import model_sampling
from h2o_stream.errors import UnsupportedModelError
from h2o_stream.models.go_template import as_jinja
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.modelfile import with_modelfile
from h2o_stream.models.rendering import render
from h2o_stream.models.templates import FALLBACK_TEMPLATE

CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n"
    "{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
PLAIN = (
    "<s>{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": role, "content": content} for role, content in (
    ("system", "Be {{ brief }}."), ("user", " U "), ("assistant", "A\n"), ("user", "V"))]  # fmt: skip
RENDERED = {
    CHATML: "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\nA\n"
            "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "[INST] {{ .System }} {{ .Prompt }} [/INST]": "[INST] Be {{ brief }}.  U  [/INST]A\n[INST]  V [/INST]",
    "{{- if .First }}\n### System:\n{{ .System }}\n{{- end }}\n\n### User:\n{{ .Prompt }}\n\n### Response:\n":
        "\n### System:\nBe {{ brief }}.\n\n### User:\n U \n\n### Response:\nA\n\n\n### User:\nV\n\n### Response:\n",
    "\n{{ if .System }}{{ .System }}{{ else }}none{{ end -}}  \n {{ .Prompt -}} \n {{- .Response }} {% x %} {# y #}\n":
        "\nBe {{ brief }}. U A\n {% x %} {# y #}\n\nnoneV",
    "{{ range .Messages }}{{ .Role }}{{ end }}": None,
    "{{ if .Tools }}{{ .Prompt }}{{ end }}": None,
    "{{ if .System }}{{ .Response }}{{ end }}": None,
    "{{ if .System }}{{ .Prompt }}": None,
}  # fmt: skip


@pytest.mark.parametrize(("template", "rendered"), RENDERED.items(), ids=range(len(RENDERED)))
def test_templates_of_go(template: str, rendered: str | None) -> None:
    jinja = as_jinja(template)
    assert (jinja and render(jinja, MESSAGES, add_generation_prompt=True)) == rendered


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Loads a model of an ollama store with these layers: what comes of it, and the lines for the user."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))

    def made(own: str = "", stops: tuple[str, ...] = (), **layers: str) -> tuple[LoadedModel, list[str]]:
        shutil.rmtree(tmp_path / "blobs", ignore_errors=True)
        (tmp_path / "blobs").mkdir()
        listed = []
        for kind, content in {"model": "GGUF", **layers}.items():
            digest = hashlib.sha256((kind + content).encode()).hexdigest()
            (tmp_path / "blobs" / f"sha256-{digest}").write_text(content)
            listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
        manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"layers": listed}))
        changed, notes = copy.copy(tokenizer), list[str]()
        changed.chat_template = own or tokenizer.chat_template
        loaded = with_modelfile(LoadedModel("ollama:m", None, changed, stops), notes.append)
        return loaded, notes

    return made


class TestLayers:
    def test_system_and_parameters(self, make: Any) -> None:
        values = {
            "temperature": 0.1, "repeat_penalty": 1.3, "top_p": 7, "stop": ["!", "?"], "num_ctx": 9, "mirostat": 2,
        }  # fmt: skip
        loaded, (note,) = make(system="You are Mario.\n", params=json.dumps(values), license="MIT", messages="[]")
        assert loaded.system == "You are Mario."
        assert loaded.sampling == {"temperature": 0.1, "repetition_penalty": 1.3}
        assert loaded.stops == ("!", "?")
        assert note == (
            "ollama:m: uses SYSTEM, temperature 0.1, repeat_penalty 1.3, stop; does not use top_p; "
            "does not use mirostat; does not use MESSAGE"
        )

    def test_a_template_that_says_the_same_is_silent(self, make: Any) -> None:
        loaded, notes = make(own=PLAIN, template=CHATML)
        assert not notes
        assert loaded.tokenizer.chat_template == PLAIN

    def test_another_template_is_used(self, make: Any) -> None:
        loaded, (note,) = make(
            own=FALLBACK_TEMPLATE, stops=("\nUser:",), template=CHATML, params='{"stop": "<|im_end|>"}'
        )
        assert note == "ollama:m: uses stop, TEMPLATE"
        rendered = loaded.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert rendered == RENDERED[CHATML]
        assert loaded.stops == ("<|im_end|>",)

    def test_one_that_is_too_complicated_is_named(self, make: Any) -> None:
        _, (note,) = make(template="{{ range .Messages }}{{ end }}")
        assert "does not use TEMPLATE, in place of which the file's own chat template is used" in note

    @pytest.mark.parametrize("params", ["{", "[]", "3", "{" * 2000])
    def test_damaged_parameters_are_named(self, make: Any, params: str) -> None:
        _, (note,) = make(params=params)
        assert note == "ollama:m: does not use PARAMETER, which cannot be read"

    def test_an_adapter_is_refused(self, make: Any) -> None:
        with pytest.raises(UnsupportedModelError, match=r"ollama:m has an adapter \(LoRA\)"):
            make(adapter="GGUF")

    def test_nothing_else(self, make: Any) -> None:
        loaded, notes = make()
        assert (notes, loaded.system, loaded.sampling) == ([], None, {})
        other = LoadedModel("smollm2-135m", None, None)
        assert with_modelfile(other, notes.append).sampling == model_sampling("smollm2-135m")
