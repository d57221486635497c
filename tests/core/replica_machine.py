"""Rules for a replica under any order of events, and the oracle without blocks beside it."""

import dataclasses
import math
from typing import Any

from beam_oracle import toy_beams
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from replica_checks import Tracked
from replica_driver import make_request, prompt_keys
from replica_rules import CONSUMERS, RunningReplica
from replica_workload import CHOICES, ENDINGS, IDENTITIES, RETENTIONS, STORIES, cut, is_admitted

from rayserve_paged.core.ids import Attempt, RequestId
from rayserve_paged.core.replica_messages import AssignRequest, CancelRequest
from rayserve_paged.core.request import Request, admit
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.fingerprint_rank import Expected, oracle, prompt_oracle


class ReplicaMachine(RunningReplica):
    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.sampled_from([4, 5, 6, 7, 3, 8, 9, 2, 12, 1]),
        max_tokens=st.sampled_from([8, 10, 6, 3, 2, 1]),
        consumer=st.sampled_from(CONSUMERS),
        priorities=st.lists(st.sampled_from([0, 0, -1, 2]), min_size=1, max_size=4),
        identity=st.sampled_from(["plain", "plain", *IDENTITIES]),
        num_samples=st.sampled_from([1, 1, 2, 3, 4]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        poison=st.sampled_from([*[None] * 5, (0, None), (2, None), (0, 1), (1, 0), (2, 1)]),
        deadline_s=st.sampled_from([None, None, None, 0.1, 3.0, 100.0]),
        attention=st.sampled_from([*[(None, 0)] * 3, (1, 0), (2, 1), (3, 0), (4, 5), (7, 2)]),
        retention=st.sampled_from([(), (), *RETENTIONS]),
    )
    def submit(
        self,
        story: list[int],
        num_prompt: int,
        max_tokens: int,
        consumer: str,
        priorities: list[int],
        identity: str,
        num_samples: int,
        prompt_logprobs: int | None,
        poison: tuple[int, int | None] | None,
        deadline_s: float | None,
        attention: tuple[int | None, int] = (None, 0),
        retention: tuple[RetentionRange, ...] = (),
    ) -> None:
        for temperature, priority in enumerate(priorities):
            request = self.build(
                story[:num_prompt],
                max_tokens,
                consumer,
                deadline_s,
                attention,
                identity,
                priority=priority,
                temperature=temperature,
                n=num_samples,
                prompt_logprobs=prompt_logprobs,
                retention=cut(retention, num_prompt),
            )
            if not is_admitted(request, self.limits):
                return
            if poison is not None and poison[1] is not None and poison[1] >= num_samples:
                poison = None
            self.open(request, poison)

    @precondition(lambda self: self.tracked)
    @rule(
        pick=st.integers(0, 99),
        num_outputs=st.sampled_from([12, 5, 2, 1]),
        more=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        max_tokens=st.sampled_from([3, 6, 1]),
    )
    def take_another_turn(
        self, pick: int, num_outputs: int, more: list[int], max_tokens: int
    ) -> None:
        """Ask on from an answer, whether all of it has been given or not."""
        tracked = self.tracked[pick % len(self.tracked)]
        expected, _stream = tracked.samples[pick % len(tracked.samples)]
        prompt = (*tracked.request.prompt_token_ids, *expected.token_ids[:num_outputs], *more)
        request = dataclasses.replace(
            tracked.request,
            request_id=RequestId(f"q{self.num_submitted}"),
            attempt=Attempt(0),
            prompt_token_ids=TokenIds.of(prompt),
            params=dataclasses.replace(
                tracked.request.params,
                max_tokens=max_tokens,
                min_tokens=min(tracked.request.params.min_tokens, max_tokens),
            ),
        )
        self.num_submitted += 1
        if is_admitted(request, self.limits):
            # Poison goes by the seed, which the two share.
            self.open(request, tracked.poison)

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.sampled_from([5, 4, 7, 3, 8, 1]),
        max_tokens=st.sampled_from([6, 9, 3, 2, 1]),
        consumer=st.sampled_from(CONSUMERS),
        priority=st.sampled_from([0, 0, -1, 2]),
        width=st.sampled_from([3, 2, 4, 1]),
        num_outputs=st.sampled_from([1, 2, 4]),
        ending=st.sampled_from(ENDINGS),
        poison=st.sampled_from([*[None] * 5, (0, None), (2, None)]),
        identity=st.sampled_from(["plain", "plain", *IDENTITIES]),
        prompt_logprobs=st.sampled_from([None, None, 0, 1]),
        deadline_s=st.sampled_from([None, None, None, 0.1, 3.0, 100.0]),
        attention=st.sampled_from([*[(None, 0)] * 3, (1, 0), (2, 1), (3, 0), (4, 5), (7, 2)]),
        choice=st.sampled_from(CHOICES),
    )
    def submit_a_search(
        self,
        story: list[int],
        num_prompt: int,
        max_tokens: int,
        consumer: str,
        priority: int,
        width: int,
        num_outputs: int,
        ending: tuple[float, bool | str],
        poison: tuple[int, int | None] | None,
        identity: str,
        prompt_logprobs: int | None,
        deadline_s: float | None,
        attention: tuple[int | None, int],
        choice: dict[str, Any],
    ) -> None:
        min_tokens = min(choice.get("min_tokens", 0), max_tokens)
        request = self.build(
            story[:num_prompt],
            max_tokens,
            consumer,
            deadline_s,
            attention,
            identity,
            priority=priority,
            n=min(num_outputs, width),
            beam_width=width,
            length_penalty=ending[0],
            early_stopping=ending[1],
            prompt_logprobs=prompt_logprobs,
            **choice | {"min_tokens": min_tokens},
        )
        if is_admitted(request, self.limits):
            self.open(request, poison)

    def build(
        self,
        prompt: list[int],
        max_tokens: int,
        consumer: str,
        deadline_s: float | None,
        attention: tuple[int | None, int],
        identity: str,
        **fields: Any,  # noqa: ANN401
    ) -> Request:
        """Make a request, whose name and seed nobody else has."""
        request = make_request(
            prompt,
            max_tokens,
            request_id=f"q{self.num_submitted}",
            consumer_id=consumer,
            seed=self.num_submitted,
            window=attention[0],
            num_sink_tokens=attention[1],
            **IDENTITIES[identity],
            **fields,
        )
        self.num_submitted += 1
        return dataclasses.replace(request, deadline_s=deadline_s, tenant=consumer)

    def open(self, request: Request, poison: tuple[int, int | None] | None) -> None:
        assert request.params.seed is not None
        if poison is not None:
            draw, sibling = poison
            of_one = () if sibling is None else (sibling,)
            self.driver.rank.poison.add((request.params.seed, draw, *of_one))
        self.seen[request.consumer_id] = self.driver.now
        self.assigned[request.request_id, request.attempt] += 1
        self.driver.submit(request)
        reader = self.driver.reader(request.consumer_id)
        num_steps = None
        if request.params.beam_width is None:
            expected = [oracle(request, self.limits, s) for s in range(request.params.n)]
        else:
            found, num_steps = toy_beams(request, self.limits)
            expected = [Expected(one.token_ids, one.finish) for one in found]
        streams = [reader.stream(request, sibling) for sibling in range(request.params.n)]
        samples = list(zip(expected, streams, strict=True))
        due = math.inf if request.deadline_s is None else self.driver.now + request.deadline_s
        scores: tuple[TokenLogprobs, ...] = ()
        if request.params.prompt_logprobs is not None:
            scores = prompt_oracle(request, self.limits.layer_groups)
        tracked = Tracked(request, samples, poison, due, num_steps=num_steps, scores=scores)
        self.tracked.append(tracked)
        self.keep_answers("late")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), abandon=st.booleans())
    def cancel(self, pick: int, abandon: bool) -> None:
        live = self.live()
        tracked = live[pick % len(live)]
        tracked.cancelled = True
        if abandon:
            tracked.abandoned = True
            reader = self.driver.reader(tracked.request.consumer_id)
            reader.consumer.abandon(tracked.request.request_id)
        self.driver.cancel(tracked.request)
        self.keep_answers("late")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), sibling=st.integers(0, 4))
    def cancel_one_sample(self, pick: int, sibling: int) -> None:
        live = self.live()
        tracked = live[pick % len(live)]
        tracked.cancelled_siblings.add(sibling)
        request = tracked.request
        self.driver.send(CancelRequest(request.request_id, request.attempt, sibling))
        self.keep_answers("late")

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99))
    def submit_under_a_name_that_was_used(self, pick: int) -> None:
        name = self.tracked[pick % len(self.tracked)].request.request_id
        last = [t for t in self.tracked if t.request.request_id == name][-1]
        if last in self.live() or (last.is_open and not last.abandoned):
            return
        # Another attempt, since items of this one may still be under way.
        attempt = Attempt(last.request.attempt + 1)
        request = dataclasses.replace(last.request, attempt=attempt)
        self.open(request, last.poison)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99))
    def assign_a_live_request_again(self, pick: int) -> None:
        live = self.live()
        request = live[pick % len(live)].request
        self.seen[request.consumer_id] = self.driver.now
        admitted = admit(request, self.limits)
        self.driver.send(AssignRequest(admitted, prompt_keys(admitted, self.driver.scope)))
        self.keep_answers("late")
