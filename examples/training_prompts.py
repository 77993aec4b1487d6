"""Write prompts for training a draft head: questions on many subjects, texts to write, roles, puzzles, extraction.

    python examples/training_prompts.py 2000 > prompts.jsonl
    python examples/training_prompts.py 9000 --words-of smollm2-135m-instruct >> prompts.jsonl
    specray train eagle3 --prompts prompts.jsonl --answers work/answers --run work/eagle3 --tokens 3000000

Prompts that a model makes up by itself (`--self-prompts`) are much alike. A head that has seen few answers about
science, history or law drafts badly there. With `--words-of`, prompts are about words of a model's own vocabulary, so
that the answers contain many more of the tokens that the head can draft. None of these prompts is from a published set.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from random import Random

SCIENCE = """volcanoes, ocean tides, vaccines, enzymes, plate tectonics, black holes, lithium batteries, magnetism,
the immune system, cell division, resistance to antibiotics, the water cycle, friction, sound waves, lasers,
semiconductors, nuclear fusion, radioactivity, acids and bases, catalysts, polymers, crystals, the periodic table,
combustion, osmosis, evolution, food webs, fermentation, the nervous system, the human heart, hormones, sleep, vision,
comets, the phases of the Moon, galaxies, telescopes, satellites, jet engines, refrigerators, electric motors, concrete,
steel, glass, rainbows, lightning, hurricanes, glaciers, coral reefs, soil, pollination, the migration of birds,
probability, prime numbers, graph theory, sorting algorithms, recursion, databases, encryption, the internet,
compilers, operating systems, gravity, heat pumps, wind turbines, viruses, fungi, the greenhouse effect, orbits,
optical fibres, superconductors, the pH scale, alloys, proteins, stem cells, the atmosphere of Mars, sensors, robots"""
HUMANITIES = """the Roman Republic, the Silk Road, the Renaissance, the French Revolution, the Industrial Revolution,
the Cold War, the Ottoman Empire, the Meiji Restoration, ancient Egypt, the Maya, colonialism, the printing press,
democracy, federalism, constitutional law, human rights, trade unions, taxation, central banks, supply and demand,
globalization, the growth of cities, migration, poetry, the novel, Greek tragedy, Shakespeare's sonnets, impressionism,
jazz, opera, Gothic architecture, photography, film editing, mythology, Buddhism, Stoicism, existentialism,
utilitarianism, Kant's ethics, Confucianism, free will, memory, motivation, the learning of languages, archaeology,
museums, education, public health, journalism, advertising, patents, contracts, juries, diplomacy, the United Nations,
the Black Death, the space race, the civil rights movement, feminism, folk music, theatre, tourism, sports, cooking"""
ASK = (
    "Explain {a} to a high-school student.",
    "What are the most important facts about {a}? Give examples.",
    "Why is it worth knowing about {a}? Give three reasons.",
    "Describe common misconceptions about {a} and correct them.",
    "Give a short overview of the history of {a}.",
    "What questions about {a} are still open?",
    "Compare {a} and {b}. What do they have in common, and how do they differ?",
    "Write one paragraph about {a}, followed by a list of key terms with definitions.",
    "How would you teach {a} in a lesson of 45 minutes?",
    "What are the advantages and disadvantages that people connect with {a}?",
    "How are {a} and {b} related?",
    "Tell me about {a}.",
    "What would the world be like without {a}?",
    "Name the people who contributed most to what we know about {a}, and say what they did.",
)
FORMS = "a short story, a poem of four stanzas, a letter, an email, a speech, a blog post, a dialogue, a news report"
MATTERS = """a lost suitcase, a new neighbour, a power cut in winter, the last train, a library at night, a garden in
a city, a forgotten recipe, a chess match, an old lighthouse, a delayed flight, a school reunion, a broken clock, the
first day at work, a walk in the rain, a market in the morning, a bicycle trip, a letter from the future"""
TONES = "humorous, formal, sad, encouraging, mysterious, simple, persuasive"
ROLES = """a doctor, a tour guide in Rome, a chess teacher, a detective, a chef, a librarian, a ship's captain, a
mathematics tutor, a career adviser, a gardener, a museum guide, a farmer, an astronaut, a judge, a football coach"""
REQUESTS = (
    "A visitor asks what your day looks like. Answer in character.",
    "Someone asks for advice on how to start in your field. Give it.",
    "Explain the most difficult decision that you ever had to make.",
    "A child asks what you do. Explain it.",
    "Describe the tools that you use and what each is for.",
)
NAMES = "Ada, Boris, Chen, Dalia, Emeka, Farah, Goran, Hana, Ivan, Jana, Kofi, Lena, Marta, Nadia, Omar, Priya"
GOODS = "apples, books, chairs, lamps, pens, tickets, bottles, bricks, cards, plates"
PLACES = "Lisbon, Nairobi, Oslo, Lima, Hanoi, Montreal, Krakow, Perth, Accra, Kyoto"

ON_WORDS = (
    "What is {a}?",
    "Explain {a} in simple terms.",
    "Give five facts about {a}.",
    "What should a beginner know about {a}?",
    "Write a paragraph about {a}.",
    'What does the word "{a}" mean? Use it in three sentences.',
    "I am preparing a lecture on {a}. Draft the introduction.",
    "Describe how {a} matters in practice, step by step.",
    "Write a quiz of five questions about {a}, with answers.",
    "How does {a} work? Can you give an example?",
    "What are the causes and the effects of {a}?",
    "What is the connection between {a} and {b}?",
    "Compare {a} with {b}.",
    "Write an essay on {a} and {b}.",
    "Discuss {a} in the context of {b}. What are the main arguments?",
    "Write an email to a colleague about {a} and {b}.",
    "Write a short story in which these words occur: {a}, {b}, {c}, {d}.",
    "Write a poem with the words {a}, {b} and {c}.",
    "Sort these words into groups and explain: {a}, {b}, {c}, {d}.",
    "Give a definition of each: {a}, {b}, {c}.",
    "Who or what is {name}?",
    "Tell me about {name} and its relation to {a}.",
    "Write a travel blog post about {name}, with {a} in it.",
    "{name} asks you for advice about {a}. What do you answer?",
    "Write a Python function that handles {a} and {b}. Explain it.",
    "Design a database table for {a} and write three SQL queries.",
)


def _words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split(",")]


def _question(rng: Random) -> str:
    first, second = rng.sample(_words(rng.choice((SCIENCE, HUMANITIES))), 2)
    return rng.choice(ASK).format(a=first, b=second)


def _text(rng: Random) -> str:
    form, matter, tone = (rng.choice(_words(words)) for words in (FORMS, MATTERS, TONES))
    return f"Write {form} about {matter}. The tone should be {tone}."


def _role(rng: Random) -> str:
    return f"You are {rng.choice(_words(ROLES))}. {rng.choice(REQUESTS)}"


def _puzzle(rng: Random) -> str:
    (one, two, third), goods = rng.sample(_words(NAMES), 3), rng.choice(_words(GOODS))
    many, price, given = rng.randint(12, 90), rng.randint(2, 9), rng.randint(2, 11)
    puzzles = (
        f"{one} has {many} {goods} and gives {given} of them to {two}. Each costs {price} dollars. How much is the "
        "rest worth? Show the steps.",
        f"{one} is {given} years older than {two}. In {price} years, the sum of their ages will be {many + 20}. How "
        "old are they now?",
        f"A shop sells {goods} for {price} dollars each, with a discount of {given} percent from {many} on. What does "
        f"{one} pay for {many + 10}?",
        f"{one} arrived before {two} and after {third}. Who arrived first? Explain.",
    )
    return rng.choice(puzzles)


def _extraction(rng: Random) -> str:
    people, places = rng.sample(_words(NAMES), 3), rng.sample(_words(PLACES), 3)
    years, goods = sorted(rng.sample(range(1950, 2024), 3)), rng.sample(_words(GOODS), 3)
    passage = " ".join(
        f"In {year}, {name} opened a shop in {place} that sells {good}."
        for year, name, place, good in zip(years, people, places, goods, strict=True)
    )
    wanted = rng.choice(
        (
            "List each person with the place and the year, as JSON.",
            "Make a table of the shops in the order in which they were opened.",
            "Which shop is the oldest, and what does it sell?",
            "Name all places in the text in alphabetical order.",
        )
    )
    return f"{wanted}\n\n{passage}"


KINDS: tuple[Callable[[Random], str], ...] = (_question,) * 6 + (_text, _text, _role, _puzzle, _extraction)


def _about_words(words: Sequence[str], names: Sequence[str], rng: Random) -> str:
    a, b, c, d = rng.sample(words, 4)
    return rng.choice(ON_WORDS).format(a=a, b=b, c=c, d=d, name=rng.choice(names))


def _vocabulary(model: str) -> tuple[list[str], list[str]]:
    """Words of five letters or more, and names, that are single tokens of a model with a byte-level vocabulary."""
    from specray.models.files import resolve_model
    from specray.models.tokenizer import load_tokenizer

    tokens = load_tokenizer(resolve_model(model, None, "auto", progress=True)).get_vocab()
    words = sorted(token[1:] for token in tokens if re.fullmatch("Ġ[a-z]{5,}", token))
    names = sorted(token[1:] for token in tokens if re.fullmatch("Ġ[A-Z][a-z]{3,}", token))
    if len(words) < 4 or not names:
        sys.exit(f"the vocabulary of {model} has {len(words)} words and {len(names)} names; name another model")
    return words, names


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("count", type=int, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the choices (default: %(default)s)")
    parser.add_argument("--words-of", metavar="MODEL", help="make prompts from words of this model's vocabulary")
    options = parser.parse_args()
    rng, written = Random(options.seed), set[str]()
    vocabulary = _vocabulary(options.words_of) if options.words_of else None
    while len(written) < options.count:
        prompt = rng.choice(KINDS)(rng) if vocabulary is None else _about_words(*vocabulary, rng)
        if prompt not in written:
            written.add(prompt)
            sys.stdout.write(json.dumps({"prompt": prompt, "license": "Apache-2.0"}) + "\n")


if __name__ == "__main__":
    main()
