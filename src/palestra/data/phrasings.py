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
        "{n} buys {a} boxes with {b} {t} each, finds {c} more {t} and loses {d}. How many {t} does {n} have at the "
        "end?",
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
    (
        ("add",),
        "{n} found {b} {t} in the garden and put them with the {a} {t} in the box. How many {t} are in the box?",
    ),
    (("add",), "A basket held {a} {t}. Later {b} were added to it. How many {t} does the basket hold?"),
    (("add",), "{b} {t} arrive at a shelf that carries {a} {t}. How many {t} are on the shelf then?"),
    (("subtract",), "Of the {a} {t} in a crate, {b} are spoiled. How many {t} are good?"),
    (("subtract",), "{n} wants {a} {t} and has found {b} so far. How many {t} are still missing?"),
    (("multiply",), "Each of {a} pupils brings {b} {t}. How many {t} do they bring together?"),
    (("multiply",), "A hall has {a} tables with {b} {t} on every table. How many {t} are in the hall?"),
    (("divide",), "{a} {t} are divided fairly between {b} teams. How many {t} go to a team?"),
    (
        ("add", "multiply"),
        "A farm has {a} brown and {b} white hens. Every hen sits on {c} {t}. How many {t} are under the hens?",
    ),
    (("add", "multiply"), "{a} men and {b} women each carry {c} {t}. How many {t} do they carry?"),
    (
        ("subtract", "multiply"),
        "Of {a} lamps {b} are dark. Each of the others attracts {c} {t}. How many {t} do the lamps attract?",
    ),
    (
        ("multiply", "subtract"),
        "{n} prints {a} pages with {b} {t} on each and cuts out {c}. How many {t} are still on the pages?",
    ),
    (
        ("multiply", "subtract"),
        "A gardener sets {a} rows of {b} {t} and gives {c} away. How many {t} does the gardener keep?",
    ),
    (
        ("multiply", "add"),
        "{n} wins {a} {t} in each of {b} games and gets {c} {t} as a present. How many {t} does {n} have?",
    ),
    (
        ("add", "divide"),
        "{n} pours {a} old and {b} new {t} into a bowl. {c} cousins share them equally. How many {t} has each cousin?",
    ),
    (("subtract", "divide"), "Of {a} {t}, {n} keeps {b} and packs the rest into bags of {c}. How many bags are there?"),
    (
        ("subtract", "add"),
        "A bus carried {a} {t}. {b} were unloaded at the first stop and {c} loaded at the second. How many {t} are on "
        "the bus?",
    ),
    (
        ("subtract", "subtract"),
        "Out of {a} {t}, {b} were sold in the morning and {c} at night. How many {t} were kept?",
    ),
    (("divide", "multiply"), "{a} {t} are shared equally among {b} boxes. How many {t} are in {c} boxes?"),
    (
        ("add", "multiply", "subtract"),
        "{n} waters {a} trees and {b} bushes. Every plant bears {c} {t}, but birds take {d}. How many {t} remain?",
    ),
    (
        ("add", "multiply", "add"),
        "A ship has {a} small and {b} large cabins. Each cabin holds {c} {t}, and {d} more {t} are in the kitchen. "
        "How many {t} are on the ship?",
    ),
    (
        ("multiply", "add", "subtract"),
        "A machine makes {a} rows of {b} {t}. A worker adds {c} and takes away {d}. How many {t} are there now?",
    ),
    (
        ("multiply", "subtract", "add"),
        "{a} chests held {b} {t} each. {c} {t} were stolen, but {d} were added later. How many {t} are there now?",
    ),
    (
        ("subtract", "multiply", "add"),
        "Of {a} boats {b} stayed in the harbour. Every other boat caught {c} {t}, and a child caught {d}. How many {t} "
        "were caught?",
    ),
    (
        ("subtract", "multiply", "subtract"),
        "{n} plants {a} seeds, and {b} of them die. Each of the others gives {c} {t}. {n} eats {d}. How many {t} are "
        "left?",
    ),
    (
        ("add", "add", "divide"),
        "{n} has {a} {t}, Kim has {b} and Lou has {c}. They put them together and share them equally among {d} people. "
        "How many {t} does each person get?",
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
        "Each of {a} children was handed {b} {t}, and together they gave {c} of them back. How many {t} do the "
        "children still have?",
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
