"""Makes the demo's data from its tables: `python demo/make.py` writes the committed files.

Conversations about real facts. What makes them a task for a rewriter: a conversation moves from an
entity to another one and back (novel → its author → the novel), later questions say "she", "that
country", "the first film" or only "When?", and the corpus holds the same aspect of other entities
and the other aspects of the same entity.
"""

from __future__ import annotations

import csv
import itertools
import os
import random
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Iterator, NamedTuple

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from config import at_least, run  # noqa: E402
from data import DataError, Turn  # noqa: E402
from runs import atomic_write, write_jsonl  # noqa: E402

# ------------------------------------------------------------------------------- entities, facts


class Reference(NamedTuple):
    """How a sentence speaks of an entity."""

    subject: str  # she
    object: str  # her
    possessive: str  # her


PRONOUNS = {
    "it": Reference("it", "it", "its"),
    "he": Reference("he", "him", "his"),
    "she": Reference("she", "her", "her"),
}


def by_name(name: str) -> Reference:
    """A name or a noun phrase: `Rembrandt`, `that country`."""
    return Reference(name, name, name + ("'" if name.endswith("s") else "'s"))


@dataclass(eq=False)
class Entity:
    """One row of a table."""

    kind: str
    name: str  # as the table has it
    label: (
        str  # inside a sentence: with its article, and with its noun where two kinds share the name
    )
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
        """A template about the entity, spoken of by `reference` (default: its name)."""
        s, o, p = reference or by_name(self.entity.label)
        be, a = "was" if self.entity.dead else "is", "an" if self.value[0] in "AEIOU" else "a"
        text = template.format(s=s, o=o, p=p, v=self.value, a=a, noun=self.entity.noun, be=be)
        return text[0].upper() + text[1:]


def bare(name: str) -> str:
    return name.removeprefix("the ")


def read_tables(seed: int) -> list[Entity]:
    """The entities of all tables with their facts; the seed chooses each passage's template."""
    with open(f"{HERE}/tables/templates.yaml", encoding="utf-8") as f:
        kinds = yaml.safe_load(f)
    rows: list[tuple[str, dict]] = []
    for kind in kinds:
        with open(f"{HERE}/tables/{kind}.tsv", encoding="utf-8", newline="") as f:
            table = csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE)
            rows += [(kind, row) for row in table]
    bearers = defaultdict(set)
    for kind, row in rows:
        bearers[bare(row["name"]).lower()].add(kind)
    entities: list[Entity] = []
    numbers = itertools.count(1)
    for kind, row in rows:
        form, name = kinds[kind], row["name"]
        noun = row.get("noun") or form["noun"]
        shared = len(bearers[bare(name).lower()]) > 1
        label = f"the {noun} {name}" if shared else f"{form.get('article', '')} {name}".strip()
        title = bare(name)[0].upper() + bare(name)[1:] + (f" ({noun})" if shared else "")
        pronoun = row.get("pronoun") or form["pronoun"]
        dead, ranked = bool(row.get("died")), "ranked" in form
        entity = Entity(kind, name, label, title, noun, pronoun, dead, ranked)
        for aspect in form["aspects"]:
            if row[aspect]:
                id_ = f"demo-{next(numbers):05d}"
                fact = Fact(entity, aspect, form["aspects"][aspect], row[aspect], id_)
                rng = random.Random(f"{seed}/passage/{kind}/{name}/{aspect}")
                fact.text = fact.say(rng.choice(fact.form["passages"]))
                entity.facts[aspect] = fact
        entities.append(entity)
    known = {(e.kind, bare(e.name)): e for e in entities}
    for fact in (fact for entity in entities for fact in entity.facts.values()):
        keys = [(kind, bare(fact.value)) for kind in fact.form.get("link", ())]
        fact.link = next((known[key] for key in keys if key in known), None)
        there = fact.link.facts if fact.link else {}
        twins = [there[aspect] for aspect in fact.form.get("same", ()) if aspect in there]
        name = bare(fact.entity.name)
        fact.gold_ids = [fact.id] + [twin.id for twin in twins if bare(twin.value) == name]
    return entities


# --------------------------------------------------------------------------------- conversations


class Said(NamedTuple):
    """One turn of a conversation under way."""

    fact: Fact
    question: str
    rewrite: str
    answer: str


class Conversation:
    """Draws the turns of one conversation; no fact in `asked` is asked for again."""

    def __init__(self, rng: random.Random, entities: list[Entity], asked: set[Fact]):
        self.rng, self.entities, self.asked = rng, entities, asked
        self.said: list[Said] = []

    def open_facts(self, entity: Entity) -> list[Fact]:
        """What may be asked about an entity."""
        if entity not in self.entities:
            return []
        asked = self.asked | {turn.fact for turn in self.said}
        return [fact for fact in entity.facts.values() if fact not in asked]

    def subjects(self) -> list[Entity]:
        return list(dict.fromkeys(turn.fact.entity for turn in self.said))

    def mentioned(self) -> list[Entity]:
        links = [turn.fact.link for turn in self.said if turn.fact.link]
        return list(dict.fromkeys(self.subjects() + links))

    def pick(self, entity: Entity) -> Fact | None:
        """An open fact of the entity; three times as likely where the talk can go on from it."""
        facts = self.open_facts(entity)
        return self.rng.choices(facts, [3 if f.link else 1 for f in facts])[0] if facts else None

    def template(self, templates: list[str], reference: Reference | None) -> str:
        """One of the templates; not "the capital of it" where another suits a pronoun."""
        if reference in PRONOUNS.values():
            clumsy = re.compile(r"\b(of|in|on|for) {[so]}")
            templates = [t for t in templates if not clumsy.search(t)] or templates
        return self.rng.choice(templates)

    def ask(self, fact: Fact, reference: Reference | None = None, question: str = "") -> Said:
        """The turn that asks for `fact`: by `question`, or by a template with `reference`."""
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
            return by_name(f"the {entity.noun}")
        spoken = [e for e in self.subjects() if e.noun == entity.noun]
        ordinals = ("first", "second", "third")
        if set(spoken) == set(alike) and len(spoken) <= len(ordinals) and not entity.ranked:
            return by_name(f"the {ordinals[spoken.index(entity)]} {entity.noun}")
        return None

    def rivals(self, entity: Entity, aspect: str) -> bool:
        """Whether the entity's pronoun could as well mean what the last answer named."""
        last = self.said[-1].fact
        other = last.link
        if entity.pronoun != "it" and last.form.get("person") and other is not entity:
            return True
        alike = other and other is not entity and other.pronoun == entity.pronoun
        return bool(alike and aspect in other.facts)

    def stay(self) -> Said | None:
        """The same entity again: a pronoun, an elliptical question or one word."""
        last = self.said[-1].fact
        topic, pronoun = last.entity, PRONOUNS[last.entity.pronoun]
        fact = self.pick(topic)
        if fact is None:
            return None
        followed = [f for f in self.open_facts(topic) if last.aspect in f.form.get("then", ())]
        if followed and self.rng.random() < 0.6:
            fact = self.rng.choice(followed)
            return self.ask(fact, pronoun, self.rng.choice(fact.form["then"][last.aspect]))
        reference = self.by_noun(topic) if self.rivals(topic, fact.aspect) else pronoun
        if reference and self.rng.random() < 0.35:
            name = fact.form["name"]
            whose = f"{reference.possessive} {name}"
            forms = [f"And {whose}?", f"What about {whose}?", f"And the {name}?"]
            return self.ask(
                fact, reference, self.rng.choice(forms[: 3 if reference == pronoun else 2])
            )
        return self.ask(fact, reference) if reference else None

    def hop(self) -> Said | None:
        """On to the entity that the last answer named: she, that country, its author."""
        last = self.said[-1].fact
        fact = last.link and self.pick(last.link)
        if not fact:
            return None
        target, topic = last.link, last.entity
        forms = []
        if "role" in last.form and not self.rivals(topic, ""):
            forms.append(by_name(f"{PRONOUNS[topic.pronoun].possessive} {last.form['role']}"))
        if target.pronoun == "it":
            forms.append(by_name(f"that {target.noun}"))
        elif target.pronoun != topic.pronoun:
            forms += [PRONOUNS[target.pronoun]] * 2
        return self.ask(fact, self.rng.choice(forms)) if forms else None

    def back(self) -> Said | None:
        """Back to an earlier entity: the novel, the first country, an unambiguous "she"."""
        earlier = [e for e in self.subjects() if e is not self.said[-1].fact.entity]
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
        last, mentioned = self.said[-1].fact, self.mentioned()
        facts = [
            fact
            for entity in self.entities
            if (entity.kind, entity.noun) == (last.entity.kind, last.entity.noun)
            and entity not in mentioned
            for fact in self.open_facts(entity)
            if fact.aspect == last.aspect and fact.value != last.value
        ]
        if not facts:
            return None
        fact = self.rng.choice(facts)
        label = fact.entity.label
        form = self.rng.choice(["What about {}?", "And {}?", "How about {}?"])
        return self.ask(fact, by_name(label), form.format(label))

    def draw(self, start: Entity, length: int) -> list[Said]:
        """Up to `length` turns, the first one self-contained; fewer where no fact is left."""
        first = self.pick(start)
        if first:
            self.said.append(self.ask(first))
        while self.said and len(self.said) < length:
            moves = [self.hop] * 5 + [self.stay] * 4 + [self.back] * 3 + [self.sibling]
            self.rng.shuffle(moves)
            turn = next(filter(None, (move() for move in moves)), None)
            if turn is None:
                break
            self.said.append(turn)
        return self.said


def draw_split(
    name: str, count: int, entities: list[Entity], seed: int
) -> tuple[list[Turn], set[Fact]]:
    """`count` turns in conversations of three to six, and the facts that they ask for."""
    rng = random.Random(f"{seed}/{name}")
    asked: set[Fact] = set()
    turns: list[Turn] = []
    starts: list[Entity] = []
    conversation = failures = 0
    while len(turns) < count:
        left = count - len(turns)
        if failures > 2 * len(entities) or left < 3:
            raise DataError(
                f"{name}_turns={count}: the tables give {len(turns)} turns in conversations of 3 "
                f"to 6; set {name}_turns to a number from 3 to that"
            )
        starts = starts or rng.sample(entities, len(entities))
        length = rng.choice([n for n in (3, 4, 5, 5, 6, 6) if left - n >= 3 or left == n] or [left])
        said = Conversation(rng, entities, asked).draw(starts.pop(), length)
        if len(said) < 3 or 0 < left - len(said) < 3:
            failures += 1
            continue
        conversation, failures = conversation + 1, 0
        id_ = f"demo-{name}-{conversation:04d}"
        for i, turn in enumerate(said):
            asked.add(turn.fact)
            context = [(t.question, t.answer) for t in said[:i]]
            golds, answer, rewrite = list(turn.fact.gold_ids), turn.answer, turn.rewrite
            turns.append(
                Turn(f"{id_}_{i + 1}", id_, i + 1, context, turn.question, golds, answer, rewrite)
            )
    return turns, asked


@dataclass
class MakeConfig:
    out: str = HERE
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""
    seed: int = 0
    """chooses templates, conversations and the split"""
    train_turns: Annotated[int, at_least(0)] = 300
    """turns to draw for training; dev and test stay the same whatever their number"""
    dev_turns: Annotated[int, at_least(0)] = 50
    """turns to draw for validation"""
    test_turns: Annotated[int, at_least(0)] = 100
    """turns for the final figures"""


def main(cfg: MakeConfig) -> dict:
    """Draw test, dev and train, and write them with the corpus of all facts.

    No entity is asked about in two splits. A fact that a second passage states too has two golds,
    and that passage may be the gold of another split's turn: dev gives up golds of test, train
    those of both, a turn without gold is left out.
    """
    entities = read_tables(cfg.seed)
    free, held, splits = entities, set(), {}
    for name in ("test", "dev", "train"):  # test first: it never moves
        turns, asked = draw_split(name, getattr(cfg, f"{name}_turns"), free, cfg.seed)
        taken = {fact.entity for fact in asked}
        free = [entity for entity in free if entity not in taken]
        for turn in turns:
            turn.gold_ids = [gold for gold in turn.gold_ids if gold not in held]
        splits[name] = [turn for turn in turns if turn.gold_ids]
        held |= {gold for turn in turns for gold in turn.gold_ids}

    def passages() -> Iterator[dict]:
        for fact in (fact for entity in entities for fact in entity.facts.values()):
            title = fact.entity.title
            if random.Random(f"{cfg.seed}/title/{fact.id}").random() < 0.5:
                title = f"{title}, {fact.form['name']}"
            yield {"id": fact.id, "title": title, "text": fact.text}

    counts = {"passages": write_jsonl(os.path.join(cfg.out, "corpus.jsonl"), passages())}
    for name, turns in splits.items():
        path = os.path.join(cfg.out, name)
        counts[f"{name}_turns"] = write_jsonl(f"{path}.jsonl", (turn.record() for turn in turns))
        with atomic_write(f"{path}.qrels") as f:
            f.writelines(
                f"{turn.query_id} 0 {gold} 1\n" for turn in turns for gold in turn.gold_ids
            )
    return {"out": cfg.out, **counts}


if __name__ == "__main__":
    run(MakeConfig, main)
