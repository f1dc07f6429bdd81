"""Makes the committed demo data from its tables: `python demo/make.py`.

Conversations move between linked entities (novel → author → novel); later questions say "she",
"that country", "the first film" or only "When?".
"""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Iterator, NamedTuple

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from config import at_least, run  # noqa: E402
from data import DataError, Turn, read_lines  # noqa: E402
from runs import atomic_write, write_jsonl  # noqa: E402

# ---- entities, facts


class Reference(NamedTuple):
    """The three forms of a reference: she, her, her."""

    subject: str
    object: str
    possessive: str


WORDS = (("it", "it", "its"), ("he", "him", "his"), ("she", "her", "her"))
PRONOUNS = {words[0]: Reference(*words) for words in WORDS}


def by_name(name: str) -> Reference:
    """A reference by name or noun phrase."""
    return Reference(name, name, name + ("'" if name.endswith("s") else "'s"))


def bare(name: str) -> str:
    return name.removeprefix("the ")


class Entity:
    """A row of a table; `shared`: another kind has this name too."""

    def __init__(self, kind: str, form: dict, row: dict[str, str], shared: bool):
        self.kind, self.name = kind, row["name"]
        self.noun = row.get("noun") or form["noun"]
        self.pronoun = PRONOUNS[row.get("pronoun") or form["pronoun"]]
        article = f"the {self.noun}" if shared else form.get("article", "")
        self.label = f"{article} {self.name}".strip()  # inside a sentence
        title = bare(self.name)
        self.title = title[0].upper() + title[1:] + (f" ({self.noun})" if shared else "")
        self.be = "was" if row.get("died") else "is"
        self.ranked = "ranked" in form  # "the first element": hydrogen
        self.facts: dict[str, Fact] = {}  # by aspect


class Fact:
    """A cell of a table; `form` is its aspect in templates.yaml."""

    def __init__(self, entity: Entity, aspect: str, form: dict, value: str, id: str):
        self.entity, self.aspect, self.form, self.value, self.id = entity, aspect, form, value, id
        self.gold_ids = [id]
        self.link: Entity | None = None  # the value, if it is an entity

    def say(self, template: str, reference: Reference | None = None) -> str:
        """Fill in a template; `reference` names the entity (None: its label)."""
        s, o, p = reference or by_name(self.entity.label)
        a, words = "an" if self.value[0] in "AEIOU" else "a", vars(self.entity)
        text = template.format(s=s, o=o, p=p, v=self.value, a=a, **words)
        return text[0].upper() + text[1:]


def read_tables(seed: int) -> list[Entity]:
    """All entities with facts; `seed` chooses the passages' templates."""
    with open(f"{HERE}/tables/templates.yaml", encoding="utf-8") as f:
        forms = yaml.safe_load(f)
    rows: list[tuple[str, dict[str, str]]] = []  # kind, row
    for kind in forms:
        header, *lines = (line.split("\t") for _, line in read_lines(f"{HERE}/tables/{kind}.tsv"))
        rows += [(kind, dict(zip(header, line))) for line in lines]
    names = {(kind, bare(row["name"]).lower()) for kind, row in rows}
    kinds = Counter(name for _, name in names)
    entities: list[Entity] = []
    ids = (f"demo-{number:05d}" for number in itertools.count(1))
    for kind, row in rows:
        entity = Entity(kind, forms[kind], row, shared=kinds[bare(row["name"]).lower()] > 1)
        for aspect, form in forms[kind]["aspects"].items():
            if value := row.get(aspect):
                entity.facts[aspect] = fact = Fact(entity, aspect, form, value, next(ids))
                rng = random.Random(f"{seed}/passage/{kind}/{entity.name}/{aspect}")
                fact.text = fact.say(rng.choice(form["passages"]))
        entities.append(entity)
    known = {(entity.kind, bare(entity.name)): entity for entity in entities}
    for fact in facts_of(entities):
        links = [known.get((kind, bare(fact.value))) for kind in fact.form.get("link", ())]
        fact.link = next(filter(None, links), None)
        for aspect in fact.form.get("same", ()) if fact.link else ():
            twin = fact.link.facts.get(aspect)
            if twin and bare(twin.value) == bare(fact.entity.name):  # states the same fact
                fact.gold_ids.append(twin.id)
    return entities


def facts_of(entities: list[Entity]) -> list[Fact]:
    return [fact for entity in entities for fact in entity.facts.values()]


# ---- conversations


class Conversation:
    """Draws one conversation about facts that are not in `asked`.

    A move (`stay`, `hop`, `back`, `sibling`) tries to add a turn and returns whether it could.
    """

    def __init__(self, rng: random.Random, entities: list[Entity], asked: set[Fact]):
        self.rng, self.entities, self.asked = rng, entities, asked
        self.facts: list[Fact] = []
        self.turns: list[tuple[str, str, str]] = []  # question, rewrite, answer

    def draw(self, start: Entity, length: int) -> None:
        """Add up to `length` turns, the first one self-contained."""
        if first := self.pick(start):
            self.ask(first)
        while 0 < len(self.facts) < length:
            moves = [self.hop] * 5 + [self.stay] * 4 + [self.back] * 3 + [self.sibling]
            self.rng.shuffle(moves)
            if not any(move(self.facts[-1]) for move in moves):
                break

    def open_facts(self, entity: Entity | None) -> list[Fact]:
        """Facts still to be asked; none for an entity of another split."""
        facts = entity.facts.values() if entity in self.entities else ()
        return [f for f in facts if f not in self.asked and f not in self.facts]

    def pick(self, entity: Entity | None) -> Fact | None:
        """A random open fact; those with a link are 3 times as likely."""
        facts = self.open_facts(entity)
        return self.rng.choices(facts, [3 if f.link else 1 for f in facts])[0] if facts else None

    def template(self, templates: list[str], reference: Reference | None) -> str:
        """A random template; with a pronoun, if possible not like "the capital of it"."""
        if reference in PRONOUNS.values():
            clumsy = re.compile(r"\b(of|in|on|for) {[so]}")
            templates = [t for t in templates if not clumsy.search(t)] or templates
        return self.rng.choice(templates)

    def ask(self, fact: Fact, reference: Reference | None = None, question: str = "") -> bool:
        """Add a turn that asks for `fact` by `question`, or else by a template."""
        template = self.template(fact.form["questions"], reference)
        short = fact.entity.pronoun if reference and self.rng.random() < 0.5 else None
        answer = fact.say(self.template(fact.form["answers"], short), short)
        text = question or fact.say(template, reference)
        if reference and not question and self.rng.random() < 0.25:
            text = "And " + text[0].lower() + text[1:]
        self.facts.append(fact)
        self.turns.append((text, fact.say(template), answer))
        return True

    def subjects(self) -> list[Entity]:
        return list(dict.fromkeys(fact.entity for fact in self.facts))

    def mentioned(self) -> list[Entity]:
        links = [fact.link for fact in self.facts if fact.link]
        return list(dict.fromkeys(self.subjects() + links))

    def by_noun(self, entity: Entity) -> Reference | None:
        """`the novel`, or `the first novel` among several; None if ambiguous."""
        alike = [e for e in self.mentioned() if e.noun == entity.noun]
        if len(alike) == 1:
            return by_name(f"the {entity.noun}")
        asked = [e for e in self.subjects() if e.noun == entity.noun]
        if set(asked) == set(alike) and len(asked) <= 3 and not entity.ranked:
            ordinal = ("first", "second", "third")[asked.index(entity)]
            return by_name(f"the {ordinal} {entity.noun}")
        return None

    def clear(self, entity: Entity, last: Fact, aspect: str = "") -> bool:
        """Whether the entity's pronoun cannot refer to the last answer."""
        other = last.link
        if other is entity:
            return True
        if last.form.get("person") and entity.pronoun != PRONOUNS["it"]:
            return False
        return not (other and other.pronoun == entity.pronoun and aspect in other.facts)

    def stay(self, last: Fact) -> bool:
        """Ask about the same entity again, perhaps in one word."""
        topic = last.entity
        fact = self.pick(topic)
        if fact is None:
            return False
        followed = [f for f in self.open_facts(topic) if last.aspect in f.form.get("then", ())]
        if followed and self.rng.random() < 0.6:
            fact = self.rng.choice(followed)
            return self.ask(fact, topic.pronoun, self.rng.choice(fact.form["then"][last.aspect]))
        clear = self.clear(topic, last, fact.aspect)
        reference = topic.pronoun if clear else self.by_noun(topic)
        if reference is None:
            return False
        question, name = "", fact.form["name"]
        if self.rng.random() < 0.35:
            whose = f"{reference.possessive} {name}"
            forms = [f"And {whose}?", f"What about {whose}?", f"And the {name}?"]
            question = self.rng.choice(forms if clear else forms[:2])
        return self.ask(fact, reference, question)

    def hop(self, last: Fact) -> bool:
        """Ask about the last answer: she, that country, its author."""
        target, topic, forms = last.link, last.entity, []
        fact = self.pick(target)
        if fact is None:
            return False
        if "role" in last.form and self.clear(topic, last):
            forms.append(by_name(f"{topic.pronoun.possessive} {last.form['role']}"))
        if target.pronoun == PRONOUNS["it"]:
            forms.append(by_name(f"that {target.noun}"))
        elif target.pronoun != topic.pronoun:
            forms += [target.pronoun] * 2
        return bool(forms) and self.ask(fact, self.rng.choice(forms))

    def back(self, last: Fact) -> bool:
        """Ask about an earlier entity: she, the novel, the first country."""
        earlier = [e for e in self.subjects() if e is not last.entity]
        target = self.rng.choice(earlier) if earlier else None
        fact = self.pick(target)
        if fact is None:
            return False
        alone = [e for e in self.mentioned() if e.pronoun == target.pronoun] == [target]
        if alone and self.clear(target, last, fact.aspect) and self.rng.random() < 0.6:
            return self.ask(fact, target.pronoun)
        reference = self.by_noun(target)
        return bool(reference) and self.ask(fact, reference)

    def sibling(self, last: Fact) -> bool:
        """Ask the same of another entity: "What about Spain?"."""
        kind = (last.entity.kind, last.entity.noun)
        known = self.mentioned()
        others = [e for e in self.entities if (e.kind, e.noun) == kind and e not in known]
        facts = [f for e in others for f in self.open_facts(e) if f.aspect == last.aspect]
        facts = [f for f in facts if f.value != last.value]
        if not facts:
            return False
        fact = self.rng.choice(facts)
        form = self.rng.choice(["What about {}?", "And {}?", "How about {}?"])
        return self.ask(fact, by_name(fact.entity.label), form.format(fact.entity.label))


def draw_split(
    name: str, count: int, entities: list[Entity], seed: int
) -> tuple[list[Turn], set[Entity]]:
    """`count` turns in conversations of 3 to 6, and the entities asked about."""
    rng = random.Random(f"{seed}/{name}")
    asked: set[Fact] = set()
    turns: list[Turn] = []
    starts: list[Entity] = []
    number = failures = 0
    while left := count - len(turns):
        if failures > 2 * len(entities) or left < 3:
            raise DataError(
                f"{name}_turns={count}: the tables give {len(turns)} turns in conversations of 3 "
                f"to 6; set {name}_turns to a number from 3 to that"
            )
        starts = starts or rng.sample(entities, len(entities))
        length = rng.choice([n for n in (3, 4, 5, 5, 6, 6) if left - n >= 3 or left == n] or [left])
        drawn = Conversation(rng, entities, asked)
        drawn.draw(starts.pop(), length)
        if len(drawn.facts) < 3 or 0 < left - len(drawn.facts) < 3:
            failures += 1
            continue
        number, failures = number + 1, 0
        asked.update(drawn.facts)
        key, context = f"demo-{name}-{number:04d}", [(q, a) for q, _, a in drawn.turns]
        for i, (fact, (question, rewrite, answer)) in enumerate(zip(drawn.facts, drawn.turns)):
            about = f"{key}_{i + 1}", key, i + 1, context[:i], question
            turns.append(Turn(*about, list(fact.gold_ids), answer, rewrite))
    return turns, {fact.entity for fact in asked}


@dataclass
class MakeConfig:
    out: str = HERE
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""
    seed: int = 0
    """seed of templates, conversations and splits"""
    train_turns: Annotated[int, at_least(0)] = 300
    """turns of train; dev (50) and test (100) do not depend on it"""


def main(cfg: MakeConfig) -> dict:
    """Draw test, dev and train, and write them with the corpus of all facts.

    No entity is asked about in two splits. No passage is gold in two: test keeps it before dev,
    and dev before train.
    """
    entities = read_tables(cfg.seed)
    free, held, splits = entities, set(), {}
    for name, count in {"test": 100, "dev": 50, "train": cfg.train_turns}.items():
        turns, taken = draw_split(name, count, free, cfg.seed)
        free = [entity for entity in free if entity not in taken]
        for turn in turns:
            turn.gold_ids = [gold for gold in turn.gold_ids if gold not in held]
        splits[name] = [turn for turn in turns if turn.gold_ids]
        held |= {gold for turn in turns for gold in turn.gold_ids}

    def passages() -> Iterator[dict]:
        for fact in facts_of(entities):
            title = fact.entity.title
            if random.Random(f"{cfg.seed}/title/{fact.id}").random() < 0.5:
                title = f"{title}, {fact.form['name']}"
            yield {"id": fact.id, "title": title, "text": fact.text}

    counts = {"passages": write_jsonl(os.path.join(cfg.out, "corpus.jsonl"), passages())}
    for name, turns in splits.items():
        path = os.path.join(cfg.out, name)
        counts[f"{name}_turns"] = write_jsonl(f"{path}.jsonl", (turn.record() for turn in turns))
        with atomic_write(f"{path}.qrels") as f:
            f.writelines(f"{turn.query_id} 0 {g} 1\n" for turn in turns for g in turn.gold_ids)
    return {"out": cfg.out, **counts}


if __name__ == "__main__":
    run(MakeConfig, main)
