"""The client of load tests reads what the endpoint sends, and tells whole from broken."""

import asyncio

from http_endpoint import Endpoint, body, greedy

from rayserve_paged.experiments.http_client import Answer, complete


def ask(endpoint: Endpoint, leave_after: int | None = None, **fields: object) -> Answer:
    return asyncio.run(complete(*endpoint.address, body(**fields), leave_after))


def test_a_stream_and_an_answer_in_one_piece_are_read_whole(endpoint: Endpoint) -> None:
    text = greedy("hello", 40)
    for stream in (False, True):
        answer = ask(endpoint, prompt="hello", max_tokens=40, n=2, stream=stream)
        assert answer.is_whole
        assert answer.texts == {0: text, 1: text}
        assert answer.reasons == {0: "length", 1: "length"}
        assert answer.error is None


def test_a_client_that_leaves_has_a_beginning_that_is_not_whole(endpoint: Endpoint) -> None:
    answer = ask(endpoint, 1, prompt="hello", max_tokens=900, stream=True)
    assert not answer.is_whole
    assert greedy("hello", 900).startswith(answer.texts[0])
    endpoint.wait_for_blocks()


def test_a_refusal_is_no_answer(endpoint: Endpoint) -> None:
    for stream in (False, True):
        answer = ask(endpoint, prompt=[], stream=stream)
        assert (answer.status, answer.is_whole) == (400, False)
        assert "prompt" in (answer.error or "")


async def served(content: bytes) -> Answer:
    """Read what a server sends that then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await complete("127.0.0.1", port, {"stream": True})


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_stream_that_stops_in_any_way_before_its_last_event_is_not_whole() -> None:
    for end in (b"", b"0\r\n\r\n", b"ff\r\nda"):
        answer = asyncio.run(served(HEAD + chunk(EVENT[:9]) + chunk(EVENT[9:]) + end))
        assert not answer.is_whole
        assert answer.texts == {0: "a"}
    done = chunk(EVENT) + chunk(b"data: [DONE]\n\n")
    assert asyncio.run(served(HEAD + done + b"0\r\n\r\n")).is_whole
    assert not asyncio.run(served(HEAD + done)).is_whole, "the body has no end"


def test_an_error_event_is_told() -> None:
    error = b'data: {"error":{"message":"it broke"}}\n\n'
    answer = asyncio.run(served(HEAD + chunk(EVENT) + chunk(error) + b"0\r\n\r\n"))
    assert (answer.is_whole, answer.error) == (False, "it broke")
