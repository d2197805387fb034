"""The names that files, folders and their lines are made of."""

from __future__ import annotations

from typing import Final

# These are short everyday nouns. Each becomes one token (see `tinypolicy.chat.train_tokenizer`), so copying a
# name from a tool's output costs the policy one decision.
_NAMES: Final = """
    acorn amber anchor apron attic badge bagel barley basil beacon birch biscuit blanket bottle
    bridge bronze bucket butter button cabin cactus camel candle canoe canyon carrot castle cedar
    cello cherry chisel cider clover cobalt comet copper coral cotton cradle crayon cricket crystal
    dagger daisy desert dolphin donkey dragon drum eagle easel ember engine falcon fern ferry fiddle
    flute forest fossil galaxy garden garlic geyser ginger glacier goblet granite grape hammer harbor
    harp hazel helmet heron honey igloo island ivory jacket jaguar jasmine jungle kayak kettle kitten
    ladder lagoon lantern lemon lentil lily lizard lobster magnet mango maple marble meadow melon
    mirror mitten mosaic muffin napkin nectar needle nickel noodle nutmeg oasis olive onion orchid
    otter oyster paddle panda parrot peach pebble pelican pepper piano pickle pigeon pillow pirate
    planet plum pocket pollen potato prairie prism pumpkin puzzle quartz quiver rabbit radish raven
    ribbon river rocket saddle saffron salmon satin scarf shadow shovel silver sparrow spinach spruce
    squid statue sugar sunset tablet teapot temple thistle ticket timber toast tulip tunnel turtle
    valley vanilla velvet violin volcano wagon walnut walrus willow window winter wizard yogurt zebra
"""
WORDS: Final[tuple[str, ...]] = tuple(_NAMES.split())

# These are extensions, and the names that templates use themselves; no word above may hold one of them.
EXTENSIONS: Final[tuple[str, ...]] = ("txt", "log", "cfg", "csv", "list", "md")
