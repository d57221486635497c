"""Reads a Dockerfile: its stages, and the instructions of each."""

import dataclasses
import json
import re
import shlex


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        name: In upper case.
        text: What follows it, its lines joined.
    """

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The arguments: of the JSON form, or as a shell would split them."""
        if self.text.startswith("["):
            words: list[str] = json.loads(self.text)
            return words
        return shlex.split(self.text)

    @property
    def commands(self) -> list[list[str]]:
        """Of a RUN: the words of each command that is run."""
        return [shlex.split(part) for part in re.split(r"&&|\|\||;", self.text)]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: After AS.
        base: Image, or stage, that it starts from.
        instructions: All but FROM.
    """

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        """Return the instructions of this name."""
        return [one for one in self.instructions if one.name == name]


def read_stages(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Return the arguments before the first stage with their defaults, and the stages."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    found: list[tuple[str, str, list[Instruction]]] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            found.append((stage, base, []))
        elif not found:
            assert name == "ARG", f"{name} before the first FROM"
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            found[-1][2].append(Instruction(name, rest.strip()))
    return arguments, [Stage(stage, base, tuple(inside)) for stage, base, inside in found]
