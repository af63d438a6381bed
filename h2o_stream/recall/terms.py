"""What a word is worth, and which words mean nearly the same, by nothing but a model's tokenizer and input embeddings.

Vocabularies are learned by frequency, so the id of a word's token is nearly its frequency rank: "what" comes early,
"dentist" late, and a name or a number is no token at all. Embeddings of related words lie close together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence, Set
from functools import cached_property, lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray
from tokenizers.decoders import ByteLevel

from h2o_stream.recall.passages import UNSPACED

Floats = NDArray[numpy.float32]
TokenIds = NDArray[numpy.int64]

COMMON = 0.2
"""Weight up to which a word says nothing: "what" weighs 0.18, "did" 0.28, "job" 0.40 (embedded model)."""

_FAR, _NEAR, _RELATED = 0.15, 0.35, 0.9
"""Cosine at which a word begins to count as another one, from which on it counts most, and how much that is: as much as
"works" as "work".

With 0.5 instead of 0.35, 0.39 instead of 0.58 of 36 facts are found in other words; "pet" and "cat" have 0.32."""

_COMMON_RANK = 300
"""Ids up to here are worth nothing: bytes, then the commonest words. In five vocabularies "the" and "is" are below."""

_SAMPLE = 4096
"""Embeddings that the mean and the common direction are computed from. With all of them cosines move by 0.001 in the
mean, by 0.011 at most (embedded model)."""

_SMALL_NUMBER = 0.3
"""Weight of a number below 100, whatever its tokens: it says little, other than a year or a code."""

_DIMS = 1024
"""Most dimensions; wider embeddings are projected at random, with an error in the cosines of about 1 / sqrt(1024)."""

_ITERATIONS = 12
"""Rounds of the power iteration: with 60 no cosine changes (embedded model)."""

_SEARCHED = 16384
"""Words among which related ones are searched: the commonest, of 24,869 (embedded model)."""

_CHUNK = 2048
"""Embeddings processed at once: little memory, and packed weights are never unpacked as a whole."""

_WORD = re.compile(rf"[{UNSPACED}]+|[^\W_{UNSPACED}]+(?:[.,:'\u2019\-][^\W_{UNSPACED}]+)*")
_UNSPACED_RUN = re.compile(rf"[{UNSPACED}]+")
_CLITIC = re.compile(r"['\u2019](?:s|m|d|t|ll|re|ve)$")


def words(text: str) -> list[str]:
    """The words of a text in lower case, in order.

    Numbers keep their points, commas and colons. Scripts without spaces between words are cut into pairs of letters.
    """
    terms: list[str] = []
    for match in _WORD.finditer(text.casefold()):
        word = _CLITIC.sub("", match.group())
        if _UNSPACED_RUN.fullmatch(word):
            terms += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif "-" in word and not any(letter.isdigit() for letter in word):
            terms += word.split("-")
        else:
            terms.append(word)
    return terms


_SMALL_TALK = frozenset(
    words(
        "hello hi hey thanks thank please sorry yes no yeah ok okay bye goodbye welcome good nice great morning night "
        "remember recall remind tell told say said know mention mentioned explain describe answer question questions "
        "see sure think continue more really wow tomorrow joke list text above "
        "hallo danke bitte ja nein tschüss guten gut erinnere erinnern weißt sag gesagt erzählt erzähl erkläre liste "
        "bonjour salut merci oui non pardon bien sais souviens rappelle dis dit explique raconte liste "
        "hola gracias adiós sí perdón recuerdas recuerda dime dije sabes explica lista ciao grazie sì scusa ricordi "
        "你好 谢谢 请问 记得 知道 告诉 什么 列出"
    )
)
"""Words that talk about talking. The vocabulary holds some of them for rare: it was learned from texts, not chats."""

_NOTHING = _SMALL_TALK | frozenset(
    words("what where how am may its them these than there some many most such between through into also")
)
"""Words that say nothing. Vocabularies that were learned from code rank those of questions as rarer than "name"."""

_IN_CODE = frozenset(
    words("name file value type function string user case private print array void null static true false")
)
_MIN_IN_CODE = 0.3
"""Words that such vocabularies rank as common as "the", and their smallest weight: "name" has 0.31 in the embedded
model's, 0.16 in Qwen 2.5's."""

_FAMILY = frozenset(
    words(
        "mother father sister brother son daughter uncle aunt niece nephew wife husband grandmother grandfather "
        "mutter vater schwester bruder sohn tochter onkel tante nichte neffe großmutter großvater oma opa "
        "mère père sœur frère fils fille oncle tante nièce neveu mari "
        "madre padre hermana hermano hijo hija tío tía esposa marido abuela abuelo sorella fratello figlio figlia"
    )
)
"""Words with embeddings that lie close together although they never mean the same person."""


class TermWeights:
    """Weights and relatedness of words, by a model's tokenizer and input embeddings.

    Args:
        tokenizer: tokenizer of transformers, or one with the same methods.
        read_rows: returns the embeddings [n, D] of token ids [n]; without them no word is related to another one.
    """

    def __init__(self, tokenizer: Any, read_rows: Callable[[TokenIds], Floats] | None = None) -> None:
        self._tokenizer = tokenizer
        self._read_rows = read_rows

    def prepare(self) -> None:
        """Make the tables now, which takes a quarter of a second, and not when the first word is looked for."""
        if self._read_rows is not None:
            _ = self._table

    def weight(self, word: str) -> float:
        """How informative a word is: 0 for the commonest, 1 for what the vocabulary has no token for."""
        ids = self._ids.get(word)
        if word in _NOTHING:
            return 0.0
        if word.isdecimal() and len(word) < 3:
            return _SMALL_NUMBER
        if ids is None:
            return 1.0 if len(word) > 1 else 0.0
        low, high = math.log(_COMMON_RANK), math.log(len(self._tokenizer))
        minimum = _MIN_IN_CODE if word in _IN_CODE else 0.0
        return min(1.0, max(minimum, (math.log(1 + min(ids)) - low) / max(high - low, 1.0)))

    def similarity(self, terms: Sequence[str], others: Sequence[str]) -> Floats:
        """Cosines [T, W] of two lists of words; 0 for words that are no single token."""
        if self._read_rows is None or not terms or not others:
            return numpy.zeros((len(terms), len(others)), numpy.float32)
        return self._vectors(terms) @ self._vectors(others).T

    def same(self, asked: Sequence[str], others: Sequence[str]) -> Floats:
        """How much each of the other words is each of the asked words, in another form or not, [T, W]."""
        table = numpy.zeros((len(asked), len(others)), numpy.float32)
        columns: dict[str, list[int]] = {}
        for column, other in enumerate(others):
            columns.setdefault(other[:4], []).append(column)
        for row, word in enumerate(asked):
            for column in columns.get(word[:4], ()):
                if word == others[column]:
                    table[row, column] = 1
                elif _inflected(word, others[column]):
                    table[row, column] = _RELATED
        return table

    def matching(self, asked: Sequence[str], others: Sequence[str]) -> Floats:
        """How much each of the other words counts as each of the asked words, by meaning too, [T, W]."""
        table: Floats = (self.similarity(asked, others) - numpy.float32(_FAR)) / numpy.float32(_NEAR - _FAR)
        table = table.clip(0, 1) * numpy.float32(_RELATED)
        table *= numpy.array([self.weight(word) > COMMON for word in others], bool)
        family = [numpy.array([word in _FAMILY for word in some], bool) for some in (asked, others)]
        table[numpy.ix_(*family)] = 0
        same = self.same(asked, others)
        return numpy.where(same > 0, same, table)

    def related(self, terms: Sequence[str], count: int) -> dict[str, list[str]]:
        """For each term the `count` words of the vocabulary with the closest embeddings, closest first."""
        known = [term for term in terms if term in self._rows] if self._read_rows is not None else []
        if not known:
            return {}
        vectors = self._vectors(known)
        table, scales = self._table
        table, scales = table[:_SEARCHED], scales[:_SEARCHED]
        parts = (table[start : start + _CHUNK] for start in range(0, len(table), _CHUNK))
        distances = numpy.concatenate([vectors @ part.T.astype(numpy.float32) for part in parts], 1) * -scales
        nearest = distances.argpartition(min(count, len(table) - 1))[:, : count + 1]
        order = numpy.take_along_axis(distances, nearest, 1).argsort()
        best = numpy.take_along_axis(nearest, order, 1).tolist()
        words = list(self._rows)
        return {
            term: [words[row] for row in rows if words[row] != term] for term, rows in zip(known, best, strict=True)
        }

    def _vectors(self, terms: Sequence[str]) -> Floats:
        """Unit vectors [N, D] of words; zeros for words without a token."""
        rows = numpy.array([self._rows.get(term, -1) for term in terms])
        table, scales = self._table
        vectors: Floats = table[rows] * (scales[rows] * (rows >= 0))[:, None]
        return vectors

    @cached_property
    def _rows(self) -> dict[str, int]:
        """Words of the table, and their rows."""
        return {word: row for row, word in enumerate(word for word in self._ids if len(word) > 1)}

    @cached_property
    def _table(self) -> tuple[NDArray[numpy.int8], Floats]:
        """Embeddings of words: int8 [N, D], and the factors [N] to make them unit vectors.

        A word's is the mean of the directions of its capitalized and plain tokens.

        What all embeddings have in common is removed: their mean and the direction that varies most ("all but the
        top", Mu and Viswanath 2018). Of 45 pairs of related and 27 of unrelated words it tells 79% apart instead of
        63%; further directions change nothing.
        """
        assert self._read_rows is not None
        tokens = [self._ids[word] for word in self._rows]
        ids = numpy.array([i for word in tokens for i in word], numpy.int64)
        starts = numpy.cumsum([0, *map(len, tokens)])
        sample = self._read_rows(ids[:: 1 + len(ids) // _SAMPLE])
        mean = sample.mean(0)
        common = _top_direction(_normalized(sample - mean))
        projection = None
        if len(mean) > _DIMS:
            projection = numpy.random.default_rng(0).standard_normal((len(mean), _DIMS), numpy.float32)
        table = numpy.empty((len(tokens), min(len(mean), _DIMS)), numpy.int8)
        scales = numpy.empty(len(table), numpy.float32)
        for first in range(0, len(table), _CHUNK):
            last = min(first + _CHUNK, len(table))
            directions = _normalized(self._read_rows(ids[starts[first] : starts[last]]) - mean)
            directions -= numpy.vecdot(directions, common)[:, None] * common
            if projection is not None:
                directions = directions @ projection
            places, counts = starts[first:last] - starts[first], numpy.diff(starts[first : last + 1])
            words = directions[places]
            for number in range(1, counts.max()):  # ten times as fast as numpy.add.reduceat
                words[counts > number] += directions[places[counts > number] + number]
            words = (words * (127 / abs(words).max(1, keepdims=True).clip(min=1e-9))).round()
            table[first:last], scales[first:last] = words, 1 / numpy.linalg.norm(words, axis=1).clip(min=1)
        return table, scales

    @cached_property
    def _ids(self) -> dict[str, tuple[int, ...]]:
        tokens = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        return _words_of(tuple(tokens), frozenset(self._tokenizer.all_special_ids))


def _inflected(word: str, other: str) -> bool:
    """Whether two words share so long a beginning that they are forms of one word."""
    longer = max(len(word), len(other))
    shared = next((i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    return shared >= 4 and shared >= 0.6 * longer and longer - shared <= 3


@lru_cache(maxsize=2)
def _words_of(tokens: Sequence[str | bytes | None], special: Set[int]) -> dict[str, tuple[int, ...]]:
    """Words of a vocabulary in lower case, and the tokens that are this word: " name", " Name".

    Conversations of a process share them: of 49,152 tokens they take a tenth of a second.
    """
    starting: dict[str, tuple[int, ...]] = {}
    bare: dict[str, tuple[int, ...]] = {}
    for i, token in enumerate(tokens):
        text = _text(token)
        word = text.strip().casefold()
        if i not in special and (word.isalnum() or len(word) == 1):
            table = starting if text[:1] == " " or not word.isascii() else bare
            table[word] = (*table.get(word, ()), i)
    return starting or bare


def _text(token: str | bytes | None) -> str:
    """The text of a token of a vocabulary: of bytes, of GPT-2's letters for bytes, or of SentencePiece."""
    if token is None:
        return ""
    if isinstance(token, bytes):
        return token.decode(errors="ignore")
    if token.isascii():
        return token
    if "▁" in token:
        return token.replace("▁", " ")
    if token[0] == "Ġ" and token[1:].isascii():
        return " " + token[1:]
    return str(ByteLevel().decode([token]))


def _normalized(rows: Floats) -> Floats:
    """Unit vectors of rows [N, D], or of one [D]; 0 stays 0."""
    units: Floats = rows / numpy.sqrt(numpy.vecdot(rows, rows))[..., None].clip(min=1e-12)
    return units


def _top_direction(rows: Floats) -> Floats:
    """The first principal direction [D] of rows [N, D], by power iteration."""
    direction = _normalized(rows[0])
    for _ in range(_ITERATIONS):
        direction = _normalized(rows.T @ (rows @ direction))
    return direction
