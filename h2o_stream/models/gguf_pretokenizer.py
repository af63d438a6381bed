r"""How byte-level BPE tokenizers of GGUF files split text before merging.

A file names its pre-tokenizer in ``tokenizer.ggml.pre``; the names and their meaning are those of llama.cpp.
transformers knows some of them, and for all others splits text as GPT-2 does: other tokens, and no error.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

from h2o_stream.errors import UnsupportedModelError
from h2o_stream.models.gguf import GgufFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3, QWEN2 = _CL100K % _THREE_DIGITS, _CL100K % _DIGIT
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _CASED % ("", "", _DIGIT)
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", _THREE_DIGITS)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_NOT_HAN_UPPER, _NOT_HAN_LOWER = (rf"[{case[1:-1]}&&[^\p{{Han}}]]" for case in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTIONS}?"
    rf"|{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_SPLITS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    (_DIGIT, _GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
    "chatglm-bpe",
    (QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_SEED,): "seed-coder",
    (_BAILING,): "bailingmoe bailingmoe2 llada-moe",
    (_KIMI,): "kimi-k2",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (_THREE_DIGITS, r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT): "deepseek-coder",
    (_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
}
"""Names by the regexes that split text, one after another."""

_REGEXES = {name: regexes for regexes, names in _SPLITS.items() for name in names.split()}

_IGNORE_MERGES = frozenset(_SPLITS[_LLAMA3,].split()) - {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"} | {"tekken"}
"""Pieces that are tokens are not merged from bytes."""

_NAME, _DEFAULT = "tokenizer.ggml.pre", "default"
"""The key of the name, and llama.cpp's name for files without one."""

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Writes the bytes of text in letters that stand for them."""


def pre_tokenizer(file: GgufFile) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """How a file's tokenizer splits text, and whether pieces that are tokens are not merged from bytes.

    Raises UnsupportedModelError if the file names an unknown pre-tokenizer.
    """
    name: Any = file.metadata.get(_NAME, _DEFAULT)
    if not isinstance(name, str) or name not in _REGEXES:
        raise UnsupportedModelError(
            f"{file.path.name} has the unknown pre-tokenizer {name!r} ({_NAME}), so text would be split wrongly; "
            "take the model in transformers' format, or a newer GGUF file"
        )
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _REGEXES[name]]
    return pre_tokenizers.Sequence([*splits, BYTES]), name in _IGNORE_MERGES


def missing_name(file: GgufFile) -> str:
    """What to tell the user of a file that does not say how its tokenizer splits text, or nothing."""
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or _NAME in file.metadata:
        return ""
    return (
        f"{file.path.name} is old: it does not say how its tokenizer splits text ({_NAME}). It is split as by "
        "llama.cpp, which may cost quality; a newer GGUF file is better."
    )
