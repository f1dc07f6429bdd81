"""The demo data: conversations about real facts, rendered from the tables in `demo/` (`python prepare.py demo`).

A file of its own because the demo's corpus and conversations are authored here, while `prepare.py` is the table of
commands, most of which turn other people's data into records.

What makes them a task for a rewriter: a conversation moves from an entity to another one and back (novel → its author →
the novel), later questions say "she", "that country", "the first film" or only "When?", and the corpus holds the same
aspect of other entities and the other aspects of the same entity.
"""

from __future__ import annotations

import csv
import itertools
import os
import random
import re
from dataclasses import dataclass, field
from typing import Callable, Iterator, NamedTuple

import yaml

from data import DataError, Turn

TABLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")


# ------------------------------------------------------------------------------------------------- entities, facts

class Reference(NamedTuple):
    """How a sentence speaks of an entity."""

    subject: str  # she
    object: str  # her
    possessive: str  # her


PRONOUNS = {"it": Reference("it", "it", "its"), "he": Reference("he", "him", "his"),
            "she": Reference("she", "her", "her")}


def named(name: str) -> Reference:
    """The reference that is a name or a noun phrase: `Rembrandt`, `that country`."""
    return Reference(name, name, name + ("'" if name.endswith("s") else "'s"))


@dataclass(eq=False)
class Entity:
    """One row of a table."""

    kind: str
    name: str  # as the table has it
    label: str  # inside a sentence: with its article, and with its noun where two kinds share the name
    title: str  # of its passages
    noun: str
    pronoun: str
    dead: bool
    ranked: bool  # "the first element" is hydrogen: no ordinal may refer to it
    facts: dict[str, Fact] = field(default_factory=dict)  # by aspect


@dataclass(eq=False)
class Fact:
    """One cell of a table: the aspect of an entity, and the passage that states it."""

    entity: Entity
    aspect: str
    form: dict  # the aspect's entry in templates.yaml
    value: str
    id: str
    text: str = ""
    link: Entity | None = None  # the value, where it is an entity too
    gold_ids: list[str] = field(default_factory=list)

    def say(self, template: str, reference: Reference | None = None) -> str:
        """A template of the aspect about the entity, spoken of by `reference` (default: its name)."""
        s, o, p = reference or named(self.entity.label)
        text = template.format(s=s, o=o, p=p, v=self.value, a="an" if self.value[0] in "AEIOU" else "a",
                               noun=self.entity.noun, be="was" if self.entity.dead else "is")
        return text[0].upper() + text[1:]


def bare(name: str) -> str:
    return name.removeprefix("the ")


def read_tables(folder: str, seed: int) -> list[Entity]:
    """The entities of all tables with their facts; the seed chooses each passage's template and title."""
    with open(os.path.join(folder, "templates.yaml"), encoding="utf-8") as f:
        kinds = yaml.safe_load(f)
    tables: dict[str, list[dict]] = {}
    for kind in kinds:
        with open(os.path.join(folder, f"{kind}.tsv"), encoding="utf-8", newline="") as f:
            tables[kind] = list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
    bearers: dict[str, set[str]] = {}
    for kind, rows in tables.items():
        for row in rows:
            bearers.setdefault(bare(row["name"]).lower(), set()).add(kind)
    entities: list[Entity] = []
    ids = itertools.count(1)
    for kind, rows in tables.items():
        for row in rows:
            name, noun = row["name"], row.get("noun") or kinds[kind]["noun"]
            shared = len(bearers[bare(name).lower()]) > 1
            article = f"{kinds[kind]['article']} " if "article" in kinds[kind] else ""
            title = bare(name)[0].upper() + bare(name)[1:] + (f" ({noun})" if shared else "")
            entity = Entity(kind, name, f"the {noun} {name}" if shared else article + name, title, noun,
                            row.get("pronoun") or kinds[kind]["pronoun"], bool(row.get("died")),
                            "ranked" in kinds[kind])
            for aspect, form in kinds[kind]["aspects"].items():
                if row[aspect]:
                    fact = Fact(entity, aspect, form, row[aspect], f"demo-{next(ids):05d}")
                    rng = random.Random(f"{seed}/passage/{kind}/{name}/{aspect}")
                    fact.text = fact.say(rng.choice(form["passages"]))
                    entity.facts[aspect] = fact
            entities.append(entity)
    known = {(e.kind, bare(e.name)): e for e in entities}
    for fact in (f for e in entities for f in e.facts.values()):
        keys = [(k, bare(fact.value)) for k in fact.form.get("link", ())]
        fact.link = next((known[key] for key in keys if key in known), None)
        twins = [fact.link.facts[a] for a in fact.form.get("same", ()) if fact.link and a in fact.link.facts]
        fact.gold_ids = [fact.id] + [t.id for t in twins if bare(t.value) == bare(fact.entity.name)]
    return entities


# --------------------------------------------------------------------------------------------------- conversations

@dataclass
class Said:
    """One turn of a conversation under way."""

    fact: Fact
    question: str
    rewrite: str
    answer: str


class Conversation:
    """Draws the turns of one conversation; `open_facts(entity)` are the facts that may be asked about an entity."""

    def __init__(self, rng: random.Random, open_facts: Callable[[Entity], list[Fact]], entities: list[Entity]):
        self.rng, self.open_facts, self.entities = rng, open_facts, entities
        self.said: list[Said] = []

    def subjects(self) -> list[Entity]:
        return list(dict.fromkeys(s.fact.entity for s in self.said))

    def mentioned(self) -> list[Entity]:
        links = [s.fact.link for s in self.said if s.fact.link]
        return list(dict.fromkeys(self.subjects() + links))

    def pick(self, entity: Entity) -> Fact | None:
        """A fact of the entity that was not asked yet; three times as likely where the talk can go on from it."""
        facts = [f for f in self.open_facts(entity) if f not in [s.fact for s in self.said]]
        return self.rng.choices(facts, [3 if f.link else 1 for f in facts])[0] if facts else None

    def template(self, templates: list[str], reference: Reference | None) -> str:
        """One of the templates; of those that read well with a pronoun ("the capital of it" is nobody's English)."""
        if reference in PRONOUNS.values():
            templates = [t for t in templates if not re.search(r"\b(of|in|on|for) {[so]}", t)] or templates
        return self.rng.choice(templates)

    def ask(self, fact: Fact, reference: Reference | None = None, question: str | None = None) -> Said:
        """The turn that asks for `fact`: by `question`, or by a template of its aspect with `reference`."""
        template = self.template(fact.form["questions"], reference)
        short = PRONOUNS[fact.entity.pronoun] if reference and self.rng.random() < 0.5 else None
        answer = fact.say(self.template(fact.form["answers"], short), short)
        text = question or fact.say(template, reference)
        if reference and not question and self.rng.random() < 0.25:
            text = "And " + text[0].lower() + text[1:]
        return Said(fact, text, fact.say(template), answer)

    def by_noun(self, entity: Entity) -> Reference | None:
        """`the novel`, or `the first novel` among several; None where that would not be clear."""
        alike = [e for e in self.mentioned() if e.noun == entity.noun]
        if len(alike) == 1:
            return named(f"the {entity.noun}")
        spoken = [e for e in self.subjects() if e.noun == entity.noun]
        ordinals = ("first", "second", "third")
        if set(spoken) == set(alike) and len(spoken) <= len(ordinals) and not entity.ranked:
            return named(f"the {ordinals[spoken.index(entity)]} {entity.noun}")
        return None

    def rivals(self, entity: Entity, aspect: str) -> bool:
        """Whether the last answer named somebody or something else that the entity's pronoun could as well mean."""
        last = self.said[-1].fact
        if entity.pronoun != "it" and last.form.get("person") and last.link is not entity:
            return True
        other = last.link
        return bool(other and other is not entity and other.pronoun == entity.pronoun and aspect in other.facts)

    def stay(self) -> Said | None:
        """The same entity again: a pronoun, an elliptical question or one word."""
        topic, last = self.said[-1].fact.entity, self.said[-1].fact
        fact = self.pick(topic)
        if fact is None:
            return None
        followed = [f for f in self.open_facts(topic) if last.aspect in f.form.get("then", ()) and f not in
                    [s.fact for s in self.said]]
        if followed and self.rng.random() < 0.6:
            fact = self.rng.choice(followed)
            return self.ask(fact, PRONOUNS[topic.pronoun], self.rng.choice(fact.form["then"][last.aspect]))
        reference = self.by_noun(topic) if self.rivals(topic, fact.aspect) else PRONOUNS[topic.pronoun]
        if reference is None:
            return None
        if self.rng.random() < 0.35:
            name = fact.form["name"]
            forms = [f"And {reference.possessive} {name}?", f"What about {reference.possessive} {name}?"]
            forms += [f"And the {name}?"] * (reference == PRONOUNS[topic.pronoun])
            return self.ask(fact, reference, self.rng.choice(forms))
        return self.ask(fact, reference)

    def hop(self) -> Said | None:
        """On to the entity that the last answer named: she, that country, its author."""
        last = self.said[-1].fact
        fact = last.link and self.pick(last.link)
        if not fact:
            return None
        target, topic = last.link, last.entity
        forms = []
        if "role" in last.form and not self.rivals(topic, ""):
            forms.append(named(f"{PRONOUNS[topic.pronoun].possessive} {last.form['role']}"))
        if target.pronoun == "it":
            forms.append(named(f"that {target.noun}"))
        elif target.pronoun != topic.pronoun:
            forms += [PRONOUNS[target.pronoun]] * 2
        return self.ask(fact, self.rng.choice(forms)) if forms else None

    def back(self) -> Said | None:
        """Back to an entity from earlier on: the novel, the first country, or a pronoun that fits nobody else."""
        topic = self.said[-1].fact.entity
        earlier = [e for e in self.subjects() if e is not topic]
        target = self.rng.choice(earlier) if earlier else None
        fact = target and self.pick(target)
        if not fact:
            return None
        alone = [e for e in self.mentioned() if e.pronoun == target.pronoun] == [target]
        if alone and not self.rivals(target, fact.aspect) and self.rng.random() < 0.6:
            return self.ask(fact, PRONOUNS[target.pronoun])
        reference = self.by_noun(target)
        return self.ask(fact, reference) if reference else None

    def sibling(self) -> Said | None:
        """The same aspect of another entity of the kind: "What about Spain?"."""
        last = self.said[-1].fact
        mentioned = self.mentioned()
        others = [e for e in self.entities if (e.kind, e.noun) == (last.entity.kind, last.entity.noun)
                  and e not in mentioned and last.aspect in e.facts
                  and e.facts[last.aspect].value != last.value and e.facts[last.aspect] in self.open_facts(e)]
        if not others:
            return None
        target = self.rng.choice(others)
        return self.ask(target.facts[last.aspect], named(target.label),
                        self.rng.choice(["What about {}?", "And {}?", "How about {}?"]).format(target.label))

    def draw(self, start: Entity, length: int) -> list[Said]:
        """Up to `length` turns, the first one self-contained; fewer where nothing is left to say."""
        first = self.pick(start)
        if first is None:
            return []
        self.said.append(self.ask(first))
        while len(self.said) < length:
            moves = [self.hop] * 5 + [self.stay] * 4 + [self.back] * 3 + [self.sibling]
            self.rng.shuffle(moves)
            turn = next((t for t in (move() for move in moves) if t), None)
            if turn is None:
                break
            self.said.append(turn)
        return self.said


def draw_split(name: str, count: int, entities: list[Entity], taken: set[Entity], seed: int) -> list[Turn]:
    """`count` turns in conversations of three to six about entities outside `taken`, which gains those asked about.

    No fact is asked for twice.  DataError where the tables do not hold enough facts.
    """
    rng = random.Random(f"{seed}/{name}")
    free = [e for e in entities if e not in taken]
    asked: set[Fact] = set()

    def open_facts(entity: Entity) -> list[Fact]:
        return [] if entity in taken else [f for f in entity.facts.values() if f not in asked]

    turns: list[Turn] = []
    starts: list[Entity] = []
    conversation = failures = 0
    while len(turns) < count:
        left = count - len(turns)
        if failures > 2 * len(free) or left < 3:
            raise DataError(f"{name}_turns={count}: the tables give {len(turns)} turns in conversations of at least 3; "
                            f"set {name}_turns to that number or less" if left >= 3 else
                            f"{name}_turns={count}: a conversation has 3 to 6 turns; set {name}_turns to 3 or more")
        if not starts:
            starts = rng.sample(free, len(free))
        length = rng.choice([n for n in (3, 4, 5, 5, 6, 6) if left - n >= 3 or left == n] or [left])
        said = Conversation(rng, open_facts, free).draw(starts.pop(), length)
        if len(said) < 3 or 0 < left - len(said) < 3:
            failures += 1
            continue
        conversation, failures = conversation + 1, 0
        for i, turn in enumerate(said):
            asked.add(turn.fact)
            turns.append(Turn(f"demo-{name}-{conversation:04d}_{i + 1}", f"demo-{name}-{conversation:04d}", i + 1,
                              [(t.question, t.answer) for t in said[:i]], turn.question, turn.fact.gold_ids,
                              answer=turn.answer, rewrite=turn.rewrite))
    taken |= {fact.entity for fact in asked}
    return turns


def synthetic_passages(count: int, seed: int) -> Iterator[dict]:
    """`count` passages about made-up entities, streamed; ids, titles and texts say that they are synthetic."""
    rng = random.Random(f"{seed}/synthetic")
    parts = [a + b for a in "bdgklmnprstvz" for b in "aeiou"]
    claims = ["has the currency {}", "was first described by {}", "lies on the river {}", "is named after {}",
              "was designed by {}", "has its premiere hall in {}", "has the capital {}", "is governed from {}"]
    nouns = ["town", "country", "mountain", "opera", "element", "novelist", "film", "tower"]
    for i in range(1, count + 1):
        bits = rng.getrandbits(48)
        word = [parts[bits >> s & 63] for s in (0, 6, 12, 18, 24, 30)]
        name, value = "".join(word[:3]).capitalize(), "".join(word[3:]).capitalize()
        noun, claim = nouns[bits >> 36 & 7], claims[bits >> 39 & 7].format(value)
        yield {"id": f"synthetic-{i:07d}", "title": f"{name} {i} (synthetic {noun})",
               "text": f"In this synthetic record, the {noun} {name} {i} {claim}."}


def demo_passages(entities: list[Entity], extra: int, seed: int) -> Iterator[dict]:
    """The corpus: one passage a fact, then `extra` synthetic ones."""
    for fact in (f for e in entities for f in e.facts.values()):
        long = random.Random(f"{seed}/title/{fact.id}").random() < 0.5
        title = f"{fact.entity.title}, {fact.form['name']}" if long else fact.entity.title
        yield {"id": fact.id, "title": title, "text": fact.text}
    yield from synthetic_passages(extra, seed)
