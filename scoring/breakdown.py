"""Groups of queries by turn depth and by topic switch."""

from __future__ import annotations

from data import Turn, read_corpus

DEPTHS = (*map(str, range(11)), "11+")
TOPICS = ("first turn", "same topic", "topic switch", "unknown")


def by_depth(turns: list[Turn]) -> dict[str, str]:
    """Map query ids to DEPTHS: the turn's number in its conversation."""
    return {t.query_id: DEPTHS[min(t.turn, 11)] for t in turns}


def by_topic(turns: list[Turn], titles: dict[str, str]) -> dict[str, str]:
    """Map query ids to TOPICS, compared with the conversation's previous turn in the file.

    Topics are the turn's `topic` (TopiOCQA), else the titles of its gold passages (`titles`: id →
    title). A switch shares none with the previous turn; if that is absent, or either turn has no
    topic, it is unknown.
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
    """Read the titles of the turns' gold passages from a corpus: id → title."""
    golds = {g for turn in turns for g in turn.gold_ids}
    return {p.id: p.title for p in read_corpus(corpus) if p.id in golds and p.title}


def groups(turns: list[Turn], corpus: str, queries: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return {"depth" or "topic": {label: queries}}, labels in order.

    corpus: file with titles, for turns without a topic; may be empty. A kind with fewer than two
    labels besides "unknown" is left out.
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
