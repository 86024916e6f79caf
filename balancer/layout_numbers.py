"""The whole numbers that layouts are made of, checked one by one: degrees, micro-batches, chunks.

    value as given (int, numpy integer, anything)  -->  int within its limits, or LayoutError with value and remedy

The limits themselves lie in `balancer.layout`, beside what they limit.
"""

from balancer.errors import LayoutError
from balancer.whole_numbers import whole_number


def degree(name: str, value: object, at_most: int) -> int:
    """A degree of parallelism, from 1 on."""
    return whole_number(
        name,
        value,
        error=LayoutError,
        below="a degree of parallelism is at least 1",
        above=f"a degree of parallelism is at most {at_most} here",
        at_least=1,
        at_most=at_most,
    )


def microbatch_count(name: str, value: object, *, at_most: int, below: str) -> int:
    """A number of micro-batches, from 1 on; `below` says why not fewer."""
    return whole_number(
        name,
        value,
        error=LayoutError,
        below=below,
        above=f"a step has at most {at_most} micro-batches",
        at_least=1,
        at_most=at_most,
    )


def chunk_count(domain: str, value: object, *, at_most: int) -> int:
    """Stages that each rank of a domain holds."""
    return whole_number(
        f"domain {domain}: num_chunks",
        value,
        error=LayoutError,
        below="a domain has at least one chunk",
        above=f"a domain has at most {at_most} stages",
        at_least=1,
        at_most=at_most,
    )


def check_multiple(num_microbatches: int, multiple: int) -> None:
    """Check a fixed number of micro-batches against its granularity.

    Raises:
        LayoutError: no multiple; the text has the arithmetic and the nearest ones.
    """
    whole, rest = divmod(num_microbatches, multiple)
    if not rest:
        return
    nearest = f"{whole * multiple} or {(whole + 1) * multiple}" if whole else f"{multiple}"
    raise LayoutError(
        f"num_microbatches={num_microbatches} is no multiple of {multiple} "
        f"({num_microbatches} = {whole} x {multiple} + {rest}); use {nearest}"
    )
