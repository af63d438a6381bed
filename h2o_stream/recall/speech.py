"""What a text asks for, and whom it speaks of: by patterns, whatever the weights of its words."""

from __future__ import annotations

import re

_QUESTION_MARKS = "?", "\uff1f", "\u061f", "\u037e", "\u055e"
"""The marks of Latin, Chinese, Arabic, Greek and Armenian."""

_CLOSING_MARKS = "\"'”\u2019»)]"
"""What may follow the mark of a question."""

_OPENING_QUOTES, _CLOSING_QUOTES = '"“„«', ('"', "”", "“", "»")

_LONGEST_STATEMENT = 10_000
"""Characters of a text in which somebody is looked for who speaks, or is spoken to."""

_FIRST_PERSON = re.compile(
    r"\b(?:i|my|mine|we|our|ours|ich|mich|mir|mein\w{0,2}|wir|unser\w{0,2}|je|moi|mon|ma|mes|nous|notre|nos|yo|mi|mis"
    r"|nosotr[oa]s|nuestr[oa]s?|io|mio|mia|miei|noi|nostr[oaie]|eu|meus?|minhas?|nós|noss[oa]s?|ik|mijn|wij|onze?"
    r"|я|мой|моя|моё|мои|мне|меня|мы|наш\w?)\b|我|私|僕|저는|제가|나는|내가",
    re.IGNORECASE,
)

_SECOND_PERSON = re.compile(
    r"\b(?:you|your|yours|du|dich|dir|dein\w{0,2}|ihr|euch|euer|eure\w?|tu|toi|ton|ta|tes|vous|votre|vos|tú|tus?|usted"
    r"|tuo|tua|tuoi|tue|voi|vostr[oaie]|teus?|tuas?|você|jij|je|jouw|ты|твой|твоя|твои|тебя|тебе|вы|ваш\w?)\b|你|您",
    re.IGNORECASE,
)

_REQUEST = re.compile(
    r"\W*(?:please\W+)?(?:list|(?:tell|give|show|remind)\s+(?:me|us)|liste|(?:nenne?|sag|gib|zeige?)\s+(?:mir|uns)"
    r"|(?:dis|donne|montre)[\s-](?:moi|nous)|d[ií]me|dame|muéstrame|dimmi|dammi|mostrami)\b",
    re.IGNORECASE,
)

_TASK = re.compile(
    r"\W*(?:(?:please|now|then|bitte)\W+)*(?:act as|analy[sz]e|brainstorm|calculate|choose|classify|come up with"
    r"|compare|compose|compute|convert|create|define|describe|design|develop|discuss|draft|draw|evaluate|explain"
    r"|extract|find|generate|give|help|imagine|implement|improve|invent|make|name|outline|paraphrase|pick|pretend"
    r"|propose|prove|provide|recommend|rephrase|rewrite|show|sketch|solve|suggest|summari[sz]e|tell|think of|translate"
    r"|write|berechne|beschreibe?|dichte|entwirf|erfinde|erkläre?|erstelle?|fasse?|formuliere?|hilf|schlage?|schreibe?"
    r"|übersetze?|verfasse?|vergleiche?|(?:calcul|compar|expliqu|imagin|invent|propos|résum|trouv)ez?|cré(?:e|ez)"
    r"|décri(?:s|vez)|écri(?:s|vez)|suggère|suggérez|traduis(?:ez)?|calcula|compara|crea|describe|escribe|explica"
    r"|imagina|inventa|propón|resume|sugiere|traduce|confronta|descrivi|immagina|proponi|riassumi|scrivi|spiega"
    r"|suggerisci|traduci|trova)\b(?!:)",
    re.IGNORECASE,
)

LABEL = re.compile(
    r"(?:\[[^\]\n]{1,40}\] )?(?P<name>[^\W\d_][\w'\-]*)(?: [^\W\d_][\w'.\-]*)?(?:, [^:\n]{0,20}\d{4})?: "
)
"""What stands before a turn, with the day or without: "Ana, 8 May 2023: Hello!"."""

_MY = r"(?:my|our|mein\w{0,2}|unser\w{0,2}|mon|ma|mes|notre|nos|mis?|nuestr[oa]s?|mio|mia|miei|nostr[oaie])"

_OWNED = re.compile(
    rf"\b{_MY}\s+(?P<mine>\w+\b(?:\s+\w+\b)?)(?!['\u2019])"
    rf"|\b(?!(?:what|who|where|when|how|it|that|he|she)\b)(?P<owner>\w+)['\u2019]s\s+(?!{_MY}\b)(?P<theirs>\w+(?:\s+\w+)?)"
    rf"|\b(?P<thing>\w+)\s+(?:(?:of|de|du|del|della|di|von)\s+(?:(?:the|el|la|le|il|{_MY})\s+)?|(?:mein|unser)e[rs]\s+)"
    r"(?:\w+['\u2019]s\s+)?(?P<whole>\w+)"
)
"""My favourite colour; the dog's name; the name of the street."""


def is_question(text: str) -> bool:
    """Whether a text ends with a question. Takes linear time, whatever the text."""
    return text.rstrip().rstrip(_CLOSING_MARKS).rstrip().endswith(_QUESTION_MARKS)


def quotes_question(text: str) -> bool:
    """Whether a text ends with a question in quotation marks, before which it says something itself. Takes linear
    time.
    """
    text = text.rstrip()
    start = max(text.rfind(mark, 0, len(text) - 1) for mark in _OPENING_QUOTES)
    return text.endswith(_CLOSING_QUOTES) and any(map(str.isalpha, text[: max(start, 0)]))


def is_request(text: str) -> bool:
    """Whether a text asks for something, as a question or not, in one of five languages."""
    return is_question(text) or _REQUEST.match(text) is not None


def is_task(text: str) -> bool:
    """Whether a text begins with a verb that asks for a text, in one of five languages: it seldom tells a fact."""
    return _TASK.match(text) is not None


def first_person(text: str) -> bool:
    """Whether a text speaks of the one who says it, in one of a dozen languages."""
    return bool(_FIRST_PERSON.search(text[:_LONGEST_STATEMENT]))


def second_person(text: str) -> bool:
    """Whether a text speaks of the one who hears it, in one of a dozen languages."""
    return bool(_SECOND_PERSON.search(text[:_LONGEST_STATEMENT]))


def label(text: str) -> str:
    """The beginning of a text that names its speaker; empty if there is none."""
    match = LABEL.match(text)
    return match[0] if match else ""


def owners(text: str) -> dict[str, str]:
    """The owners of what a text names, "" for the one who says it: in "my dog's name" the dog is that of the name."""
    owned = dict[str, str]()
    for match in _OWNED.finditer(text[:_LONGEST_STATEMENT].casefold()):
        things = match["mine"] or match["theirs"] or match["thing"]
        owned |= dict.fromkeys(things.split(), match["owner"] or match["whole"] or "")
    return owned
