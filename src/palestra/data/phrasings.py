# SPDX-License-Identifier: Apache-2.0
"""How word problems are put. One row: the operations it needs, in order, and the text.

``{a}`` is the first operand; ``{b}``, ``{c}``, ``{d}`` belong to the first, second and third operation, each of
which continues with the result so far. ``{n}`` is a name, ``{t}`` a thing (plural).
"""

from __future__ import annotations

Phrasing = tuple[tuple[str, ...], str]

TRAIN: tuple[Phrasing, ...] = (
    (("add",), "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?"),
    (("add",), "There are {a} red {t} and {b} blue {t} on the table. How many {t} are there in total?"),
    (("subtract",), "{n} had {a} {t} and gave away {b} of them. How many {t} are left?"),
    (("subtract",), "A shop has {a} {t}. {b} are sold today. How many {t} remain in the shop?"),
    (("multiply",), "{n} buys {a} boxes. Each box holds {b} {t}. How many {t} does {n} buy?"),
    (("multiply",), "A machine makes {a} {t} an hour. How many {t} does it make in {b} hours?"),
    (("divide",), "{n} shares {a} {t} equally among {b} friends. How many {t} does each friend get?"),
    (("divide",), "{a} {t} are packed into bags of {b}. How many bags are filled?"),
    (("add", "multiply"), "{n} packs {a} large and {b} small {t} a day. How many {t} does {n} pack in {c} days?"),
    (("add", "subtract"), "{n} has {a} {t}, finds {b} more and then loses {c}. How many {t} does {n} have now?"),
    (
        ("subtract", "multiply"),
        "A farm collects {a} {t} a day and keeps {b} of them. The rest are sold for {c} coins each. How many "
        "coins does it earn a day?",
    ),
    (
        ("multiply", "add"),
        "{n} fills {a} bags with {b} {t} each and has {c} {t} over. How many {t} are there altogether?",
    ),
    (("multiply", "subtract"), "{n} buys {a} packs of {b} {t} and uses {c} of them. How many {t} are left?"),
    (
        ("add", "divide"),
        "{n} has {a} {t} and {b} more at home. All of them are put into {c} equal piles. How many {t} are in "
        "each pile?",
    ),
    (
        ("multiply", "divide"),
        "{a} crates with {b} {t} each arrive at a school. They are shared equally by {c} classes. How many "
        "{t} does each class get?",
    ),
    (
        ("subtract", "divide"),
        "Of {a} {t}, {b} are broken. The good ones are split evenly between {c} shops. How many {t} does each "
        "shop get?",
    ),
    (
        ("divide", "add"),
        "{n} splits {a} {t} evenly into {b} jars, then puts {c} more into the first jar. How many {t} are in "
        "the first jar?",
    ),
    (
        ("add", "add"),
        "On Monday {n} counts {a} {t}, on Tuesday {b} and on Wednesday {c}. How many {t} does {n} count in "
        "the three days?",
    ),
    (
        ("add", "multiply", "subtract"),
        "A team has {a} girls and {b} boys. Each child brings {c} {t}, and {d} {t} are thrown away. How many "
        "{t} are left?",
    ),
    (
        ("multiply", "add", "subtract"),
        "{n} buys {a} boxes of {b} {t}, is given {c} more and eats {d}. How many {t} does {n} have at the end?",
    ),
    (
        ("subtract", "multiply", "add"),
        "{n} has {a} baskets and lends {b} of them. Each basket that is left holds {c} {t}. {d} more {t} lie "
        "on the floor. How many {t} are there?",
    ),
    (
        ("multiply", "subtract", "divide"),
        "{a} trays with {b} {t} each are baked. {c} {t} are burnt, and the rest are shared equally by {d} "
        "families. How many {t} does each family get?",
    ),
    (
        ("add", "subtract", "multiply"),
        "A library has {a} old and {b} new shelves. It removes {c} shelves. Each shelf that stays carries {d} "
        "{t}. How many {t} are on the shelves?",
    ),
    (
        ("multiply", "add", "divide"),
        "{n} collects {a} {t} on each of {b} days and buys {c} more. All are put into {d} equal albums. How "
        "many {t} are in each album?",
    ),
)

TEST: tuple[Phrasing, ...] = (
    (
        ("add",),
        "After {n} found {b} {t}, they were added to the {a} {t} already in the drawer. How many {t} are in "
        "the drawer?",
    ),
    (("subtract",), "Out of {a} {t}, {n} kept none of the {b} that were damaged. How many {t} did {n} keep?"),
    (
        ("multiply", "subtract"),
        "Each of {a} children was handed {b} {t}, and together they returned {c}. How many {t} did the "
        "children hold on to?",
    ),
    (
        ("add", "multiply"),
        "A train has {a} seats upstairs and {b} seats downstairs. With {c} {t} under every seat, how many {t} "
        "does it carry?",
    ),
    (
        ("add", "divide"),
        "{n} mixed {a} green {t} with {b} yellow {t} and dealt all of them out to {c} players. How many {t} "
        "did every player receive?",
    ),
    (
        ("multiply", "add", "subtract"),
        "A baker bakes {a} rows of {b} {t}, adds {c} from yesterday and sells {d}. How many {t} does the "
        "baker have at closing time?",
    ),
    (
        ("subtract", "multiply", "add"),
        "From {a} wagons {b} were uncoupled. Every remaining wagon carried {c} {t}, and the engine carried "
        "{d}. How many {t} were on the train?",
    ),
)

NAMES = ("Mia", "Tom", "Lena", "Omar", "Ruth", "Ivan", "Nora", "Paul", "Wei", "Sara", "Jack", "Ana")
THINGS = (
    "apples",
    "books",
    "pens",
    "shells",
    "cards",
    "stickers",
    "cups",
    "stamps",
    "marbles",
    "candles",
    "buttons",
    "eggs",
)
