//! The frozen texts. To change one is to make another workload: its hash, and all comparisons with earlier results, are void.

/// 5 short (under 30 tokens), 5 medium (30 to 80), 2 long (over 100).
pub const STUDY_PROMPTS: [&str; 12] = [
    "What is the capital of Portugal?",
    "Explain in one paragraph why the sky is blue.",
    "Write a haiku about a lighthouse in fog.",
    "List three uses of a paper clip besides holding paper.",
    "Translate into French: the train leaves at half past nine.",
    "A shop sells pens at 3 for 2 euros and notebooks at 4 euros each. I buy 12 pens and 5 notebooks and pay with a 50 euro note. How much change do I get? Show each step.",
    "Write a Python function that takes a list of dates as strings in the form YYYY-MM-DD and returns the longest run of consecutive days. Add a short docstring and two examples of its use.",
    "Compare a bicycle and an electric scooter for a daily commute of six kilometres in a hilly city. Consider cost over three years, weather, effort and storage, and end with a recommendation.",
    "My tomato plants have yellow lower leaves, the soil is damp, and it has rained for a week. Give the three most likely causes, how I can tell them apart, and what to do about each.",
    "Describe how a refrigerator moves heat from inside to outside. Name the four main parts, say what the working fluid does in each of them, and why the back of the machine feels warm.",
    "You are helping a small library to replace its paper index cards. It owns about nine thousand books, two hundred maps and a box of old letters. Two volunteers work there on Tuesday and Thursday afternoons, neither of whom has kept a database before, and there is one laptop without a reliable internet connection. Visitors want to search by author, by title, by subject and by shelf. Propose a plan for the first three months: what to record for each kind of item, in which order to enter the items, how to avoid that two people enter the same book, how to keep a safe copy of the work, and how to notice mistakes early. Keep it practical, name the simplest tool that would do, and say what you would leave for later.",
    "Read the following account and then answer the questions. On Monday morning the pump at the north well stopped. Ines, who was on duty, restarted it by hand and noted a pressure of two bar, half of the usual value. On Tuesday the pressure was normal until noon, when the power failed for eleven minutes in the whole valley. After that the pump ran, but the tank did not fill. On Wednesday Karim found a cracked valve behind the filter and replaced it, and by the evening the tank was full. On Thursday morning the pressure was again two bar. Questions: which events can the cracked valve explain, and which can it not? What should be inspected next, and why? Write a short report for the village council that separates what is known from what is supposed.",
];

/// For warm-up alone; short, medium and long, so that each shape that is measured has been run.
pub const WARM_UP_PROMPTS: [&str; 6] = [
    "Name a river in Norway.",
    "Suggest a name for a grey cat and give the reason.",
    "A cyclist rides 18 kilometres in 45 minutes, rests for a quarter of an hour and rides back at 20 kilometres an hour. How long was she away, and what was her mean speed? Explain each step in a sentence.",
    "Explain to a new colleague how to write a good bug report. Name what it must contain, what it should leave out, and give one short example of a bad title beside a better one.",
    "Which household tasks use the most water in a flat for two people, roughly how much does each of them take in a week, and what are three cheap changes that would lower the total?",
    "A school plans an open day for its new workshop. There are four rooms: one for wood, one for metal, one for electronics and one for sewing. About three hundred visitors come between ten and four, most of them around noon, many with small children. Each room holds twenty people, the corridor holds forty, and eleven pupils have offered to help. Write a plan for the day that keeps every room safe, gives each visitor something to try, and lets each helper have a break of half an hour. Say how visitors find their way, what is done when a room is full, what happens if it rains and nobody wants to wait in the yard, and how you would count the visitors of each room without troubling them.",
];

/// Common short words, each one token with its leading space in the usual vocabularies.
pub(crate) const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
];
