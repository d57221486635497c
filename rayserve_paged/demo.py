"""A demonstration: prompts that share a beginning, their answers, the ledger and its blocks."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from rayserve_paged.block_picture import block_picture, legend
from rayserve_paged.core.errors import PagedError
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.llm import LLM
from rayserve_paged.outputs import DeploymentAccounting, RequestOutput, StreamChunk
from rayserve_paged.prompts import Prompt

_LOOK_S: Final = 0.1
NUM_BLOCKS: Final = 64
"""Few enough to see each one."""

_PICTURE_WIDTH: Final = 64

_FERRY: Final = (
    "You answer for a small river ferry. It runs between the north pier and the south pier every "
    "thirty minutes, from six in the morning until nine in the evening. A single ticket costs "
    "three euros and a return ticket five; children under six travel free. Bicycles go on the "
    "lower deck, twelve at most, and dogs are kept on a lead. Answer in one or two sentences."
)
_QUESTIONS: Final = (
    (
        (_FERRY, "How much is a return ticket?"),
        (None, "Why is the sky blue?"),
    ),
    (
        (_FERRY, "May I bring my dog?"),
        (_FERRY, "When does the last ferry leave?"),
        (_FERRY, "Where do bicycles go?"),
        (None, "Why is the sky blue?"),
    ),
)


def demo_waves() -> list[list[Prompt]]:
    """Return two waves of chats; most share a system prompt, and the second finds it cached."""
    waves: list[list[Prompt]] = []
    for questions in _QUESTIONS:
        wave: list[Prompt] = []
        for system, question in questions:
            messages = [{"role": "user", "content": question}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            wave.append({"messages": messages})
        waves.append(wave)
    return waves


async def run_demo(
    llm: LLM, waves: Sequence[Sequence[Prompt]], params: SamplingParams, console: Console
) -> None:
    """Answer waves of prompts, print the answers as they stream, then figures and pictures.

    Args:
        llm: Answers.
        waves: The prompts of one wave run together; a wave begins when the one before has ended.
        params: Of all prompts.
        console: Where to print; nothing depends on its colours.

    Raises:
        PagedError: A prompt is refused or a request failed.
    """
    prompts = [prompt for wave in waves for prompt in wave]
    outputs: list[RequestOutput] = []
    busiest = await asyncio.to_thread(llm.accounting)
    for number, wave in enumerate(waves, 1):
        console.rule(f"wave {number}: {len(wave)} prompts at once", characters="-")
        ended = asyncio.Event()
        watching = asyncio.create_task(_watch_ledger(llm, ended))
        try:
            outputs += await _answer(llm, wave, params, console)
        finally:
            ended.set()
            busiest = await watching
    console.print(_table(prompts, outputs))
    _print_ledger(f"While wave {len(waves)} ran", busiest, console)
    _print_ledger("When it had ended", await asyncio.to_thread(llm.accounting), console)


async def _watch_ledger(llm: LLM, ended: asyncio.Event) -> DeploymentAccounting:
    """Return the ledger of the moment at which sharing saved most."""
    best = await asyncio.to_thread(llm.accounting)
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_S)
        now = await asyncio.to_thread(llm.accounting)
        best = max(best, now, key=lambda a: (a.prefix_sharing_saved_slots, a.allocated_slots))
    return best


async def _answer(
    llm: LLM, wave: Sequence[Prompt], params: SamplingParams, console: Console
) -> list[RequestOutput]:
    """Run the prompts of a wave together; show one answer after the other, each as it comes."""
    queues: list[asyncio.Queue[StreamChunk]] = [asyncio.Queue() for _ in wave]

    async def read(prompt: Prompt, queue: asyncio.Queue[StreamChunk]) -> None:
        async with contextlib.aclosing(llm.stream(prompt, params)) as chunks:
            async for chunk in chunks:
                queue.put_nowait(chunk)

    outputs = []
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, queue in zip(wave, queues, strict=True):
                group.create_task(read(prompt, queue))
            for prompt, queue in zip(wave, queues, strict=True):
                console.print(f"> {_question(prompt)}", style="bold", markup=False, highlight=False)
                outputs.append(await _show(queue, console))
    except* PagedError as failures:
        raise failures.exceptions[0] from None
    return outputs


async def _show(queue: asyncio.Queue[StreamChunk], console: Console) -> RequestOutput:
    writer = _WordWrap(console)
    while True:
        chunk = await queue.get()
        writer.write(chunk.text)
        if chunk.output is not None:
            writer.end()
            return chunk.output


class _WordWrap:
    """Prints text as it comes, breaking lines between words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        for char in text:
            if not char.isspace():
                if cell_len(self._word + char) > self._console.width:
                    self._put_word()
                self._word += char
                continue
            self._put_word()
            if char == "\n":
                self._print("\n")
                self._column = 0
            elif self._column:
                self._word = " "

    def end(self) -> None:
        self._put_word()
        self._print("\n\n")

    def _put_word(self) -> None:
        if self._column + cell_len(self._word) > self._console.width:
            self._word = self._word.lstrip()
            self._print("\n")
            self._column = 0
        self._print(self._word)
        self._column += cell_len(self._word)
        self._word = ""

    def _print(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def _question(prompt: Prompt) -> str:
    text = prompt["messages"][-1]["content"] if isinstance(prompt, Mapping) else str(prompt)
    return text.rpartition("\n")[2]


def _table(prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=26)
    for heading in ("tokens", "of prompt", "cached", "replica", "TTFT s", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        table.add_row(
            _question(prompt),
            str(len(output.token_ids)),
            str(len(output.prompt_token_ids)),
            str(output.num_cached_tokens),
            output.replica,
            "-" if output.ttft_s is None else f"{output.ttft_s:.2f}",
            "-" if not output.tpot_s else f"{1 / output.tpot_s:.1f}",
        )
    return table


def _print_ledger(moment: str, accounting: DeploymentAccounting, console: Console) -> None:
    console.print()
    console.print(f"{moment}:", style="bold")
    for name in (
        "unique_live_tokens",
        "allocated_slots",
        "internal_fragmentation_slots",
        "prefix_sharing_saved_slots",
        "num_cached_blocks",
        "num_pinned_blocks",
    ):
        console.print(f"  {name}={getattr(accounting, name)}", highlight=False)
    for replica_id, ledger in accounting.replicas.items():
        console.print(
            f"  {replica_id}: {ledger.num_blocks} blocks of {ledger.block_size} slots",
            highlight=False,
        )
        console.print(Padding(block_picture(ledger, _PICTURE_WIDTH), (0, 0, 0, 4), expand=False))
        console.print(Padding(legend(ledger), (0, 0, 0, 4), expand=False))
