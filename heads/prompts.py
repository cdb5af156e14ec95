"""Prompts of our own making for self-generated training text: seeded templates, no data set.

Twelve kinds of request, filled from small word lists; two of them (`summary`, `passage_qa`) also
need passages, which the caller takes from what the model wrote earlier. The words are plain on
purpose: the heads learn how *the target* answers, so the prompts only have to send it to many
different places. Beginnings of prompts, which the model completes, send it to the most.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


def _words(table: str) -> tuple[str, ...]:
    """The entries of a table: separated by bars, broken into lines before a bar."""
    return tuple("".join(line.strip() for line in table.strip("\n ").splitlines()).split("|"))


TOPICS = _words(
    """
    volcanoes|the water cycle|black holes|photosynthesis|the human heart|coral reefs|solar panels
    |the Roman Empire|the French Revolution|the Silk Road|ancient Egypt|the Renaissance
    |the printing press|jazz music|classical ballet|street food in Asia|Italian cooking
    |baking sourdough bread|coffee|chocolate|electric cars|high-speed trains|bicycles in cities
    |the history of flight|space telescopes|the Moon landing|artificial intelligence
    |machine learning|computer security|open-source software|video games|social media
    |online learning|remote work|small businesses|inflation|the stock market|personal savings
    |microloans|climate change|renewable energy|recycling|deforestation|ocean plastic
    |endangered tigers|honey bees|wolves|penguins|migratory birds|dinosaurs|fossils|earthquakes
    |tornadoes|the Amazon rainforest|the Sahara desert|mountain climbing|marathon running|swimming
    |chess|football|tennis|the Olympic Games|yoga|sleep|vaccines|antibiotics|mental health
    |healthy eating|diabetes|public libraries|museums|primary schools|universities|democracy
    |human rights|the United Nations|local elections|trade between countries|immigration
    |urban planning|gardening|growing tomatoes|houseplants|camping|travelling alone
    |learning a language|writing a diary|poetry|detective novels|science fiction|fairy tales
    |photography|oil painting|sculpture|architecture|bridges|quantum mechanics|gravity|magnetism
    |chemical bonds|the periodic table|DNA|evolution|the immune system|the brain|memory
    |prime numbers|probability|geometry|statistics|supply chains|farming|rice|wheat|fishing
    """
)
PEOPLE = _words(
    """
    Anna|Ben|Carla|David|Emma|Farid|Grace|Hugo|Ines|Jack|Kira|Liam|Mona|Noah|Olga|Paul|Rosa|Sam
    |Tara|Victor|Wendy|Yusuf|Zoe|Maria|Tom|Lucy|Omar|Nina|Peter|Sofia|James|Alice|Robert|Julia
    |Kevin|Sarah|Mark|Helen
    """
)
PLACES = _words(
    """
    Paris|London|Rome|Tokyo|Berlin|Madrid|Cairo|Lagos|Mumbai|Sydney|Toronto|Lima|Oslo|Vienna
    |Dublin|Boston|Chicago|Nairobi|Seoul|Bangkok|Lisbon|Prague|Athens|Istanbul|Hawaii|Iceland
    |Kenya|Brazil|Mexico|Canada
    """
)
ITEMS = _words(
    """
    apples|books|pencils|marbles|stamps|cookies|oranges|shirts|candles|tickets|bottles of water
    |flowers|toys|chairs|boxes of tea|postcards|eggs|cups|balloons|notebooks|hats|cakes|sandwiches
    |plants|coins|shells
    """
)
JOBS = _words(
    """
    a ship's captain|a detective|a museum guide|a chef|a football coach|a wise old teacher
    |a pirate|a doctor|a medieval knight|a travel agent|a robot from the future|a journalist
    |a farmer|a famous inventor|a judge|an astronaut|a librarian|a gardener|a stand-up comedian
    |a philosopher|a mountain guide|a bank clerk
    """
)
TASKS = _words(
    """
    reverses a string|checks whether a number is prime|sorts a list of numbers
    |counts the vowels in a text|finds the largest number in a list
    |computes the factorial of a number|merges two sorted lists|removes duplicates from a list
    |reads a file and counts its lines|computes Fibonacci numbers
    |checks whether a word is a palindrome|converts Celsius to Fahrenheit
    |finds common elements of two lists|prints a multiplication table|validates an email address
    |counts words in a sentence|implements binary search|implements a stack|rotates a matrix
    |finds the shortest path in a graph|parses a CSV file|generates a random password
    |computes the average of a list|flattens a nested list|draws a triangle of stars
    |simulates a dice game|finds the longest word in a text|adds two matrices
    """
)
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "C", "HTML", "SQL")
GERMAN_SUBJECTS = _words(
    """
    Die Regierung|Der Bürgermeister|Die Polizei|Ein junger Forscher|Die Universität
    |Das Unternehmen|Der Präsident|Die Mannschaft|Eine Sprecherin|Der Verein|Die Stadt|Das Gericht
    |Die Kommission|Ein Zeuge|Die Bank|Der Minister|Die Zeitung|Das Krankenhaus|Die Opposition
    |Der Trainer|Meine Schwester|Unser Nachbar|Die Schüler|Viele Menschen|Die Bewohner
    |Der Hersteller|Die Fluggesellschaft
    """
)
GERMAN_VERBS = _words(
    """
    plant|kritisiert|eröffnet|verkauft|unterstützt|prüft|verteidigt|untersucht|fordert|erklärt
    |finanziert|beobachtet|verliert|verbessert|braucht|verlässt|sucht|beschreibt|verschiebt
    |beendet|besucht|erwartet
    """
)
GERMAN_OBJECTS = _words(
    """
    das neue Gesetz|die Ergebnisse der Wahl|eine Brücke über den Fluss|den alten Bahnhof
    |das Projekt|die Zusammenarbeit mit den Nachbarländern|ein Museum|die Kosten
    |einen neuen Vertrag|das Spiel|die Schule im Dorf|den Haushalt|eine Studie über Ernährung
    |die Sicherheit der Flughäfen|den Unfall|die Preise für Strom|ein Konzert im Park
    |den Bau von Wohnungen|die Verhandlungen|einen Film über den Krieg
    """
)
GERMAN_ENDINGS = _words(
    """
    im nächsten Jahr|seit gestern|trotz der Krise|wegen der hohen Nachfrage|am Montag in Berlin
    |nach einer langen Diskussion|zum ersten Mal|mit großem Erfolg|ohne weitere Erklärung
    |in vielen Ländern|für die Kinder|vor dem Ende der Saison|im Norden des Landes
    |während der Ferien|gegen den Willen der Bürger
    """
)
GERMAN_TAILS = _words(
    """
    |||, sagte ein Sprecher|, obwohl das Geld fehlt|, wie die Zeitung am Dienstag berichtete
    |, weil die Zahl der Besucher steigt|, und das ist eine gute Nachricht
    |, aber niemand weiß warum|, damit alle davon profitieren|, bevor der Winter kommt
    """
)
ENGLISH_SENTENCES = _words(
    """
    The weather is beautiful today.|I would like a cup of coffee, please.
    |Where is the train station?|My brother works in a small hospital.
    |The meeting starts at nine o'clock.|We are going to the beach.
    |She has been reading this book for a week.|The children are playing in the garden.
    |Can you help me?
    """
)

Fill = Callable[[random.Random], str]


def _pick(rng: random.Random, options: Sequence[str]) -> str:
    return options[rng.randrange(len(options))]


def maths(rng: random.Random) -> str:
    """A word problem with two or three steps."""
    name, other = rng.sample(PEOPLE, 2)
    item = _pick(rng, ITEMS)
    a, b, c = rng.randint(3, 60), rng.randint(2, 20), rng.randint(2, 12)
    forms = (
        f"{name} has {a * b} {item}. {name} gives {a} {item} to {other} and then buys {c} more. "
        f"How many {item} does {name} have now?",
        f"{name} buys {b} {item} for ${c} each and pays with a ${b * c + a} note. "
        "How much change is left?",
        f"A shop sells {a} {item} every day. How many {item} does it sell in {c} weeks?",
        f"{name} earns ${a} an hour and works {c} hours a day, {rng.randint(3, 6)} days a week. "
        f"How much does {name} earn in {b} weeks?",
        f"There are {a * 4} students in a school. {rng.choice((25, 50, 75))}% of them like {item}. "
        f"How many students do not like {item}?",
        f"{name} is {a} years old. {other} is {b} years older than {name}. "
        f"What will be the sum of their ages in {c} years?",
        f"{name} drives {a} miles in the morning and twice as many in the afternoon. "
        f"If a gallon of gas lasts {b} miles, how many gallons are needed?",
        f"A box holds {b} {item}. {name} fills {c} boxes and has {a} {item} left over. "
        f"How many {item} were there in total?",
        f"{name} reads {b} pages on Monday, {c} times as many on Tuesday, "
        f"and {a} pages on Wednesday. "
        "How many pages are that altogether?",
        f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
        f"{name} spent ${a} on {item}, {rng.choice((20, 25, 40, 50))}% of the money {name} had. "
        f"How much money did {name} have at first?",
        f"Solve for x: {b}x + {c} = {b * a + c}.",
        f"If f(x) = {b}x^2 - {c}x + {a}, what is f({rng.randint(1, 6)})?",
    )
    return _pick(rng, forms)


def german(rng: random.Random) -> str:
    """A German sentence put together from parts."""
    parts = [_pick(rng, p) for p in (GERMAN_SUBJECTS, GERMAN_VERBS, GERMAN_OBJECTS, GERMAN_ENDINGS)]
    return " ".join(parts) + _pick(rng, GERMAN_TAILS) + rng.choice((".", " .", ""))


def translation(rng: random.Random) -> str:
    """A translation request, mostly from German to English."""
    sentence = german(rng)
    if rng.random() < 0.3:
        sentence += " " + german(rng)
    forms = (
        f"Translate German to English: {sentence}",
        f"Translate German to English: {sentence}",
        f"Translate the following German sentence into English: {sentence}",
        f'What does "{sentence}" mean in English?',
        f"Please translate from German to English.\n\n{sentence}",
        f"Translate to {rng.choice(('French', 'Spanish', 'German', 'Italian'))}: "
        f"{_pick(rng, ENGLISH_SENTENCES)}",
    )
    return _pick(rng, forms)


def short_question(rng: random.Random) -> str:
    """A short factual question, as one types into a search box."""
    topic, place, person = _pick(rng, TOPICS), _pick(rng, PLACES), _pick(rng, PEOPLE)
    forms = (
        f"who invented {topic}?",
        f"When did {topic} begin?",
        f"What is the population of {place}?",
        f"Who was the first ruler of {place}?",
        f"what year was the biggest museum in {place} built?",
        f"Where does the name {place} come from?",
        f"How many people in {place} care about {topic}?",
        f"who played {person} in the film about {topic}?",
        f"What are the three most important facts about {topic}?",
        f"where do {topic} come from?",
        f"Who sings the song about {topic} and {place}?",
        f"What is the meaning of {topic}?",
        f"when is the best time to visit {place}?",
        f"Who wrote the book {person} and {topic}?",
        f"which country is famous for {topic}?",
        f"how long does it take to get from {place} to {_pick(rng, PLACES)}?",
        f"What language do they speak in {place}?",
        f"who won the first prize for {topic} in {rng.randint(1950, 2022)}?",
    )
    return _pick(rng, forms)


def writing(rng: random.Random) -> str:
    """Creative and office writing."""
    topic, place, name = _pick(rng, TOPICS), _pick(rng, PLACES), _pick(rng, PEOPLE)
    forms = (
        f"Write a blog post about {topic}.",
        f"Write a news article about {topic} in {place}.",
        f"Write a long, detailed news report about a surprising event in {place} "
        f"that has to do with {topic}.",
        f"Write an encyclopedia article about {topic}. Cover its history, its uses and "
        "the debates around it.",
        f"Write a short story in which {name} travels to {place} and discovers something "
        f"about {topic}.",
        f"Compose a poem about {topic}.",
        f"Draft an email to {name} that proposes a meeting about {topic}. Keep it under 150 words.",
        f"Write a product review of a book about {topic}.",
        f"Write a persuasive essay on why {topic} should matter to everybody.",
        f"Describe a day in {place} in vivid language.",
        f"Write the opening paragraph of a novel set in {place}.",
        f"Write a speech about {topic} for school children.",
        f"Give me an outline for a talk about {topic}, with headings and key points.",
        f"Write a dialogue between {name} and {_pick(rng, PEOPLE)} about {topic}.",
    )
    return _pick(rng, forms)


def explanation(rng: random.Random) -> str:
    """Explanations, comparisons and advice."""
    topic, other = rng.sample(TOPICS, 2)
    forms = (
        f"Explain {topic} in simple terms.",
        f"What is {topic} and why does it matter?",
        f"What are the advantages and disadvantages of {topic}?",
        f"Compare {topic} with {other}.",
        f"How has {topic} changed over the last hundred years?",
        f"Give {rng.randint(3, 10)} tips for somebody who is new to {topic}.",
        f"Explain the connection between {topic} and {other}.",
        f"Describe the most important causes and effects of {topic}. Use examples.",
        f"How does {topic} work? Explain step by step.",
        f"List {rng.randint(3, 10)} interesting facts about {topic}.",
    )
    return _pick(rng, forms)


def coding(rng: random.Random) -> str:
    """Programming requests."""
    language, task = _pick(rng, LANGUAGES), _pick(rng, TASKS)
    forms = (
        f"Write a {language} function that {task}.",
        f"Develop a {language} program that {task}.",
        f"Write a {language} program that {task} and explain how it works.",
        f"How do I write code in {language} that {task}? Give an example.",
        f"Implement a {language} class with a method that {task}. Add comments.",
    )
    return _pick(rng, forms)


def reasoning(rng: random.Random) -> str:
    """Small puzzles."""
    a, b, c = rng.sample(PEOPLE, 3)
    item, n = _pick(rng, ITEMS), rng.randint(2, 9)
    forms = (
        f"{a} is taller than {b}. {b} is taller than {c}. Who is the shortest? Explain.",
        f"{a} has {n} sisters, and each sister has one brother. "
        f"How many brothers does {a} have? Explain.",
        f"If all {item} are heavy and some heavy things are red, are some {item} red? Explain.",
        f"{a} is in a race and has just passed the runner in place {n}. In which place is {a} now?",
        f"{a}, {b} and {c} sit in a row. {a} is not next to {c}. Who sits in the middle?",
        f"Which word does not belong: {item}, {_pick(rng, ITEMS)}, {_pick(rng, TOPICS)}? Why?",
        f"Yesterday was {rng.choice(('Monday', 'Wednesday', 'Friday'))}. "
        f"Which day is it in {n} days?",
    )
    return _pick(rng, forms)


def roleplay(rng: random.Random) -> str:
    """A request to speak as somebody."""
    job, topic = _pick(rng, JOBS), _pick(rng, TOPICS)
    forms = (
        f"Pretend to be {job} and tell me about {topic}.",
        f"You are {job}. A visitor asks: what do you think about {topic}? Answer in character.",
        f"Act as {job} who has to explain {topic} to a child.",
        f"Imagine you are {job} in {_pick(rng, PLACES)}. Describe your day.",
        f"Take the role of {job}. I ask you: why should we care about {topic}?",
    )
    return _pick(rng, forms)


def extraction(rng: random.Random) -> str:
    """Pull structure out of a few made-up records."""
    rows = [
        f"{_pick(rng, PEOPLE)} from {_pick(rng, PLACES)} bought {rng.randint(2, 40)} "
        f"{_pick(rng, ITEMS)} for ${rng.randint(5, 300)} in {rng.randint(1990, 2023)}."
        for _ in range(rng.randint(2, 6))
    ]
    ask = (
        "List every person and the amount paid as a JSON array.",
        "Extract all names and years. Answer as a table.",
        "Which purchase was the most expensive? Return the name only.",
        "Sort the people by year.",
        "Extract the places mentioned, one per line.",
    )
    body = "\n".join(f"{i + 1}. {row}" for i, row in enumerate(rows))
    question = _pick(rng, ask)
    return f"{question}\n\n{body}" if rng.random() < 0.5 else f"{body}\n{question}"


def summary(rng: random.Random, passage: str) -> str:
    """A request to summarise `passage`."""
    forms = (
        f"Summarize: {passage}",
        f"Summarize: {passage}",
        f"Summarize the following article.\n\n{passage}",
        f"{passage}\n\nSummarize the text above in {rng.randint(1, 5)} sentences.",
        f"What are the main points of this text? {passage}",
        f"TL;DR of the following text: {passage}",
    )
    return _pick(rng, forms)


def passage_qa(rng: random.Random, passage: str) -> str:
    """A question to be answered from `passage`."""
    words = [w.strip(".,;:!?\"'()*") for w in passage.split()]
    long_words = [w for w in words if len(w) > 6 and w.isalpha()] or ["this subject"]
    a, b = _pick(rng, long_words), _pick(rng, long_words)
    question = _pick(
        rng,
        (
            f"What does the text say about {a}?",
            f"Describe the role of {a} according to the passage.",
            f"How are {a} and {b} related?",
            f"Why is {a} important?",
            f"Who is mentioned in connection with {a}?",
            "What is the main idea of the passage?",
            f"when did {a} happen?",
            f"Give the details about {a} and {b}.",
        ),
    )
    forms = (
        f"{passage}\n{question}",
        f"{passage}\n\n{question}",
        f"Answer the question with the help of the passage.\n\n"
        f"Passage: {passage}\n\nQuestion: {question}",
        f"{question}\n\n{passage}",
    )
    return _pick(rng, forms)


# How a request can begin; the model goes on from there, so each of them leads to many prompts.
OPENINGS = _words(
    """
    Write a|Write an|Write a short|Write a story about|Write a poem|Write a letter to|Write an email
    |Write a Python function|Write a SQL query|Write a C++ program|Write a JavaScript function
    |Write a review of|Write a speech|Write a dialogue between|Write a headline for|Compose a
    |Create a|Create a table|Create a list of|Design a|Develop a|Draft a|Generate a|Build a
    |Implement a|Given a|Given an array of|Given the following|Given two strings|You are given a
    |Explain|Explain how|Explain why|Explain the difference between|Explain the concept of
    |Describe|Describe the|Describe how|Discuss|Compare|Compare and contrast|Analyze the|Evaluate
    |Identify|Classify the following|Categorize|List|List five|List the steps to|Name three
    |Give me|Give an example of|Give three reasons|Suggest|Recommend|Provide a|Outline
    |Summarize|Summarize the following text:|Summarize:|Summarise this article in two sentences.
    |Rewrite the following sentence|Rewrite this paragraph|Paraphrase|Simplify|Edit the following
    |Correct the grammar|Fix the bug in this code|Convert|Translate|Translate to French:
    |Translate the following sentence into Spanish|Translate German to English:
    |Translate German to English: Die|Translate German to English: Ein|Translate this to Italian
    |Extract|Extract the names from|Find the|Sort the following|Calculate|Compute|Solve|Solve for x
    |Prove that|Determine whether|Estimate|How|How do I|How do you|How does|How many|How much
    |How long does it take|How far|How old is|How can I|How would you|What is|What is the
    |What are|What are the|What was|What does|What happens when|What would happen if|What year
    |What kind of|What did|what is the meaning of|what time does|Who|Who is|Who was|Who wrote
    |who plays|who sings|who won|who invented|When|When did|when was|when is|Where|Where is
    |where did|where was|where can I|Why|Why do|Why is|Why did|Which|Which of the following|Which is
    |Is it|Is there|Are there|Can you|Can you help me|Could you|Do you|Does|Did|Should I|Would
    |I am|I am a|I have|I want to|I need|I need help with|I would like|I'm trying to|I'm writing
    |My|My friend|My dog|We are|Our company|Please|Please explain|Help me|Tell me|Tell me about
    |Imagine|Imagine you are|Pretend|Act as|You are|You are an expert|As a|Suppose|Assume|If|If I
    |If a train|If all|In|In a|In this|In what year|A|A man|A store|A train|A car travels|A farmer
    |A rectangle|A school has|A baker|There are|There were|Two|Three|Tom|Sarah|John has|Mary has
    |Jack|Emma|A class of|Each|Every|The|The following|The following passage|The sum of|The city of
    |Read the following passage and answer the question.|Passage:|Article:|Text:|Context:|Question:
    |Based on the text below|According to the article|Answer the following question|Q:|Here is
    |Here is a list|Consider|Consider the following|Let|Let's|Debug|Refactor|Complete the|Continue
    |Fill in the blank|Choose|True or false|Make|Make a|Plan|Plan a|Prepare|Use|Using|Add|Add a
    |Remove|Replace|Reverse|Count|Check|Verify|Predict|Infer|Interpret|Hello|Hi|Good morning|Thanks
    |LONDON -|NEW YORK -|Yesterday|Last week|In 2015|According to|Scientists have|The president
    |Police|Researchers at|The company|After|Before|While|When I|Since|Although|During|On Monday
    """
)


def openings(count: int, seed: int) -> list[str]:
    """`count` seeded beginnings of prompts: half from the list, half the first words of prompts of
    the short kinds."""
    rng = random.Random(seed)
    listed = [_pick(rng, OPENINGS) for _ in range(count - count // 2)]
    cut = []
    for prompt in short_prompts(count // 2, rng.randrange(1 << 31)):
        words = prompt.split()
        cut.append(" ".join(words[: rng.randint(1, max(1, min(8, len(words) - 1)))]))
    return listed + cut


SHORT_KINDS: dict[str, Fill] = {
    "maths": maths,
    "translation": translation,
    "short_question": short_question,
    "writing": writing,
    "explanation": explanation,
    "coding": coding,
    "reasoning": reasoning,
    "roleplay": roleplay,
    "extraction": extraction,
}
# How often each kind is drawn; writing is drawn most because its answers also become the passages.
SHORT_WEIGHTS = {
    "maths": 5,
    "translation": 5,
    "short_question": 4,
    "writing": 5,
    "explanation": 3,
    "coding": 2,
    "reasoning": 1,
    "roleplay": 1,
    "extraction": 1,
}


def short_prompts(count: int, seed: int) -> list[str]:
    """`count` seeded prompts of the short kinds."""
    rng = random.Random(seed)
    kinds = rng.choices(list(SHORT_WEIGHTS), weights=list(SHORT_WEIGHTS.values()), k=count)
    return [SHORT_KINDS[kind](rng) for kind in kinds]


def passage_prompts(passages: Sequence[str], seed: int) -> list[str]:
    """One seeded prompt for each passage: half summaries, half questions."""
    rng = random.Random(seed)
    return [rng.choice((summary, passage_qa))(rng, passage) for passage in passages]
