"""Calls of LLM that are interrupted, closed or dropped: all ends, and the LLM goes on."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator

import pytest
from fingerprint_llm import NUM_BLOCKS, greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.outputs import RequestOutput, StreamChunk

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=500, temperature=0.0)


def test_ctrl_c_ends_a_batch_and_its_ids_are_free_at_once(llm: LLM) -> None:
    def interrupt() -> None:
        while llm.accounting().unique_live_tokens == 0:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    ids, prompts = ["one", "two"], ["interrupt me", "and me"]
    for _ in range(5):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, ENDLESS, request_ids=ids)
        thread.join()
        outputs = llm.generate(prompts, GREEDY, request_ids=ids)
        assert [output.token_ids for output in outputs] == [greedy(p, 8) for p in prompts]
    assert num_unused_blocks(llm) == NUM_BLOCKS


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_error_ends_the_call_alone_as_well(llm: LLM, error: type[BaseException]) -> None:
    def take(_output: RequestOutput) -> None:
        raise error

    with pytest.raises(error):
        llm.generate(["short", "long"], [GREEDY, ENDLESS], on_output=take)
    assert num_unused_blocks(llm) == NUM_BLOCKS
    assert llm.generate("after it", GREEDY)[0].token_ids == greedy("after it", 8)


def test_an_output_may_decide_over_the_other_requests(llm: LLM) -> None:
    def cancel_the_other(output: RequestOutput) -> None:
        assert threading.current_thread() is threading.main_thread()
        if output.request_id == "short":
            assert llm.cancel("long")

    short, long = llm.generate(
        ["s", "l"], [GREEDY, ENDLESS], request_ids=["short", "long"], on_output=cancel_the_other
    )
    assert short.token_ids == greedy("s", 8)
    assert long.finish_reason is FinishReason.CANCELLED
    assert long.token_ids == greedy("l", len(long.token_ids))


def test_two_threads_generate_at_once_and_each_has_its_own(llm: LLM) -> None:
    prompts = {f"thread {index}": [f"{index}, {n}" for n in range(4)] for index in range(3)}
    found: dict[str, list[tuple[int, ...]]] = {}

    def run(name: str) -> None:
        found[name] = [output.token_ids for output in llm.generate(prompts[name], GREEDY)]

    threads = [threading.Thread(target=run, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [greedy(p, 8) for p in batch] for name, batch in prompts.items()}


def test_a_stream_that_is_dropped_ends(llm: LLM) -> None:
    async def read_one() -> AsyncGenerator[StreamChunk, None]:
        stream = llm.stream("drop me", ENDLESS)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(read_one())
    loop.close()
    # Nobody is left whom a closing loop or generator could wait for.
    del stream
    gc.collect()
    assert num_unused_blocks(llm) == NUM_BLOCKS


def test_a_stream_that_is_read_behind_the_end_says_so() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=4)
    stream = llm.stream("x", GREEDY)
    llm.close()
    with pytest.raises(DeploymentError, match="this LLM is closed"):
        asyncio.run(anext(stream))


def test_an_output_may_close_the_llm() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=64)
    outputs = llm.generate(
        ["short", "long"],
        [GREEDY, ENDLESS],
        on_output=lambda output: llm.close(),
        raise_on_error=False,
    )
    assert outputs[0].token_ids == greedy("short", 8)
    assert "closed" in (outputs[1].error or "")


def test_calls_that_a_close_cuts_short_say_that_it_is_closed() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=4)
    errors: list[BaseException] = []
    begun = threading.Barrier(5)

    def ask() -> None:
        begun.wait()
        try:
            while True:
                llm.accounting()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    llm.close()
    for thread in threads:
        thread.join()
    assert {str(error) for error in errors} == {"deployment 'default': this LLM is closed"}
    assert {type(error) for error in errors} == {DeploymentError}


SCRIPT = """
import asyncio
from rayserve_paged import LLM, SamplingParams
llm = LLM("fingerprint", shell="inprocess", tensor_parallel_size=2, num_blocks=256)
stream = llm.stream("left running", SamplingParams(max_tokens=4000))
async def begin():
    await anext(stream)
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
print("has tokens")
"""


def test_a_script_that_ends_without_closing_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "has tokens\n", "")
