"""Groups of queries by turn depth and by topic switch."""

from __future__ import annotations

from data import Turn, read_corpus

DEPTHS = (*map(str, range(11)), "11+")
TOPICS = ("first turn", "same topic", "topic switch", "unknown")


def by_topic(turns: list[Turn], titles: dict[str, str]) -> dict[str, str]:
    """Map query ids to TOPICS, compared with the conversation's previous turn in the file.

    Topics are the turn's `topic` (TopiOCQA), else the titles of its gold passages (`titles`: id →
    title). A switch shares none with the previous turn; if that is absent, or either turn has no
    topic, it is unknown.
    """
    labels: dict[str, str] = {}
    topics: dict[str, set[str]] = {}  # of a conversation's last turn
    for turn in sorted(turns, key=lambda t: t.turn):
        own = {titles[gold] for gold in turn.gold_ids if gold in titles}
        if turn.extra.get("topic"):
            own = {str(turn.extra["topic"])}
        before = topics.get(turn.conversation_id)
        topics[turn.conversation_id] = own
        if before is None:
            label = "unknown" if turn.context else "first turn"
        elif not before or not own:
            label = "unknown"
        else:
            label = "same topic" if before & own else "topic switch"
        labels[turn.query_id] = label
    return labels


def groups(turns: list[Turn], corpus: str, queries: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return {"depth" or "topic": {label: queries}}, labels in order.

    corpus: file with titles, for turns without a topic; may be empty. A kind with fewer than two
    labels besides "unknown" is left out.
    """
    titles = {}
    if corpus and not all(turn.extra.get("topic") for turn in turns):
        golds = {gold for turn in turns for gold in turn.gold_ids}
        titles = {p.id: p.title for p in read_corpus(corpus) if p.id in golds and p.title}
    depths = {turn.query_id: DEPTHS[min(turn.turn, 11)] for turn in turns}
    out = {}
    for kind, labels, order in (
        ("depth", depths, DEPTHS),
        ("topic", by_topic(turns, titles), TOPICS),
    ):
        found = {label: [q for q in queries if labels.get(q) == label] for label in order}
        found = {label: members for label, members in found.items() if members}
        if len(found.keys() - {"unknown"}) > 1:
            out[kind] = found
    return out
