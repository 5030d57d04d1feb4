"""A plan in words: for a terminal, and for its page."""

from __future__ import annotations

import math
import shlex
import textwrap
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.identity.model_identity import public_name
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.pipeline.planning.gpus import find_gpu
from kvtuner.pipeline.planning.search_cost import OPERATIONS_PER_PARAMETER, USED_SHARE
from kvtuner.pipeline.planning.server_memory import size_text
from kvtuner.pipeline.planning.state_cost import STATES_SHARE
from kvtuner.pipeline.planning.window_cost import INDEXED, window_share
from kvtuner.precision import MIB
from kvtuner.report.formatting import count, fixed, printable
from kvtuner.report.table import Table
from kvtuner.runtime_loader.workspaces import INDEXED_PAGE_SIZE
from kvtuner.supported_models import has_indexes

if TYPE_CHECKING:
    from kvtuner.pipeline.planning.capacity_plan import CapacityPlan
    from kvtuner.pipeline.planning.search_cost import SearchCost

_COLUMNS: Final = 80


def capacity_lines(plan: CapacityPlan) -> list[str]:
    """The plan for a person, in lines of 80 columns; a command may be longer where one of its words is."""
    advice, search = advice_sentences(plan), search_sentences(plan)
    lines = [*_wrapped(plan_title(plan)), "", *memory_facts(plan).lines(_COLUMNS), ""]
    lines += [*scheme_table(plan).lines(_COLUMNS), ""]
    lines += _wrapped(" ".join(advice))
    if plan.search_command is not None:
        lines += ["", *_command_lines(plan.search_command), "", *_wrapped(" ".join(search))]
    lines += ["", "how this is counted:"]
    for text in assumptions(plan):
        lines += textwrap.wrap(text, _COLUMNS, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def plan_title(plan: CapacityPlan) -> str:
    """The model and its architecture."""
    return f"{public_name(str(plan.options.model))} ({printable(plan.shape.architecture)})"


def memory_facts(plan: CapacityPlan) -> Table:
    """The requests, the GPUs, and the parts of the memory of each."""
    server, options = plan.server, plan.options
    memory = size_text(server.memory_mib * MIB)
    gpu = options.gpu if options.gpu and options.memory is None else "GPU"
    requests = f"{count(options.concurrency)} of " if options.concurrency else ""
    ranks = f" (TP {options.tp_size} x PP {options.pp_size})" if max(options.tp_size, options.pp_size) > 1 else ""
    fraction = f"static share {server.static_fraction:g}"
    states = [("states", f"{size_text(server.states_bytes)} of the cache, {count(server.num_states)} of them")]
    return Table.of_facts([
        ("requests", f"{requests}{count(server.context_length)} tokens"),
        ("GPUs", f"{options.tp_size * options.pp_size} x {gpu} of {memory}{ranks}"),
        ("SGLang keeps", f"{size_text(server.kept_bytes)} of each for activations and graphs ({fraction})"),
        ("weights", f"{size_text(server.rank_weights_bytes)} of each, {plan.weights.origin}"),
        ("cache", f"{size_text(server.pool_bytes)} of each"),
        *(states if server.states else ()),
    ])  # fmt: skip


def scheme_table(plan: CapacityPlan) -> Table:
    """The capacity of every scheme; the last column says whether all requests asked for fit."""
    wanted, bf16 = plan.options.concurrency, plan.schemes[0].tokens
    headers = ["", "bits", "B/token", "tokens", "requests", "x bf16"]
    headers += [f"{count(wanted)} fit"] if wanted else []
    rows = []
    for row in plan.schemes:
        ratio = f"{row.tokens / bf16:.2f}" if bf16 else "-"
        cells = [
            row.title,
            fixed(row.effective_bits, 3),
            *map(count, (row.bytes_per_token, row.tokens, row.requests)),
            ratio,
        ]
        rows.append([*cells, "yes" if row.requests >= wanted else "no"] if wanted else cells)
    return Table(headers, rows)


def advice_sentences(plan: CapacityPlan) -> list[str]:
    """The cheapest scheme that suffices, and what to do."""
    advice, wanted = plan.advice, plan.options.concurrency or 1
    requests = f"{count(wanted)} request{'s' * (wanted != 1)} of {count(plan.shape.context_length)} tokens"
    fit = "fit" if wanted != 1 else "fits"
    if advice.choice in (REFERENCE, FP8):
        flag = "" if advice.choice == REFERENCE else ", which is --kv-cache-dtype fp8_e4m3 of SGLang"
        sentences = [f"Cheapest: {requests} {fit} in {advice.choice}{flag}; that needs no search."]
        more = "For more at once, give --concurrency. The search of all budgets that fit:"
        return sentences + [more] * bool(advice.budgets)
    if advice.choice == "none":
        smallest = next((row for row in reversed(plan.schemes) if row.kind == "uniform"), None)
        held = f"; {smallest.name} holds {count(smallest.requests)}" if smallest else ""
        remedies = [f"take --tp-size {advice.tp_size}"] if advice.tp_size else []
        remedies += ["a GPU with more memory", "a smaller --context-length"]
        remedies += ["fewer --concurrency"] if wanted > 1 else []
        return [f"Nothing that a search may choose holds {requests}{held}: {', or '.join(remedies)}."]
    if advice.effective_bits is None:
        return [f"Cheapest: {requests} {fit} in neither {REFERENCE} nor {FP8}. The search of all budgets that fit:"]
    return [
        f"Cheapest: {requests} {fit} in neither {REFERENCE} nor {FP8}, so search.",
        f"The largest budget with which {'they fit' if wanted != 1 else 'it fits'} is {advice.budgets[0]}, which is"
        f" {advice.effective_bits:.2f}bpe in stored bits:",
    ]


def search_sentences(plan: CapacityPlan) -> list[str]:
    """The estimated cost of the search."""
    cost = plan.search
    if cost is None:
        return []
    scores = "logits, and scores of an index" if has_indexes(plan.shape.config) else "logits"
    memory = (
        f"Memory: {size_text(cost.memory_bytes)}, {size_text(cost.weights_bytes)} of weights and at most"
        f" {size_text(cost.working_bytes)} of prompts' keys and values, results of shared first layers and {scores},"
        " besides activations"
    )
    if cost.memory_bytes > plan.server.memory_mib * MIB:
        streamed = "search with --stream, which reads one layer after another"
        if plan.options.tp_size * plan.options.pp_size > 1:
            memory += (
                "; more than one of these GPUs has: install accelerate, which spreads layers over all, start torchrun"
                f" with --tp, which gives each a part of every layer, or {streamed}"
            )
        else:
            memory += f"; more than this GPU has: {streamed}, on one with more memory, or on several with accelerate"
    return [
        f"It runs at most {count(cost.forward_tokens)} tokens through the model, of which each meets"
        f" {count(cost.parameters)} parameters.",
        _time_sentence(plan, cost),
        f"{memory}.",
        "Add --data with prompts like yours.",
    ]


def assumptions(plan: CapacityPlan) -> list[str]:
    """The rules that the figures follow, and what they leave out."""
    options, rows = plan.options, [row for row in plan.schemes if row.copies_bytes_per_request]
    workspace = max(row.workspace_bytes for row in plan.schemes)
    attention = (
        f"attention over packed rows works in up to {size_text(workspace)} of each GPU, which is taken from its cache"
    )
    if plan.shape.geometry.is_latent:
        attention += "; every tensor-parallel rank holds whole latents (MLA)"
        attention += ", whose kernels ran on no GPU and refuse a B200"
    keys = plan.shape.cache.index_bytes()
    is_known = plan.shape.architecture in INDEXED
    if keys and is_known:
        attention += "; beside an index SGLang's plugin serves latents on an H100 or H200 alone, and under an exact"
        attention += " window (--residual-length above 0) unpacks what is selected in every step"
    page = f"{INDEXED_PAGE_SIZE} tokens" if keys else "one token"
    texts = [
        f"a server of SGLang 0.5.23 with {plan.server_flags}, pages of {page}, and defaults otherwise",
        "a rank holds an equal share of the weights; the GPU is empty but for the server; what its driver and CUDA's"
        " context take is not counted",
        attention,
        "bits are stored bits of an element, with scales; they and bytes are of the fullest rank, and of a budget the"
        " most that it allows",
    ]
    native = plan.schemes[0].window_bytes_per_token
    if native:
        share = window_share(plan.shape.architecture)
        kept = "all tokens" if share == 1 else f"{share:g} of the tokens (--swa-full-tokens-ratio)"
        texts.append(
            f"bytes and bits are of full layers; of those with a window SGLang keeps {kept}, unquantized, which takes"
            f" {count(math.ceil(native))} bytes more of each token"
        )
    if keys:
        kept = "as SGLang keeps them, in fp8" if is_known else "in fp8"
        texts.append(
            "bytes and bits are of latents; the keys by which an index selects what a query reads take"
            f" {count(keys)} bytes more of each token {kept}; latents in fp8 have scales, and rotary channels 16 bits"
        )
        if not is_known:
            texts.append("SGLang does not know the index of this model; KVTunerCache runs it")
    server = plan.server
    if server.states is not None:
        most = server.num_states // server.states.per_request
        texts.append(
            f"layers keep a state of {count(server.states.num_bytes)} bytes beside keys, unquantized; SGLang gives"
            f" states {STATES_SHARE:g} of the bytes of tokens (--mamba-full-memory-ratio), and a running request up to"
            f" {server.states.per_request} of them, so that {count(most)} may run; a prefix that is kept"
            " takes one"
        )
    if rows:
        window = plan.window
        texts.append(
            f"uniforms and budgets keep {window}: {count(rows[0].copies_bytes_per_request)} bytes for each request that"
            " may run, and one more"
            + ("" if options.concurrency else "; without --max-running-requests at most an eighth of the cache")
        )
    if plan.has_refused_copies:
        texts.append(
            "where 0 tokens fit beside such copies, they would take more than half of the cache, and a server refuses"
            " to start; give a smaller --concurrency or --residual-length"
        )
    return texts


def duration(hours: float) -> str:
    """A length of time to two digits, in the unit that suits it."""
    minutes = 60 * hours
    if minutes < 1:
        return "less than a minute"
    return (
        f"{minutes:.0f} minutes" if minutes < 90 else f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    )


def _time_sentence(plan: CapacityPlan, cost: SearchCost) -> str:
    if cost.hours is None or plan.options.gpu is None:
        return "Time: not estimated, since no --gpu tells the rate of the GPU."
    gpu = find_gpu(plan.options.gpu)
    return (
        f"Time on one {gpu.name}: {duration(cost.hours)}, an estimate that was never measured"
        f" ({OPERATIONS_PER_PARAMETER} operations per parameter and token at {USED_SHARE:.0%} of its"
        f" {gpu.tflops:g} TFLOPS in 16 bits)."
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _command_lines(command: str) -> list[str]:
    """A command in lines that a shell takes as one."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) + 5 > _COLUMNS and lines[-1]:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return [f"  {line}" for line in lines]
