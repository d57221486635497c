"""The requests of a load over HTTP, and what each gives undisturbed."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Final

from rayserve_paged.experiments.http_client import Answer, complete
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.tokenizer import ByteTokenizer

MODEL: Final = "fingerprint"

_VOCAB_SIZE: Final = 1000
_SHARED_LEN: Final = 64
_NUM_AT_ONCE: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A request and its answer.

    Args:
        body: Of the request, without `stream`.
        texts: Of each choice.
        reasons: Why each ends.
        num_tokens: Output tokens of all choices.
    """

    body: dict[str, Any]
    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    num_tokens: int

    def problem(self, answer: Answer) -> str | None:
        """Say what is wrong with an answer, whole or not; None where nothing is.

        Args:
            answer: One that is not whole has to be a beginning of this one.
        """
        indices = range(len(self.texts))
        if answer.is_whole:
            found = tuple(answer.texts.get(index, "") for index in indices)
            reasons = tuple(answer.reasons.get(index, "") for index in indices)
            if (found, reasons) != (self.texts, self.reasons):
                return f"gave {found} ({reasons}), and undisturbed {self.texts} ({self.reasons})"
            return None
        for index, text in answer.texts.items():
            if not self.texts[index].startswith(text):
                return f"gave {text!r}, and undisturbed {self.texts[index]!r}"
        return None


def draw_bodies(drawn: random.Random, number: int) -> list[dict[str, Any]]:
    """Draw requests: every other prompt shares its beginning; some are sampled, with a seed and
    several choices, some end at a stop string, the others are greedy.
    """
    shared = [drawn.randrange(_VOCAB_SIZE) for _ in range(_SHARED_LEN)]
    bodies = []
    for place in range(number):
        tail = [drawn.randrange(_VOCAB_SIZE) for _ in range(drawn.randint(1, 80))]
        ids = shared + tail if place % 2 else tail
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": ids,
            "max_tokens": drawn.randint(20, 240),
            "n": drawn.choice((1, 1, 1, 2)),
            "temperature": 0,
        }
        match drawn.choice(("greedy", "greedy", "sampled", "stop")):
            case "sampled":
                body |= {"temperature": 1, "seed": place, "n": drawn.randint(1, 3)}
            case "stop":
                text = greedy_text(body)
                begin = drawn.randrange(len(text))
                body["stop"] = text[begin : begin + 3]
        bodies.append(body)
    return bodies


def greedy_text(body: dict[str, Any]) -> str:
    """Return what a greedy request without a stop string gives, computed without a cache."""
    return ByteTokenizer(_VOCAB_SIZE).decode(oracle(body["prompt"], body["max_tokens"]))


async def learn_cases(address: tuple[str, int], bodies: Sequence[dict[str, Any]]) -> list[Case]:
    """Serve each request while nothing happens to it.

    Raises:
        ValueError: One fails, or a greedy one is not what the model gives.
    """
    gate = asyncio.Semaphore(_NUM_AT_ONCE)

    async def learn(body: dict[str, Any]) -> Case:
        async with gate:
            answer = await complete(*address, body)
        if not answer.is_whole or answer.num_tokens is None:
            raise ValueError(f"an undisturbed request failed: {answer.error}")
        texts = tuple(text for _, text in sorted(answer.texts.items()))
        reasons = tuple(reason for _, reason in sorted(answer.reasons.items()))
        if body["temperature"] == 0:
            text, stop = greedy_text(body), body.get("stop")
            wanted = text if stop is None else text[: text.index(stop)]
            if texts != (wanted,) * body["n"]:
                raise ValueError(f"an undisturbed request gave {texts}, and the model {wanted!r}")
        return Case(body, texts, reasons, answer.num_tokens)

    return await asyncio.gather(*map(learn, bodies))
