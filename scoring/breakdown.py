"""Where in a conversation a system gains: queries grouped by turn depth and by topic switch."""

from __future__ import annotations

from data import Turn, read_corpus

DEPTHS = (*map(str, range(11)), "11+")
TOPICS = ("first turn", "same topic", "topic switch", "unknown")


def by_depth(turns: list[Turn]) -> dict[str, str]:
    """Query id → one of DEPTHS: the turn's number within its conversation."""
    return {t.query_id: DEPTHS[min(t.turn, 11)] for t in turns}


def by_topic(turns: list[Turn], titles: dict[str, str]) -> dict[str, str]:
    """Query id → one of TOPICS, against the turn before in the file.

    Topics are the data's own `topic` (TopiOCQA), else the titles of the gold passages (`titles`:
    passage id → title); a switch is a turn that shares none with the turn before, unknown where
    either has none or where the file left the turn before out.
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
            labels[turn.query_id] = "unknown" if turn.context else "first turn"
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
    for kind, labels, order in (
        ("depth", by_depth(turns), DEPTHS),
        ("topic", by_topic(turns, titles), TOPICS),
    ):
        found = {label: [q for q in queries if labels.get(q) == label] for label in order}
        found = {label: members for label, members in found.items() if members}
        if len(found.keys() - {"unknown"}) > 1:
            out[kind] = found
    return out
