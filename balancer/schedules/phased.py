"""Phased: all encoder forwards, spread over the ranks, then the LLM's pipeline, then all encoder backwards.

    EF_0 EF_1 .. EF_{U-1} | LLM (interleaved) 1F1B | EB_0 EB_1 .. EB_{U-1}        units as in `nested`

The compute-efficient family that BigMac improves on: no bubble beside the LLM's own and no common cut, so uneven
encoder work only meets at the two ends. Price: every rank holds the encoder activations of all its M / P micro-batches.

A generator is placed as in `nested`, unit by unit inside the pipeline: a phase of its own between all forwards and all
backwards would make the LLM hold all M micro-batches, and nobody would run that.
"""

import numpy as np

from balancer.schedules.nested import Cut, generator_cuts, insert, place_llm
from balancer.schedules.program import BACKWARD, FORWARD, Program, Request


def programs(request: Request) -> list[Program]:
    """The program of every rank."""
    spread = place_llm(request)
    cuts = generator_cuts(spread)
    if spread.encoder is not None:
        units = range(spread.num_units)
        end = int(np.iinfo(np.int64).max)
        cuts.append(Cut(at=-1, acts=tuple((FORWARD, spread.encoder, unit) for unit in units)))
        cuts.append(Cut(at=end, acts=tuple((BACKWARD, spread.encoder, unit) for unit in units)))
    return insert(request, spread, cuts)
