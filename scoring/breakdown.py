"""Where in a conversation a system gains: queries grouped by turn depth and by topic switch."""

from __future__ import annotations

from data import Turn, read_corpus

DEEP = 10  # turns beyond it share one group
TOPICS = ("first turn", "same topic", "topic switch", "unknown")


def by_depth(turns: list[Turn]) -> dict[str, str]:
    """Query id → "1", "2", … "10", "11+": the turn's number within its conversation."""
    return {t.query_id: str(t.turn) if t.turn <= DEEP else f"{DEEP + 1}+" for t in turns}


def by_topic(turns: list[Turn], titles: dict[str, str]) -> dict[str, str]:
    """Query id → one of TOPICS, against the turn before in the file.

    The data's own `topic` decides where turns have one (TopiOCQA). Elsewhere the titles of the gold
    passages do (`titles`: passage id → title): a switch is a turn whose golds share no title with
    those of the turn before; unknown where either has no titled gold, or where the file left the
    turn before out.
    """

    def topics(turn: Turn) -> set[str]:
        if turn.extra.get("topic"):
            return {str(turn.extra["topic"])}
        return {titles[g] for g in turn.gold_ids if titles.get(g)}

    labels: dict[str, str] = {}
    before: dict[str, Turn] = {}
    for turn in sorted(turns, key=lambda t: t.turn):
        last = before.get(turn.conversation_id)
        before[turn.conversation_id] = turn
        if last is None:
            labels[turn.query_id] = "first turn" if not turn.context else "unknown"
        elif not topics(last) or not topics(turn):
            labels[turn.query_id] = "unknown"
        else:
            same = topics(last) & topics(turn)
            labels[turn.query_id] = "same topic" if same else "topic switch"
    return labels


def gold_titles(corpus: str, turns: list[Turn]) -> dict[str, str]:
    """Passage id → title of the turns' gold passages, from a corpus file; the untitled left out."""
    golds = {g for turn in turns for g in turn.gold_ids}
    return {p.id: p.title for p in read_corpus(corpus) if p.id in golds and p.title}


def groups(turns: list[Turn], corpus: str, queries: list[str]) -> dict[str, dict[str, list[str]]]:
    """Kind ("depth", "topic") → label → queries of it, the labels in reading order.

    corpus: file whose titles tell topic switches where turns have no topic, or empty. A kind with
    fewer than two labels beside "unknown" is left out.
    """
    titled = corpus and not all(turn.extra.get("topic") for turn in turns)
    titles = gold_titles(corpus, turns) if titled else {}
    out = {}
    for kind, labels in (("depth", by_depth(turns)), ("topic", by_topic(turns, titles))):
        found: dict[str, list[str]] = {}
        for query in queries:
            if query in labels:
                found.setdefault(labels[query], []).append(query)
        if len(found.keys() - {"unknown"}) > 1:
            out[kind] = {label: found[label] for label in sorted(found, key=order)}
    return out


def order(label: str) -> tuple:
    """Sort key of the labels: numbers as numbers, topics as in TOPICS."""
    return (0, int(label.rstrip("+"))) if label[0].isdigit() else (1, TOPICS.index(label))
