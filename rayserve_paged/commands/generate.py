"""`rayserve-paged generate`: starts a deployment, answers prompts, ends it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.core.config import DeploymentConfig
    from rayserve_paged.prompt_file import PromptEntry, RefusedEntry


def _option(group: str, text: str, *names: str) -> object:
    return typer.Option(*names, help=text, rich_help_panel=group)


def _in_out(text: str, *names: str) -> object:
    return _option("Input and output", text, *names)


def _sampling(text: str, *names: str) -> object:
    return _option("Sampling, for prompts that do not set it themselves", text, *names)


def _serving(text: str, *names: str) -> object:
    return _option("Serving, for prompts that do not set it themselves", text, *names)


def _deployment(text: str, *names: str) -> object:
    return _option("Deployment", text, *names)


_Model = Annotated[
    str | None, _in_out("Hugging Face directory, GGUF file, smollm2 or fingerprint.")
]
_Prompt = Annotated[list[str] | None, _in_out("A prompt; may be given again.")]
_Prompts = Annotated[
    Path | None,
    _in_out(
        "JSON lines with prompt, messages or prompt_token_ids, and what else is for that prompt "
        "alone, named as the options below: max_tokens, window, ..."
    ),
]
_SkipInvalid = Annotated[
    bool,
    _in_out("Answer the other lines of --prompts where some are refused.", "--skip-invalid"),
]
_Pin = Annotated[
    list[str] | None,
    _in_out(
        "Text that is computed first and stays cached to the end, for prompts that begin with "
        "it; may be given again. Needs --max-pinned-share."
    ),
]
_Json = Annotated[bool, _in_out("Print one JSON line per request.", "--json")]
_Timings = Annotated[bool, _in_out("Print on stderr where the time went.", "--timings")]
_N = Annotated[int | None, _sampling("Parallel samples of each prompt (1).", "--n")]
_BestOf = Annotated[
    int | None, _sampling("Samples to draw, of which the --n most likely are returned.")
]
_BeamWidth = Annotated[
    int | None, _sampling("Beams of a search, whose best --n outputs are returned; absent: none.")
]
_LengthPenalty = Annotated[
    float | None, _sampling("Above 0 a search prefers longer outputs, -10 to 10 (1).")
]
_EarlyStopping = Annotated[
    str | None, _sampling("When a search with all its outputs ends: true, false or never (false).")
]
_MaxTokens = Annotated[int | None, _sampling("Most output tokens (16).")]
_MinTokens = Annotated[int | None, _sampling("Fewest output tokens (0).")]
_Temperature = Annotated[float | None, _sampling("0 is greedy (1.0).")]
_TopP = Annotated[float | None, _sampling("Nucleus, above 0 and up to 1 (1.0).")]
_TopK = Annotated[int | None, _sampling("Most likely tokens kept; 0 keeps all (0).")]
_MinP = Annotated[
    float | None, _sampling("Least likely token kept, as a share of the most likely one's (0).")
]
_RepetitionPenalty = Annotated[
    float | None, _sampling("Divides logits of tokens in prompt and output; 1 for none (1).")
]
_PresencePenalty = Annotated[
    float | None, _sampling("Taken off logits of tokens in the output, -2 to 2 (0).")
]
_FrequencyPenalty = Annotated[
    float | None, _sampling("The same for each time that it is there, -2 to 2 (0).")
]
_LogitBias = Annotated[
    list[str] | None,
    _sampling("ID=BIAS, or several as a JSON object, -100 to 100; may be given again."),
]
_AllowedTokenIds = Annotated[
    str | None, _sampling("Tokens that may be chosen, such as 17,18; absent: all.")
]
_Seed = Annotated[int | None, _sampling("Of the random draws; drawn where absent.")]
_IgnoreEos = Annotated[
    bool, _sampling("Go on past the model's end-of-sequence ids.", "--ignore-eos")
]
_Stop = Annotated[list[str] | None, _sampling("String that ends the text; may be given again.")]
_StopTokenIds = Annotated[
    str | None, _sampling("Tokens that end the output and belong to it, such as 17,18.")
]
_Logprobs = Annotated[
    int | None, _sampling("Log-probabilities of this many tokens at each position.")
]
_PromptLogprobs = Annotated[
    int | None, _sampling("The same at each position of the prompt but the first.")
]
_ResponseFormat = Annotated[
    str | None,
    _sampling(
        "What outputs must be, in the OpenAI API's form: "
        '{"type": "json_object"} or {"type": "json_schema", ...}.'
    ),
]
_Priority = Annotated[int | None, _serving("Lower is served first (0).")]
_Tenant = Annotated[str | None, _serving("Who is charged under --policy weighted-fair.")]
_TenantSalt = Annotated[
    str | None, _serving("Requests share cached prefixes only with those of an equal salt.")
]
_Adapter = Annotated[str | None, _serving("ID@VERSION of weights laid over the model's.")]
_Window = Annotated[
    int | None, _serving("Positions that a token attends to, its own the last; absent: all.")
]
_NumSinkTokens = Annotated[
    int | None, _serving("First positions that it attends to besides its window (0).")
]
_Retention = Annotated[
    list[str] | None,
    _serving(
        "START:END=PRIORITY[,SECONDS]: how long tokens stay cached, of priority 0 to 100 (35), "
        "without END the output's too; may be given again."
    ),
]
_DeadlineS = Annotated[
    float | None, _serving("Seconds after which what is not done is given up; absent: none.")
]
_Tp = Annotated[int | None, _deployment("Ranks of each replica (1).")]
_Replicas = Annotated[int | None, _deployment("Replicas (1).")]
_Dtype = Annotated[str | None, _deployment("fp32 (the default), bf16 or fp16.")]
_KvDtype = Annotated[
    str | None, _deployment("Of the KV cache: fp32, bf16, fp16, int8 or fp8 (as --dtype).")
]
_BlockSize = Annotated[int | None, _deployment("Slots per block (16).")]
_NumBlocks = Annotated[int | None, _deployment("Blocks of each rank's pool.")]
_CacheMemory = Annotated[str | None, _deployment("Size of each rank's pool, such as 512MiB.")]
_PartialReuse = Annotated[
    bool, _deployment("Reuse leading slots of cached blocks as well.", "--partial-reuse")
]
_MaxPinnedShare = Annotated[
    float | None, _deployment("Share of the pool that --pin may take, up to 0.9 (0).")
]
_MaxModelLen = Annotated[
    int | None, _deployment("Most prompt and output tokens (the model's own limit).")
]
_MaxNumSeqs = Annotated[int | None, _deployment("Sequences that run at once (64).")]
_MaxNumBatchedTokens = Annotated[int | None, _deployment("Tokens of one step (512).")]
_PipelineDepth = Annotated[
    int | None, _deployment("Steps in flight; at 2 one is planned while one runs (1).")
]
_MaxDecodeSteps = Annotated[int | None, _deployment("Steps that one plan may run (1).")]
_MaxPrefixWaitSteps = Annotated[
    int | None, _deployment("Steps that a request waits for a prefix in flight (64).")
]
_Policy = Annotated[
    str | None,
    _deployment(
        "Who starts first: priority (the default), fcfs, weighted-fair, shortest-remaining or "
        "longest-prefix-first."
    ),
]
_OldestEvery = Annotated[
    int | None, _deployment("One in so many starts is that of who has waited longest.")
]
_TenantWeights = Annotated[
    str | None, _deployment('Shares under weighted-fair, such as {"gold": 2}; 1 for others.')
]
_MaxNumWaiting = Annotated[
    int | None, _deployment("Sequences that may wait on a replica; absent: any number.")
]
_MaxPendingTokens = Annotated[
    int | None, _deployment("Tokens that its unfinished requests may come to; absent: any.")
]
_Name = Annotated[str | None, _deployment("Its name on the cluster (default).")]
_Shell = Annotated[
    str, _deployment("ray: actors on a cluster; inprocess: threads of this process.")
]
_Address = Annotated[
    str | None, _deployment("Ray cluster to join, auto for this machine's; absent: start one.")
]
_Config = Annotated[Path | None, _deployment("YAML file with the rest; what is given here wins.")]


_EARLY: Final = {"true": True, "false": False, "never": "never"}


def generate(
    model: _Model = None,
    prompt: _Prompt = None,
    prompts: _Prompts = None,
    skip_invalid: _SkipInvalid = False,
    pin: _Pin = None,
    as_json: _Json = False,
    timings: _Timings = False,
    n: _N = None,
    best_of: _BestOf = None,
    beam_width: _BeamWidth = None,
    length_penalty: _LengthPenalty = None,
    early_stopping: _EarlyStopping = None,
    max_tokens: _MaxTokens = None,
    min_tokens: _MinTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    repetition_penalty: _RepetitionPenalty = None,
    presence_penalty: _PresencePenalty = None,
    frequency_penalty: _FrequencyPenalty = None,
    logit_bias: _LogitBias = None,
    allowed_token_ids: _AllowedTokenIds = None,
    seed: _Seed = None,
    ignore_eos: _IgnoreEos = False,
    stop: _Stop = None,
    stop_token_ids: _StopTokenIds = None,
    logprobs: _Logprobs = None,
    prompt_logprobs: _PromptLogprobs = None,
    response_format: _ResponseFormat = None,
    priority: _Priority = None,
    tenant: _Tenant = None,
    tenant_salt: _TenantSalt = None,
    adapter: _Adapter = None,
    window: _Window = None,
    num_sink_tokens: _NumSinkTokens = None,
    retention: _Retention = None,
    deadline_s: _DeadlineS = None,
    tp: _Tp = None,
    replicas: _Replicas = None,
    dtype: _Dtype = None,
    kv_dtype: _KvDtype = None,
    block_size: _BlockSize = None,
    num_blocks: _NumBlocks = None,
    cache_memory: _CacheMemory = None,
    partial_reuse: _PartialReuse = False,
    max_pinned_share: _MaxPinnedShare = None,
    max_model_len: _MaxModelLen = None,
    max_num_seqs: _MaxNumSeqs = None,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    pipeline_depth: _PipelineDepth = None,
    max_decode_steps: _MaxDecodeSteps = None,
    max_prefix_wait_steps: _MaxPrefixWaitSteps = None,
    policy: _Policy = None,
    oldest_every: _OldestEvery = None,
    tenant_weights: _TenantWeights = None,
    max_num_waiting: _MaxNumWaiting = None,
    max_pending_tokens: _MaxPendingTokens = None,
    name: _Name = None,
    shell: _Shell = "ray",
    address: _Address = None,
    config: _Config = None,
) -> None:
    """Answer prompts with a model that is started for them."""
    sampling = {
        "n": n,
        "best_of": best_of,
        "beam_width": beam_width,
        "length_penalty": length_penalty,
        "early_stopping": _EARLY.get((early_stopping or "").lower(), early_stopping),
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": logit_bias or None,
        "allowed_token_ids": allowed_token_ids,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
        "stop": stop or None,
        "stop_token_ids": stop_token_ids,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": response_format,
    }
    options = {
        "priority": priority,
        "tenant": tenant,
        "tenant_salt": tenant_salt,
        "adapter": adapter,
        "window": window,
        "num_sink_tokens": num_sink_tokens,
        "retention": retention or None,
        "deadline_s": deadline_s,
    }
    flags = {
        "name": name,
        "model.model": model,
        "model.dtype": dtype,
        "model.kv_dtype": kv_dtype,
        "model.max_model_len": max_model_len,
        "cache.block_size": block_size,
        "cache.num_blocks": num_blocks,
        "cache.memory": cache_memory,
        "cache.partial_reuse": partial_reuse or None,
        "cache.max_pinned_share": max_pinned_share,
        "batch.max_num_seqs": max_num_seqs,
        "batch.max_num_batched_tokens": max_num_batched_tokens,
        "batch.pipeline_depth": pipeline_depth,
        "batch.max_decode_steps": max_decode_steps,
        "batch.max_prefix_wait_steps": max_prefix_wait_steps,
        "batch.policy": policy,
        "batch.oldest_every": oldest_every,
        "batch.tenant_weights": tenant_weights,
        "batch.max_num_waiting": max_num_waiting,
        "batch.max_pending_tokens": max_pending_tokens,
        "parallel.tensor_parallel_size": tp,
        "parallel.num_replicas": replicas,
    }
    sampling, options = _given(sampling), _given(options)
    entries, pins = _entries(prompt or [], prompts, pin or [], sampling, options, skip_invalid)
    settings = _settings(config, flags)
    from rayserve_paged.answer_prompts import answer_prompts

    answer_prompts(
        settings,
        entries,
        pins,
        shell=shell,
        address=address,
        as_json=as_json,
        timings=timings,
        skip_invalid=skip_invalid,
    )


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if value is not None}


def _entries(
    texts: Sequence[str],
    path: Path | None,
    pins: Sequence[str],
    sampling: dict[str, Any],
    options: dict[str, Any],
    skip_invalid: bool,
) -> "tuple[list[PromptEntry | RefusedEntry], list[PromptEntry]]":
    """Return what is to be answered, and what is to be pinned before."""
    from rayserve_paged.core.sampling_params import SamplingParams
    from rayserve_paged.prompt_file import PromptEntry, read_prompts
    from rayserve_paged.prompt_flags import (
        parse_adapter,
        parse_logit_bias,
        parse_response_format,
        parse_retention,
        parse_token_ids,
    )
    from rayserve_paged.request_options import RequestOptions

    if bool(texts) == (path is not None):
        raise InvalidInputError("--prompt", texts, "either --prompt or --prompts")
    if skip_invalid and path is None:
        raise InvalidInputError("--skip-invalid", True, "--prompts with it")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = parse_logit_bias(sampling["logit_bias"])
    for field in ("allowed_token_ids", "stop_token_ids"):
        if field in sampling:
            flag = "--" + field.replace("_", "-")
            sampling[field] = parse_token_ids(flag, sampling[field])
    if "grammar" in sampling:
        sampling["grammar"] = parse_response_format(sampling["grammar"])
    if "retention" in options:
        options["retention"] = parse_retention(options["retention"])
    if "adapter" in options:
        options["adapter"] = parse_adapter(options["adapter"])
    pinned = []
    if pins:
        # What concerns an answer alone does not concern them.
        kept = {name: options[name] for name in options if name not in ("retention", "deadline_s")}
        terms, one_token = RequestOptions(**kept), SamplingParams(max_tokens=1)
        pinned = [
            PromptEntry(f"--pin {number}", text, one_token, terms, pin=True)
            for number, text in enumerate(pins, 1)
        ]
    if path is not None:
        return read_prompts(path, sampling, options, skip_invalid=skip_invalid), pinned
    params, terms = SamplingParams(**sampling), RequestOptions(**options)
    entries: list[PromptEntry | RefusedEntry] = [
        PromptEntry(f"--prompt {number}", text, params, terms)
        for number, text in enumerate(texts, 1)
    ]
    return entries, pinned


def _settings(path: Path | None, flags: Mapping[str, object]) -> "DeploymentConfig":
    from rayserve_paged.load_config import load_config

    try:
        return load_config(path, flags)
    except InvalidInputError as error:
        if error.field != "model.model" or error.value is not None:
            raise
        accepted = "a model, here, in the file of --config or in RAYSERVE_MODEL__MODEL"
        raise InvalidInputError("--model", None, accepted) from error
